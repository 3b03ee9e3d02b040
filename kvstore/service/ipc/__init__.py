"""The Unix-socket side of the sidecar: one connection per engine, control messages only."""

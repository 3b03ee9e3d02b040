"""The sidecar's Unix-socket server: one connection per engine, control messages only."""

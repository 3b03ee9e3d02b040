"""The engine's side of the sidecar: messages, the connection, a client with the store interface."""

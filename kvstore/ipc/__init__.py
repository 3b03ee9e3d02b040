"""The client side of the sidecar: messages, connection, and a client with the store interface."""

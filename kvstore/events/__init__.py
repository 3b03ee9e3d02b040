"""KV-cache events in vLLM's wire format: codec, ZeroMQ sockets, publisher, index of engines."""

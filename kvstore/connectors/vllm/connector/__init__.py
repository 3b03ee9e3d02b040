"""KVStoreConnector: blocks move between the KV cache of vLLM and the slab of the sidecar."""

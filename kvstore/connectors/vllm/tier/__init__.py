"""KVStoreTier: a secondary tier below the host pool of vLLM."""

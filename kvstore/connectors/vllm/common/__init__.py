"""Modules that KVStoreConnector and KVStoreTier share. None of them imports vllm."""

"""The block: its key, its hash, its size for a model, and its frame at rest."""

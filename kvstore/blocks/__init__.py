"""What a block is: its key, the hash chain over tokens, its size for a model, its frame at rest."""

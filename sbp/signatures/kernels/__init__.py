"""What rows run on the shards where that is not the primitive itself."""

"""Programs that rows run on shards where the primitive itself is not enough."""

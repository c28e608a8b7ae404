"""Programs that use sbp by its public names."""

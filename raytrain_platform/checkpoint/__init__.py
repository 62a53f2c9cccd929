"""State committed to storage, read only when no replica is left."""

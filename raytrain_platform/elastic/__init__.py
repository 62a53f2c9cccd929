"""Who takes part: the shards each worker computes, and the agreement on each generation."""

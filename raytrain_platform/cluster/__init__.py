"""Ray clusters: connecting to one, making one on a laptop, and what one can offer."""

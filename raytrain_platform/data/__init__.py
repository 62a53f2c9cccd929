"""Which samples make up a step, and how they get there."""

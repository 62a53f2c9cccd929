"""Measurements of the platform and of its rivals, each with the goal it must reach."""

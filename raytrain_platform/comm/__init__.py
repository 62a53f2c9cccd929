"""How workers exchange tensors: process groups with bounded waits, and the exact reduction."""

"""Runnable jobs on real data."""

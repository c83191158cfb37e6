"""Measuring: what a segment with a strategy costs, kept for the next time."""

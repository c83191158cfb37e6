"""Estimates of a choice's time and memory; devices described for planning."""

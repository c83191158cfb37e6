"""Described clusters, compiling for them, and joining of processes."""

"""Described clusters, and processes that are joined."""

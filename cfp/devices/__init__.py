"""Described clusters, and one GPU that stands in for one of N devices."""

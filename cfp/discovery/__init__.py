"""Sharding rules of functions that nothing can look into, found by running them."""

"""Estimates of a choice's time and memory; described devices; compiling for them."""

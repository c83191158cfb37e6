"""Estimates of a choice's time and memory, without compiling it."""

"""Estimates of a choice's time and memory, computed without measurements."""

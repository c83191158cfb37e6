"""Checks of a plan: its results against a reference, and its step times."""

"""Checks of a plan: its results against one device, and its step times."""

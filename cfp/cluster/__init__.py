"""Checks of machines, and planning on a Ray cluster."""

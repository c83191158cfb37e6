"""Kernels that may compute parts of a step: one protocol, and the list of kinds."""

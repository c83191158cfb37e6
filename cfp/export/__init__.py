"""A plan as a Python module that runs a step with plain JAX, and without cfp."""

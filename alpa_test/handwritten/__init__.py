"""Shardings written by a person, for the models of the zoo.

`tables` holds the rules, `step` turns one into a compiled training step. They go
through plain `jax.jit`: nothing here knows cfp's planner.
"""

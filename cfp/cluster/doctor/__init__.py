"""``cfp doctor``: what works on this machine, and what to do about the rest.

A check is a function from a `Machine` to a `Result`. Nothing here imports JAX or any
other package: what could be missing, break, hang or end its process is tried in a
process of its own (`probes`), with a time limit.
"""

"""``cfp doctor``: checks of this machine, with a remedy for each failure.

A check is a function from a `Machine` to a `Result`. Nothing here imports JAX or any
other package: an import, a driver or a compile that may hang or end its process runs in
a process of its own (`probes`), with a time limit.
"""

"""The program: a step function as StableHLO with a sharding rule on every op.

This room alone touches MLIR. Everything behind it is frozen Python data.
"""

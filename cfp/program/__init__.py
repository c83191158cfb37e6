"""The program: a step function as StableHLO with a sharding rule on every op.

Only this package uses MLIR. Its results are frozen Python records.
"""

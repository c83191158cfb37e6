"""The program: a step function as StableHLO, with sharding rules of most ops.

Only this package uses MLIR's API. A `Program` is a frozen Python record.
"""

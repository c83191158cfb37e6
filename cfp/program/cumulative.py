"""The sharding rule of cumulative sums as JAX lowers them for GPUs.

From jax 0.12 on ``jax.numpy.cumsum`` is ``chlo.scan`` there, for which
``sdy-populate-op-sharding-rules`` has no rule. XLA shards it along all dims but the one
that it goes over.
"""

from __future__ import annotations

from jax.extend.mlir import ir

from cfp.program.rules import Rule

SCAN = "chlo.scan"


def scan_rule(op: ir.Operation, shape: tuple[int, ...]) -> Rule:
    """Returns the rule of a scan of one array: whole along the dim that it goes over.

    Args:
        op: the scan, of an array and what it starts with; its results are the array of
            sums and the last of them.
        shape: of the array.
    """
    dim = ir.IntegerAttr(op.attributes["dimension"]).value
    dims = tuple((d,) for d in range(len(shape)))
    pair = dims, dims[:dim] + dims[dim + 1 :]
    return Rule(shape, pair, pair, fixed=frozenset({dim}))

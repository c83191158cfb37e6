"""Memory of attention in chunks while it runs.

Of the scores there is one chunk in each form that it goes through: as it is made, the
weights, the weights' gradient, and its own. Beside it are the chunks of what is read
and made, and whole gradients in float32, since each chunk adds to them. What it reads
stays until its end: the program that it takes the place of lets go of one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, prod

import jax.numpy as jnp

from cfp.attention import chunked
from cfp.attention.matching.found import Found, Pass
from cfp.attention.matching.graft import Way
from cfp.attention.matching.matches import GATHERED, ROUNDS
from cfp.attention.problem import Problem
from cfp.program.graph import Program

_FLOAT = 4  # Bytes of a number in float32.


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Ops in whose place an attention is computed: from the first to the last.

    Attributes:
        match: the op by which the attention is known.
        first, last: ids of ops.
        is_backward: whether its gradients are computed.
    """

    match: int
    first: int
    last: int
    is_backward: bool


def spans_of(program: Program, found: Found) -> list[Span]:
    """Finds the passes in which a program computes an attention."""

    def span(one: Pass, is_backward: bool) -> Span:
        readers = [t.use[0] for t in one.reads.values() if t.use is not None]
        makers = [program.values[t.value].producer for t in one.makes.values()]
        first, last = min(readers + makers), max(makers)
        return Span(match=found.op, first=first, last=last, is_backward=is_backward)

    spans = [span(one, False) for one in found.forward]
    return spans + ([span(found.backward, True)] if found.backward else [])


def working_bytes(
    problem: Problem, way: Way, sizes: Mapping[str, int], is_backward: bool
) -> int:
    """Computes a device's memory beside the values that a pass reads.

    For the backward pass that is the output, too; gradients, in float32, are counted.

    Args:
        problem: of the whole mesh.
        way: how it is computed, in chunks.
        sizes: of the mesh's axes.
        is_backward: which pass.
    """

    def ranks(roles: Iterable[str]) -> int:
        return prod(sizes[axis] for axis, role in way.roles if role in roles)

    own = jnp.dtype(problem.dtype).itemsize
    batch = problem.batch / ranks(("batch",))
    heads, kv_heads = (
        batch * ceil(n / ranks(("heads",))) for n in (problem.heads, problem.kv_heads)
    )
    queries = _in_chunks(problem.queries / ranks(ROUNDS | GATHERED))
    keys = _in_chunks(problem.keys / ranks(ROUNDS))
    rows, columns = min(queries, chunked.CHUNK), min(keys, chunked.CHUNK)
    has_loops = max(queries, keys) > chunked.CHUNK
    scores = heads * rows * columns
    # Numbers for each query, and for each key.
    query, key = heads * problem.head_dim, kv_heads * problem.head_dim
    # Products are in float32, and what products read is in the type of the operands.
    if not is_backward:
        chunks = rows * query * (own + _FLOAT) + 2 * columns * key * own
        needed = scores * (_FLOAT + own) + queries * query * _FLOAT
        return round(needed + has_loops * chunks)
    chunks = rows * query * (3 * own + _FLOAT) + 2 * columns * key * (own + _FLOAT)
    needed = 2 * scores * (_FLOAT + own) + has_loops * chunks
    needed += queries * query * (own + _FLOAT) + 2 * keys * key * _FLOAT
    if ranks(ROUNDS) > 1:
        # The keys and values that follow, and of gradients what arrives and is new.
        needed += 2 * keys * key * (own + 2 * _FLOAT)
    return round(needed)


def _in_chunks(tokens: float) -> int:
    """Rounds a number of tokens up to whole chunks."""
    whole, chunk = ceil(tokens), chunked.CHUNK
    return whole if whole <= chunk else ceil(whole / chunk) * chunk

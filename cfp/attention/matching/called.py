"""Attentions that a kernel of the step's own computes already.

Such a kernel is a custom_partitioning op, one for the forward and one for the backward
pass. What it computes is read from its own program, and nothing has to be inferred. By
its sharding rule sequences and heads may be sharded, and no tokens: it gathers those.
Here its rule gets a factor for tokens, too, for plans to choose; where they do, a ring
or gathered keys take the op's place. As the log-sum-exp that passes from one op to the
other is the same number in every implementation, each op is replaced by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from cfp.analysis.strategies import FactorAxes, tensor_spec
from cfp.attention import cudnn
from cfp.attention.kernels import KERNELS
from cfp.attention.matching.found import Found, Pass, Tensor
from cfp.attention.matching.functions import NAME, Way
from cfp.attention.problem import AttentionProblem, problem_of
from cfp.attention.ring import Ring, backward, forward, from_zigzag, to_zigzag
from cfp.attention.strategy import BATCH, HEADS, AttentionStrategy
from cfp.program.graph import (
    Op,
    Program,
    Spec,
    dtype_bytes,
    numpy_dtype,
    searched_once,
)
from cfp.program.partitioned import call_of
from cfp.program.replace import Replacement, Stage
from cfp.program.rules import Dims, Rule

GRADIENT = f"{NAME} gradient"  # The name of replacements of backward passes.
_TOKENS_OF_LSE = 2  # It is [batch, heads, tokens].


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """One pass of an attention that a kernel of the step's own computes.

    Attributes:
        kernel: the name of the same kernel in `cfp.attention`.
        shapes: of queries, keys and values, as [batch, tokens, heads, head_dim].
        refusal: why its tokens are not sharded; "" if they may be.
    """

    op: int
    kernel: str
    call: cudnn.Call
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    refusal: str = ""

    @property
    def problem(self) -> AttentionProblem:
        """The same as a problem for other kernels, if nothing of it is unknown."""
        q, k, v = self.shapes
        return problem_of(q, k, v, causal=self.call.causal, scale=self.call.scale)

    @property
    def name(self) -> str:
        """The name of a replacement."""
        return GRADIENT if self.call.is_backward else NAME

    def place(self, letter: str) -> int:
        """The dim of queries that runs over "B", "T", "N" (heads) or "H"."""
        return self.call.layout.index(letter)


@searched_once
def called_attentions(program: Program) -> Mapping[int, Called]:
    """All of a program, by their ops."""
    read = (_read(program, op) for op in program.ops if op.kind == "custom_call")
    return {one.op: one for one in read if one is not None}


def called_among(program: Program, ops: Collection[int]) -> list[Called]:
    """Those whose tokens may be sharded, among some top-level ops."""
    inside = set(ops)
    return [
        one
        for op, one in called_attentions(program).items()
        if not one.refusal and program.top_level(op) in inside
    ]


def _read(program: Program, op: Op) -> Called | None:
    found = call_of(op.attributes)
    call = cudnn.read_call(found.whole) if found is not None else None
    if found is None or call is None:
        return None
    shapes = tuple(
        jax.ShapeDtypeStruct(_in_order(aval.shape, call), aval.dtype)
        for aval in (found.callbacks.operands[place] for place in call.reads[:3])
    )
    why = _refusal(call, shapes)
    return Called(op=op.id, kernel="cudnn", call=call, shapes=shapes, refusal=why)


def _in_order(shape: Sequence[int], call: cudnn.Call) -> tuple[int, ...]:
    """A shape as [batch, tokens, heads, head_dim]."""
    return tuple(shape[call.layout.index(letter)] for letter in "BTNH")


def _refusal(call: cudnn.Call, shapes: Sequence[jax.ShapeDtypeStruct]) -> str:
    queries, keys = (one.shape[1] for one in shapes[:2])
    if call.unknown:
        return f"a kernel computes it, with {call.unknown}: tokens are not sharded"
    if queries != keys:
        return (
            f"a kernel computes it, with {queries} queries and {keys} keys: tokens are "
            "not sharded"
        )
    return ""


# ------------------------------------------------------------------------ strategies


def with_token_factors(program: Program) -> Program:
    """The same program, with rules by which plans may shard tokens, too.

    Rules are for planning: the module keeps those by which the op itself is sharded.
    """
    able = [one for one in called_attentions(program).values() if not one.refusal]
    if not able:
        return program
    ops = [*program.ops]
    for one in able:
        ops[one.op] = replace(ops[one.op], rule=_with_tokens(one, ops[one.op]))
    return replace(program, ops=tuple(ops))


def _with_tokens(one: Called, op: Op) -> Rule:
    """A rule in which the tokens of all operands and results are one factor."""
    rule, tokens = op.rule, one.place("T")
    if rule is None:  # Nothing else of it may be sharded.
        found = call_of(op.attributes)
        assert found is not None, "it was read of it"
        rule = found.factors
    [factor] = rule.operands[0][tokens]

    def joined(dims: Dims) -> Dims:
        place = tokens if len(dims) == len(one.call.layout) else _TOKENS_OF_LSE
        return (*dims[:place], (factor,), *dims[place + 1 :])

    operands = [*rule.operands]
    for place in one.call.reads:
        operands[place] = joined(operands[place])
    results = [*map(joined, rule.results)]
    return replace(
        rule,
        operands=tuple(operands),
        results=tuple(results),
        fixed=rule.fixed - {factor},
        even=rule.even | {factor},
    )


_DIMS = MappingProxyType({"B": "sequences", "T": "tokens", "N": "heads"})


def axes_of(
    program: Program, one: Called, axes: FactorAxes
) -> dict[str, tuple[str, ...]]:
    """The axes that shard the sequences "B", tokens "T", heads "N" of an attention.

    Args:
        program: it has the rules of `with_token_factors`.
        axes: for each of its op's factors, its axes.
    """
    rule = program.ops[one.op].known_rule
    factors = {x: rule.major(rule.operands[0][one.place(x)]) for x in _DIMS}
    return {x: () if f is None else axes[f] for x, f in factors.items()}


def dims_over(program: Program, one: Called, axes: FactorAxes) -> dict[str, str]:
    """Words for the dims of an attention that axes shard, by axis."""
    found = axes_of(program, one, axes).items()
    return {axis: _DIMS[letter] for letter, own in found for axis in own}


def exchanges(
    program: Program,
    one: Called,
    axes: FactorAxes,
    sizes: Mapping[str, int],
    is_replaced: bool,
) -> Iterator[tuple[float, Spec, tuple[str, ...], Spec]]:
    """Tensors that an attention with sharded tokens sends: keys, values, gradients.

    Args:
        program, one, axes: as of `axes_of`.
        sizes: of the mesh's axes.
        is_replaced: whether something takes the op's place; otherwise all that it reads
            is gathered.

    Yields:
        (bytes of the whole tensor, its sharding, axes it is summed over, its sharding
        then), as transitions of a layout have them.
    """
    op, tokens = program.ops[one.op], axes_of(program, one, axes)["T"]
    moved = one.call.reads[1:3] if is_replaced else one.call.reads
    for place in moved if tokens else ():
        value = program.values[op.operands[place]]
        dims = op.known_rule.operands[place]
        have = tensor_spec(op.known_rule, dims, axes, sizes)
        whole = tuple(tuple(a for a in dim if a not in tokens) for dim in have)
        yield value.size_bytes, have, (), whole
        if is_replaced and one.call.is_backward:  # They travel in float32.
            wide = dtype_bytes("f32") / dtype_bytes(value.dtype)
            yield wide * value.size_bytes, whole, tokens, have


def way_of_called(
    program: Program, one: Called, implementation: str, axes: FactorAxes, spread: str
) -> Way | str:
    """The way in which a kernel computes an attention with sharded tokens, or why none.

    Args:
        program, one, axes: as of `axes_of`.
        spread: the role of axes that shard tokens.
    """
    found = axes_of(program, one, axes)
    if not found["T"]:
        return "a kernel of the step's own computes it"
    roles = {"B": BATCH, "T": spread, "N": HEADS}
    return Way(
        implementation, tuple((a, roles[x]) for x, own in found.items() for a in own)
    )


def indivisible(
    problem: AttentionProblem, way: Way, mesh: Mapping[str, int]
) -> str | None:
    """Returns the reason why ranks would not have equal parts, or None."""
    strategy = AttentionStrategy.of(dict(way.roles), dict(mesh))
    for what, count, parts in (
        ("tokens", problem.queries, strategy.token_multiple),
        ("heads", problem.kv_heads, strategy.parts(HEADS)),
    ):
        if count % parts:
            return f"{count} {what} do not divide into {parts} parts"
    return None


# ------------------------------------------------------------------------ replacement


def found_of(program: Program, one: Called) -> Found:
    """The form in which attentions that are written out are found."""
    op, call = program.ops[one.op], one.call
    names = ("q", "k", "v", "lse", "out", "dout")
    reads = {
        name: Tensor(op.operands[place], (op.id, place), ())
        for name, place in zip(names, call.reads, strict=False)
    }
    names = ("dq", "dk", "dv") if call.is_backward else ("out", "lse")
    makes = {
        name: Tensor(v, None, ()) for name, v in zip(names, op.results, strict=False)
    }
    one_pass, result = Pass(reads, makes), Tensor(op.results[0], None, ())
    return Found(
        op=op.id,
        source=op.source,
        scores=result,
        forward=() if call.is_backward else (one_pass,),
        backward=one_pass if call.is_backward else None,
    )


def replacement_of(program: Program, one: Called, way: Way) -> Replacement:
    """The replacement of an attention's op."""
    op = program.ops[one.op]
    made = tuple(
        (value.shape, numpy_dtype(value.dtype).name)
        for value in (program.values[v] for v in op.results)
    )
    functions = CalledFunctions(one.problem, way, one.call, made)
    reads = tuple((op.id, place) for place in one.call.reads)
    return Replacement(one.name, op.id, (Stage(reads, op.results),), functions)


@dataclass(frozen=True, slots=True)
class CalledFunctions:
    """The function that takes the place of one, see `cfp.program.replace`.

    Attributes:
        problem, way, call: what is computed, how, and in which form.
        makes: shapes and dtypes of its results.
        jax_version: kernels and their times may depend on it.
    """

    problem: AttentionProblem
    way: Way
    call: cudnn.Call
    makes: tuple[tuple[tuple[int, ...], str], ...]
    jax_version: str = jax.__version__

    @property
    def how(self) -> tuple[str, ...]:
        """See `Way.how`."""
        return self.way.how

    def stages(self, mesh: Mesh) -> Sequence[Any]:
        """One function, see `cfp.program.replace`."""
        return [partial(self._run, mesh)]

    def _run(self, mesh: Mesh, *reads: Array) -> list[Array]:
        strategy = AttentionStrategy.of(dict(self.way.roles), dict(mesh.shape))
        kernel = KERNELS[self.way.implementation]
        ring = Ring.of(strategy, kernel, self.problem.scores, self.problem.mask())
        given = [self._with_tokens_second(x) for x in reads]
        if ring.zigzag:
            given = [to_zigzag(x, ring.ranks) for x in given]
        # All have batch, tokens and heads first; the log-sum-exp has no more.
        spec: PartitionSpec = strategy.spec()
        made = jax.shard_map(
            partial(_compute, ring, self.call.is_backward),
            mesh=mesh,
            in_specs=(spec,) * len(given),
            out_specs=(spec,) * (3 if self.call.is_backward else 2),
            check_vma=False,
        )(*given)
        if ring.zigzag:
            made = [from_zigzag(x, ring.ranks) for x in made]
        pairs = zip(map(self._as_called, made), self.makes, strict=False)
        return [x.reshape(shape).astype(jnp.dtype(d)) for x, (shape, d) in pairs]

    def _with_tokens_second(self, x: Array) -> Array:
        heads_first = x.ndim < len(self.call.layout) or self.call.layout == "BNTH"
        return x.swapaxes(1, 2) if heads_first else x

    _as_called = _with_tokens_second  # It is its own inverse.


def _compute(ring: Ring, is_backward: bool, *reads: Array) -> tuple[Any, ...]:
    """Output and log-sum-exp; or, where these are read, too, the gradients."""
    q, k, v, *more = reads
    if not is_backward:
        out, (*_, lse) = forward(q, k, v, None, None, ring)
        return out, lse
    lse, out, dout = more
    return backward(ring, (q, k, v, None, None, out, lse), dout)[:3]


def work_ratio(one: Called, way: Way, sizes: Mapping[str, int]) -> float:
    """The work of the rank with the most, by that of an equal share.

    Under a causal mask the last rank of a ring sees the keys of all.
    """
    ranks = prod(sizes[axis] for axis, r in way.roles if r not in (BATCH, HEADS))
    is_even = any(role == "zigzag" for _, role in way.roles)
    return 1.0 if is_even or not one.problem.causal else 2.0 - 1.0 / ranks

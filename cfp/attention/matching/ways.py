"""Ways to compute an attention that was found, and the ops that replace it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from cfp.attention.call import refusal
from cfp.attention.kernels import KERNELS
from cfp.attention.matching.found import Found, Letters, aligned
from cfp.attention.matching.functions import (
    BIAS,
    KEYS,
    LENGTHS,
    NAME,
    AttentionFunctions,
    PassShapes,
    Shaped,
    Way,
    product,
)
from cfp.attention.matching.meaning import Proved, heads_of
from cfp.attention.matching.values import FLOATS
from cfp.attention.problem import AttentionProblem
from cfp.attention.strategy import AttentionStrategy
from cfp.errors import CfpError
from cfp.program.graph import Program, numpy_dtype
from cfp.program.replace import Replacement, Stage, Use, is_in_order


def problem_of_passes(
    program: Program, found: Found, passes: Sequence[Proved]
) -> AttentionProblem:
    """Returns a found attention as a problem for kernels."""
    sizes, first = found.sizes, passes[0]
    meaning, heads = first.meaning, heads_of(first.one)
    every = [one.meaning for one in passes]
    batch = [x for x in sizes if x[0] == "b" and x != heads]
    groups = [x for x in sizes if x[0] == "q" and x != meaning.tokens]
    kv_heads = sizes.get(heads, 1)
    values = [program.values[first.one.reads[name].value] for name in ("q", "k", "v")]
    dtype = jnp.result_type(*(numpy_dtype(value.dtype) for value in values))
    outputs = [one.makes["out"].value for one in found.forward]
    return AttentionProblem(
        batch=product(sizes, batch),
        queries=sizes.get(meaning.tokens, 1),
        keys=sizes["k"],
        heads=kv_heads * product(sizes, groups),
        kv_heads=kv_heads,
        head_dim=max(sizes.get("d", 1), sizes.get("e", 1)),
        dtype=str(dtype),
        causal=all(one.causal for one in every),
        left=meaning.left,
        segments=any(one.has(KEYS) or one.has(LENGTHS) for one in every),
        hides_keys=any(one.has(KEYS) or one.has(LENGTHS) for one in every),
        same_segments=False,
        bias=(is_dense := any(one.is_dense for one in every)),
        dense_mask=is_dense and not any(one.has(BIAS) for one in every),
        rounds_bias=any(one.rounds_bias for one in every),
        open_bias=any(one.open_bias for one in every),
        rounds_output=any(_is_kept_wide(program, v, dtype) for v in outputs),
        scale=meaning.scale,
    )


def _is_kept_wide(program: Program, v: int, dtype: Any) -> bool:
    """True if a value, or what views of it become, is used in a wider dtype."""
    views = ("convert", "transpose", "reshape")

    def is_wide(v: int) -> bool:
        return numpy_dtype(program.values[v].dtype).itemsize > dtype.itemsize

    made = program.made_of([v], lambda op: op.kind in views and is_wide(op.results[0]))
    users = (program.ops[op] for w in made for op, _ in program.users[w])
    is_used = any(op.kind not in views for op in users)
    return is_wide(v) and (is_used or not made.isdisjoint(program.outputs))


def roles_of(
    program: Program,
    found: Found,
    first: Proved,
    axes: Sequence[Sequence[str]],
    spread: str,
) -> tuple[tuple[str, str], ...] | str:
    """The roles of axes in an attention, by the sharding of its scores, or why none.

    Args:
        axes: for each factor of the contraction that makes the scores, its axes.
        spread: the role of axes that shard queries: "all_gather", "ring" or "zigzag".
    """
    rule = program.ops[found.op].known_rule
    letters = dict(
        zip(
            (rule.major(f) for f in rule.results[0]),
            found.scores.letters,
            strict=True,
        )
    )
    heads, roles = heads_of(first.one), []
    for factor, names in enumerate(axes):
        letter = letters.get(factor, "")
        for axis in names:
            if letter == first.meaning.tokens:
                roles.append((axis, spread))
            elif letter and letter == heads:
                roles.append((axis, "heads"))
            elif letter.startswith("b"):
                roles.append((axis, "batch"))
            else:
                return f"axis {axis} shards neither sequences, nor heads, nor queries"
    return tuple(roles)


def refusal_of(
    problem: AttentionProblem, way: Way, sizes: Mapping[str, int], platform: str
) -> str | None:
    """Returns the reason why a problem cannot be computed in a way, or None."""
    if problem.dtype == "float64":
        return "kernels compute in float32 at most, and it is in float64"
    try:
        strategy = AttentionStrategy.of(dict(way.roles) or None, dict(sizes))
    except CfpError as error:
        return str(error)
    return refusal(problem, strategy, KERNELS[way.implementation], platform)


def make_replacements(
    program: Program, found: Found, passes: Sequence[Proved], way: Way
) -> tuple[Replacement, ...]:
    """Returns the replacements for all passes of an attention.

    A backward pass goes on from the last forward pass in its body, if both are the
    same attention of the same operands; otherwise it computes that again.
    """
    forward = [one for one in passes if not one.one.is_backward]
    backward = [one for one in passes if one.one.is_backward]
    partner = next(
        (p for p in reversed(forward) if any(_are_one(p, b) for b in backward)), None
    )
    groups = [[one, *backward] if one is partner else [one] for one in forward]
    groups += [backward] if backward and partner is None else []
    return tuple(_replacement(program, found, way, own) for own in groups)


def _are_one(forward: Proved, backward: Proved) -> bool:
    """True if a backward pass is that of a forward pass in the same body."""
    cores = forward.core, backward.core
    plain = [replace(p.meaning, passes_hidden=False) for p in (forward, backward)]
    sides = [[t.value for t in one.reads] for one in (forward, backward)]
    numbers = [[cores[0].values.number((v, ())) for v in own] for own in sides]
    return (
        cores[0].parent == cores[1].parent
        and plain[0] == plain[1]
        and numbers[0] == numbers[1]
        and all(cores[0].roots[x] == cores[1].roots[x] for x in ("q", "k", "v"))
    )


def _precision(program: Program, found: Found) -> str:
    """The highest precision that the products of an attention are asked for in."""
    ops = [program.ops[op] for op in found.ops]
    texts = [op.attributes for op in ops if op.kind == "dot_general"]
    for name in ("HIGHEST", "HIGH"):
        if any(f"precision {name}>" in text for text in texts):
            return name.lower()
    return "default"


def _replacement(
    program: Program, found: Found, way: Way, passes: Sequence[Proved]
) -> Replacement:
    stages: list[Stage] = []
    passed: list[PassShapes] = []
    for proved in passes:
        one = proved.one
        tensors = [*(one.reads[name] for name in ("q", "k", "v")), *proved.reads]
        is_backward = one.is_backward
        if is_backward:
            tensors.append(one.reads["dout"])
        first = min(program.values[t.value].producer for t in one.makes.values())
        uses = tuple(_early(program, t.use, first) for t in tensors if t.use)
        assert len(uses) == len(tensors), "all that is read is read by an op"
        stages.append(Stage(uses, tuple(t.value for t in one.makes.values())))
        values = [program.ops[op].operands[index] for op, index in uses]
        reads = tuple(
            _shaped(program, v, aligned(t.letters, program.shape(v)))
            for v, t in zip(values, tensors, strict=True)
        )
        makes = tuple(_shaped(program, t.value, t.letters) for t in one.makes.values())
        # A backward pass that follows no forward one computes it like its gradient.
        out = reads[-1] if is_backward else makes[0]
        passed.append(
            PassShapes(is_backward, reads, makes, passed[0].out if passed else out)
        )
    functions = AttentionFunctions(
        passes[-1].meaning,
        way,
        heads_of(passes[0].one),
        tuple(passed),
        _precision(program, found),
    )
    return Replacement(NAME, found.op, tuple(stages), functions)


def _early(program: Program, use: Use, first: int) -> Use:
    """The use of a value; if it is widened behind an op, that of what is widened."""
    op, index = use
    value = program.values[program.ops[op].operands[index]]
    if value.producer < first or program.ops[value.producer].kind != "convert":
        return use
    narrow = program.values[program.ops[value.producer].operands[0]]
    sizes = [numpy_dtype(one.dtype).itemsize for one in (narrow, value)]
    if narrow.dtype not in FLOATS or sizes[0] >= sizes[1]:
        return use
    return _early(program, (value.producer, 0), first)


def _shaped(program: Program, v: int, letters: Letters) -> Shaped:
    value = program.values[v]
    return value.shape, numpy_dtype(value.dtype).name, letters


def out_of_order(program: Program, found: Found, passes: Sequence[Proved]) -> bool:
    """True if some pass reads a value that is made too late to replace the pass."""
    ways = make_replacements(program, found, passes, Way("xla"))
    return not all(is_in_order(program, s) for one in ways for s in one.stages)

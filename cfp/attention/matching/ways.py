"""Ways to compute an attention that was found, and the ops that replace it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from cfp.attention.call import refusal
from cfp.attention.kernels import KERNELS
from cfp.attention.matching.found import Found, Letters, Pass, aligned
from cfp.attention.matching.functions import (
    BIAS,
    NAME,
    AttentionFunctions,
    Meaning,
    PassShapes,
    Shaped,
    Way,
    product,
)
from cfp.attention.problem import AttentionProblem
from cfp.attention.strategy import AttentionStrategy
from cfp.errors import AttentionError
from cfp.program.evaluate import is_float
from cfp.program.graph import Program, numpy_dtype
from cfp.program.replace import Replacement, Stage, Use, is_in_order


def heads_of(found: Found) -> str:
    """The letter by which keys have heads; "" if all queries share theirs."""
    names = [x for x in found.sizes if x[0] == "b"]
    groups = [x for x in found.sizes if x[0] == "q"]
    if len(names) < 2 and len(groups) > 1:
        return ""
    letters = [x for x in found.forward[0].reads["k"].letters if x in names]
    return letters[-1] if letters else ""


def problem_of_found(
    program: Program, found: Found, meaning: Meaning
) -> AttentionProblem:
    """Returns a found attention as a problem for kernels."""
    sizes, heads = found.sizes, heads_of(found)
    batch = [x for x in sizes if x[0] == "b" and x != heads]
    groups = [x for x in sizes if x[0] == "q" and x != meaning.tokens]
    kv_heads = sizes.get(heads, 1)
    reads = found.forward[0].reads
    values = [program.values[reads[name].value] for name in ("q", "k", "v")]
    dtype = jnp.result_type(*(numpy_dtype(value.dtype) for value in values))
    outputs = [one.makes["out"].value for one in found.forward]
    return AttentionProblem(
        batch=product(sizes, batch),
        queries=sizes.get(meaning.tokens, 1),
        keys=sizes["k"],
        heads=kv_heads * product(sizes, groups),
        kv_heads=kv_heads,
        head_dim=sizes.get("d", 1),
        dtype=str(dtype),
        causal=meaning.causal,
        left=meaning.left,
        right=meaning.right,
        segments=bool(meaning.sides) and not meaning.is_dense,
        same_segments=meaning.same_segments,
        bias=meaning.is_dense,
        dense_mask=meaning.is_dense and all(s.kind != BIAS for s in meaning.sides),
        rounds_bias=meaning.rounds_bias,
        rounds_output=any(_is_kept_wide(program, v, dtype) for v in outputs),
        scale=meaning.scale,
        softcap=meaning.softcap,
    )


def _is_kept_wide(program: Program, v: int, dtype: Any) -> bool:
    """True if a value, or what views of it become, is used in a wider dtype."""
    if numpy_dtype(program.values[v].dtype).itemsize <= dtype.itemsize:
        return False
    if v in program.outputs:
        return True
    users = [program.ops[op] for op, _ in program.users[v]]
    if any(op.kind not in ("convert", "transpose", "reshape") for op in users):
        return True
    return any(_is_kept_wide(program, w, dtype) for op in users for w in op.results)


def roles_of(
    program: Program,
    found: Found,
    meaning: Meaning,
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
    heads, roles = heads_of(found), []
    for factor, names in enumerate(axes):
        letter = letters.get(factor, "")
        for axis in names:
            if letter == meaning.tokens:
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
    except AttentionError as error:
        return str(error)
    return refusal(problem, strategy, KERNELS[way.implementation], platform)


def make_replacements(
    program: Program, found: Found, meaning: Meaning, way: Way
) -> tuple[Replacement, ...]:
    """Returns the replacements for all passes of an attention."""
    made = []
    backward = found.backward
    partner = None
    if backward is not None:
        parent = program.ops[_user(backward)].parent
        near = [p for p in found.forward if program.ops[_user(p)].parent == parent]
        partner = near[-1] if near else None
    for one in found.forward:
        passes = [one, backward] if one is partner and backward is not None else [one]
        made.append(_replacement(program, found, meaning, way, passes))
    if backward is not None and partner is None:
        made.append(_replacement(program, found, meaning, way, [backward]))
    return tuple(made)


def _precision(program: Program, found: Found) -> str:
    """The highest precision that the products of an attention are asked for in."""
    texts = [program.ops[op].attributes for op in (found.op, *found.dots.values())]
    for name in ("HIGHEST", "HIGH"):
        if any(f"precision {name}>" in text for text in texts):
            return name.lower()
    return "default"


def _user(one: Pass) -> int:
    use = one.reads["v"].use
    assert use is not None, "a contraction reads it"
    return use[0]


def _replacement(
    program: Program,
    found: Found,
    meaning: Meaning,
    way: Way,
    passes: Sequence[Pass],
) -> Replacement:
    stages: list[Stage] = []
    passed: list[PassShapes] = []
    for one in passes:
        tensors = [one.reads[name] for name in ("q", "k", "v")]
        number = found.passes.index(one)
        tensors += [
            replace(read, use=use)
            for side in found.sides
            for read, use in zip(side.reads, side.uses[number], strict=True)
        ]
        is_backward = "dout" in one.reads
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
        meaning,
        way,
        heads_of(found),
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
    if not is_float(narrow.dtype) or sizes[0] >= sizes[1]:
        return use
    return _early(program, (value.producer, 0), first)


def _shaped(program: Program, v: int, letters: Letters) -> Shaped:
    value = program.values[v]
    return value.shape, numpy_dtype(value.dtype).name, letters


def out_of_order(program: Program, found: Found, meaning: Meaning) -> bool:
    """True if some pass reads a value that is made too late to replace the pass."""
    ways = make_replacements(program, found, meaning, Way("xla"))
    return not all(is_in_order(program, s) for one in ways for s in one.stages)

"""All cross-entropies of a program, proved, and their computation under a layout.

A proof evaluates the program's ops in float64 at a few coordinates of each dim, and the
stages that replace them in float32 at the same. Every value that enters from outside of
the ops is drawn at random, so that the rest of the program cannot hide an error. The
first and the last vocabulary entries are tried, since an op may treat some differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfp.analysis.layout import Layout
from cfp.patterns.build import build, spread_of
from cfp.patterns.chunked import ChunkedCrossEntropy, StageParameters, Step, resized
from cfp.patterns.cross_entropy import (
    ARGMAX,
    CrossEntropy,
    LeftAlone,
    find_cross_entropies,
)
from cfp.patterns.expression import from_rows, numbers, to_rows
from cfp.program.evaluate import Coordinates, Evaluator, NotEvaluated
from cfp.program.graph import Program, numpy_dtype
from cfp.program.replace import Replacement

# Relative difference of norms, of float32 and sums of a few products.
TOLERANCE = 1e-4
_WORDS, _HIDDEN, _TOKENS = 7, 5, 3
_Stages = Callable[[jax.Array, Any], list[list[jax.Array]]]
_WIDE = {"bf16": "f32", "f16": "f32"}


def objection(
    program: Program, found: CrossEntropy, replacement: Replacement
) -> str | None:
    """Returns the reason why a replacement is not equal on one device, or None.

    Args:
        replacement: of one device.
    """
    functions = replacement.functions
    assert isinstance(functions, ChunkedCrossEntropy), "a cross-entropy's functions"
    evaluator = Evaluator(program)
    # Compiled once for the first words and the last ones.
    stages_of = functools.cache(_stages)
    words = functions.sheet.words
    for seed, last in enumerate((False, True)):
        first_word = max(words - _WORDS, 0) if last else 0
        try:
            reason = _differs(
                program, found, replacement, evaluator, stages_of, first_word, seed
            )
        except NotEvaluated as error:
            if sum(map(len, found.cuts)) > 1:
                return "its logits are cut along tokens in several ways"
            return f"not evaluated: {error}"
        if reason:
            return reason
    return None


def _differs(
    program: Program,
    found: CrossEntropy,
    replacement: Replacement,
    evaluator: Evaluator,
    stages_of: Callable[[tuple[Step, ...], StageParameters], _Stages],
    first_word: int,
    seed: int,
) -> str | None:
    functions: Any = replacement.functions
    places = _places(program, found, functions, first_word)
    sizes = {size: len(own) for size, own in places.items()}
    drawn = _Drawn(program, sizes, functions.sheet.words, first_word, seed)

    def coordinates(value: int, dim: int) -> np.ndarray:
        size = program.values[value].shape[dim]
        return places[size] if size in places else np.arange(min(size, _TOKENS))

    wanted = [v for stage in replacement.stages for v in stage.makes]
    uses = {use for stage in replacement.stages for use in stage.reads}
    known = {v: drawn.array(v) for v in sorted({_value(program, u) for u in uses})}
    _at_words(program, found, evaluator, known, coordinates, sizes, first_word)
    right = dict(zip(wanted, evaluator.run(wanted, known, coordinates), strict=True))
    steps = tuple(resized(step, sizes, _WIDE) for step in functions.steps)
    reads = [
        [
            jnp.asarray(known[_value(program, use)], numpy_dtype(one.dtype))
            for use, one in zip(stage.reads, step.takes, strict=True)
        ]
        for stage, step in zip(replacement.stages, steps, strict=True)
    ]
    sheet = replace(functions.sheet.resized(sizes, _WIDE), chunks=2)
    with jax.default_matmul_precision("highest"):
        compute = stages_of(steps, replace(sheet, first_word=0))
        every = compute(jnp.int32(first_word), reads)
    for stage, step, made in zip(replacement.stages, steps, every, strict=True):
        for v, got in zip(stage.makes, made, strict=True):
            if not _close(np.asarray(got, np.float64), right[v]):
                return f"the {step.kind} is not what the program computes"
    return None


def _stages(steps: tuple[Step, ...], sheet: StageParameters) -> _Stages:
    """Makes one program of all stages; the first word is an argument."""

    @jax.jit
    def run(first_word: jax.Array, reads: Any) -> list[list[jax.Array]]:
        kept: list[jax.Array] = []
        made: list[list[jax.Array]] = []
        own = replace(sheet, first_word=first_word)
        functions = ChunkedCrossEntropy(steps, own).plain()
        for step, function, args in zip(steps, functions, reads, strict=True):
            found = [*function(*args, *kept)]
            made.append(found[: len(step.makes)])
            kept = found[len(step.makes) :]
        return made

    return run


def _value(program: Program, use: tuple[int, int]) -> int:
    return program.ops[use[0]].operands[use[1]]


def _close(got: np.ndarray, right: np.ndarray) -> bool:
    finite = np.isfinite(right)  # Words may be masked by an infinite number.
    if not np.array_equal(got[~finite], right[~finite], equal_nan=True):
        return False
    size = np.linalg.norm(right[finite])
    off = np.linalg.norm(got[finite] - right[finite])
    return bool(off <= TOLERANCE * max(size, 1e-3))


def _places(
    program: Program,
    found: CrossEntropy,
    functions: ChunkedCrossEntropy,
    first_word: int,
) -> dict[int, np.ndarray]:
    """The coordinates of a dim, by its size."""
    tokens, words = found.head.tokens, functions.sheet.words
    places = {words: first_word + np.arange(min(words, _WORDS))}
    for dim, first, end in (one for cut in found.cuts for one in cut):
        there = np.arange(min(end - first, _TOKENS))
        before, behind = [0] * (first > 0), [tokens[dim] - 1] * (end < tokens[dim])
        places.setdefault(end - first, there)
        every = np.array([*before, *(first + there), *behind])
        places.setdefault(tokens[dim], every)
    for size in (1, *tokens):
        places.setdefault(size, np.arange(min(size, _TOKENS)))
    arrays = [one for step in functions.steps for one in (*step.takes, *step.makes)]
    shapes = [(one.dims, one.shape) for one in arrays if one.dims.of]
    shapes += [(dims, program.values[value].shape) for value, dims in found.dims]
    for dims, shape in shapes:
        own = dims.sizes(tokens)
        for merged, size in zip(dims.of, shape, strict=True):
            if len(merged) > 1:
                made = np.zeros(1, int)
                for one in merged:
                    made = (made[:, None] * own[one] + places[own[one]]).reshape(-1)
                places.setdefault(size, made)
    for one in arrays:
        for size in one.shape:
            places.setdefault(size, np.arange(min(size, _HIDDEN)))
    return places


class _Drawn:
    """Random arrays for what is read from outside."""

    def __init__(
        self,
        program: Program,
        sizes: Mapping[int, int],
        words: int,
        first_word: int,
        seed: int,
    ):
        self._program, self._sizes = program, sizes
        self._words = first_word, first_word + sizes[words]
        self._random = np.random.default_rng(seed)

    def array(self, value: int) -> np.ndarray:
        """Normal floats, and words that there are."""
        record = self._program.values[value]
        shape = [self._sizes[size] for size in record.shape]
        if record.dtype == "i1":
            return self._random.integers(0, 2, shape) != 0
        if record.dtype.startswith(("i", "ui")):
            return self._random.integers(*self._words, shape)
        return self._random.normal(size=shape)


def _at_words(
    program: Program,
    found: CrossEntropy,
    evaluator: Evaluator,
    known: dict[int, np.ndarray],
    coordinates: Coordinates,
    sizes: Mapping[int, int],
    first_word: int,
) -> None:
    """Adds what gathers take from one word of each token, and scatters put there.

    That they do is seen in their attributes, where they are found; so are the words
    that have the largest values.
    """
    for one in found.reductions:
        if one.kind == ARGMAX:
            op = program.ops[program.values[one.made].producer]
            [dim] = numbers(op.attributes, "dimensions")
            [wide] = evaluator.run([op.operands[0]], known, coordinates)
            known[one.made] = first_word + wide.argmax(dim)
    tokens = [sizes[size] for size in found.head.tokens]
    for number, one in found.indexed:
        op = program.ops[number]
        wide_dims, narrow_dims, label_dims = (
            dims.resized(sizes) for dims in (one.wide, one.narrow, one.label.dims)
        )
        [result] = op.results
        shape = [
            len(coordinates(result, d))
            for d in range(len(program.values[result].shape))
        ]
        [wide] = evaluator.run([op.operands[0]], known, coordinates)
        rows = to_rows(wide, wide_dims, tokens)
        labels = to_rows(known[_value(program, one.label.use)], label_dims, tokens)
        labels = labels[:, 0].astype(int) - first_word
        places = np.arange(len(rows)), np.clip(labels, 0, rows.shape[1] - 1)
        if op.kind == "gather":
            made, dims = rows[places][:, None], narrow_dims
        else:
            made, dims = rows.copy(), wide_dims
            updates = to_rows(known[op.operands[2]], narrow_dims, tokens)
            np.add.at(made, places, updates[:, 0])
        known[result] = from_rows(made, dims, tokens, shape)


_KEY = "cross-entropy"
_TOO_LATE = "something is made too late to be read"


@dataclass(frozen=True, kw_only=True)
class CrossEntropies:
    """All that a program has.

    Attributes:
        found: by the op that makes the logits.
        left_alone: what looks like one, and why it stays.
    """

    found: Mapping[int, CrossEntropy]
    left_alone: tuple[LeftAlone, ...] = ()


def cross_entropies(program: Program) -> CrossEntropies:
    """Finds and proves all cross-entropies of a program; once for each program."""
    known = program.looked_for
    if _KEY not in known:
        known[_KEY] = _find(program)
    return known[_KEY]


def _find(program: Program) -> CrossEntropies:
    found: dict[int, CrossEntropy] = {}
    alone: list[LeftAlone] = []
    for one in find_cross_entropies(program):
        if isinstance(one, LeftAlone):
            alone.append(one)
            continue
        plain = build(program, one, 2)
        reason = objection(program, one, plain) if plain else _TOO_LATE
        if reason is None:
            found[one.contraction] = one
        else:
            alone.append(LeftAlone(one.contraction, reason, is_loss=True))
    return CrossEntropies(found=found, left_alone=tuple(alone))


def among(program: Program, ops: Collection[int]) -> list[CrossEntropy]:
    """The cross-entropies whose logits some top-level ops make."""
    inside = set(ops)
    return [
        one
        for op, one in cross_entropies(program).found.items()
        if program.top_level(op) in inside
    ]


def in_parts(
    layout: Layout, ops: Collection[int], chunks: int
) -> tuple[Replacement, ...]:
    """Returns the replacements of some ops' cross-entropies.

    Args:
        ops: top-level ops.
        chunks: number of parts of the vocabulary; 0 replaces none.
    """
    if not chunks:
        return ()
    program, made = layout.frame.program, []
    for one in among(program, ops):
        spread = spread_of(layout, one)
        if spread is not None:
            made.append(build(program, one, chunks, spread, dict(layout.frame.mesh)))
    return tuple(one for one in made if one is not None)


def no_longer_made(program: Program, replaced: Iterable[Replacement]) -> set[int]:
    """Returns values of all tokens and words that replacements no longer make.

    Everything that reads the logits is known, or they are left alone: see
    `cfp.patterns.cross_entropy`. Contractions with them are made in parts.
    """
    found: set[int] = set()
    for one in replaced:
        wide = {v for v, _ in cross_entropies(program).found[one.op].dims}
        stack = [*program.ops[one.op].results]
        while stack:
            found.add(value := stack.pop())
            for user, _ in program.users[value]:
                results = program.ops[user].results
                stack += [v for v in results if v in wide and v not in found]
    return found

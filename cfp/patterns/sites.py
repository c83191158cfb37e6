"""All cross-entropies of a program, proved, and their computation under a layout.

A proof evaluates the program's ops in float64 at a few coordinates of each dim, and the
stages that replace them in float32 at the same. Every value that enters from outside of
the ops is drawn at random, so that the rest of the program cannot hide an error. The
first and the last vocabulary entries are tried, since an op may treat some differently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfp.analysis.layout import Layout
from cfp.patterns.build import build, spread_of
from cfp.patterns.chunked import ChunkedCrossEntropy
from cfp.patterns.cross_entropy import CrossEntropy, LeftAlone, find_cross_entropies
from cfp.patterns.expression import VOCABULARY
from cfp.patterns.steps import StageParameters, Step, resized
from cfp.program.evaluate import Coordinates, Evaluator, NotEvaluated
from cfp.program.graph import Program, numpy_dtype
from cfp.program.replace import Replacement

# Relative difference of norms, of float32 and sums of a few products.
TOLERANCE = 1e-4
_WORDS, _HIDDEN, _TOKENS = 7, 5, 3
_WIDE = {"bf16": "f32", "f16": "f32"}


def objection(
    program: Program, found: CrossEntropy, replacement: Replacement
) -> str | None:
    """Returns the reason why a replacement is not equal on one device, or None.

    Args:
        program: the program.
        found: what is to be replaced.
        replacement: of one device.
    """
    functions = replacement.functions
    assert isinstance(functions, ChunkedCrossEntropy), "a cross-entropy's functions"
    evaluator = Evaluator(program)
    words = functions.sheet.words
    for seed, last in enumerate((False, True)):
        first_word = max(words - _WORDS, 0) if last else 0
        try:
            reason = _differs(program, found, replacement, evaluator, first_word, seed)
        except NotEvaluated as error:
            return f"not evaluated: {error}"
        if reason:
            return reason
    return None


def _differs(
    program: Program,
    found: CrossEntropy,
    replacement: Replacement,
    evaluator: Evaluator,
    first_word: int,
    seed: int,
) -> str | None:
    functions: Any = replacement.functions
    sizes = _sizes(functions, replacement, program)
    words = functions.sheet.words
    drawn = _Drawn(program, found, sizes, words, first_word, seed)

    def coordinates(value: int, dim: int) -> np.ndarray:
        size = program.values[value].shape[dim]
        start = first_word if size == words else 0
        return start + np.arange(sizes.get(size, min(size, _TOKENS)))

    wanted = [v for stage in replacement.stages for v in stage.makes]
    uses = {use for stage in replacement.stages for use in stage.reads}
    known = {v: drawn.array(v) for v in sorted({_value(program, u) for u in uses})}
    _at_words(program, found, evaluator, known, coordinates, first_word)
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
    every = _computed(steps, sheet, first_word, reads)
    for stage, step, made in zip(replacement.stages, steps, every, strict=True):
        for v, got in zip(stage.makes, made, strict=True):
            if not _close(np.asarray(got, np.float64), right[v]):
                return f"the {step.kind} is not what the program computes"
    return None


def _computed(
    steps: tuple[Step, ...], sheet: StageParameters, first_word: int, reads: Any
) -> list[list[jax.Array]]:
    """Computes all stages, compiled as one program for all first words."""

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

    with jax.default_matmul_precision("highest"):
        return run(jnp.int32(first_word), reads)


def _value(program: Program, use: tuple[int, int]) -> int:
    return program.ops[use[0]].operands[use[1]]


def _close(got: np.ndarray, right: np.ndarray) -> bool:
    size = np.linalg.norm(right.ravel())
    off = np.linalg.norm((got - right).ravel())
    return bool(off <= TOLERANCE * max(size, 1e-3))


def _sizes(
    functions: ChunkedCrossEntropy, replacement: Replacement, program: Program
) -> dict[int, int]:
    """The small size of each size."""
    sizes = {1: 1}
    for size in functions.sheet.tokens:
        sizes.setdefault(size, min(size, _TOKENS))
    for step in functions.steps:
        for one in (*step.takes, *step.makes):
            for size in one.shape:
                if size != functions.sheet.words:
                    sizes.setdefault(size, min(size, _HIDDEN))
    sizes[functions.sheet.words] = min(functions.sheet.words, _WORDS)
    return sizes


class _Drawn:
    """Random arrays for what is read from outside."""

    def __init__(
        self,
        program: Program,
        found: CrossEntropy,
        sizes: Mapping[int, int],
        words: int,
        first_word: int,
        seed: int,
    ):
        self._program, self._sizes = program, sizes
        self._words = first_word, first_word + sizes[words]
        self._random = np.random.default_rng(seed)
        self._columns = {
            _value(program, use) for leaf, use in found.reads if leaf.kind == VOCABULARY
        }

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
    first_word: int,
) -> None:
    """Adds what gathers take from one word of each token, and scatters put there.

    That they do is seen in their attributes, where they are found.
    """
    for number in found.ops:
        op = program.ops[number]
        if op.kind not in ("gather", "scatter"):
            continue
        [result] = op.results
        shape = [len(coordinates(result, d)) for d in _dims(program, result)]
        [wide] = evaluator.run([op.operands[0]], known, coordinates)
        rows = wide.reshape(-1, wide.shape[-1])
        labels = known[op.operands[1]].reshape(-1) - first_word
        places = np.arange(len(rows)), np.clip(labels, 0, rows.shape[1] - 1)
        if op.kind == "gather":
            known[result] = rows[places].reshape(shape)
        else:
            made = rows.copy()
            np.add.at(made, places, known[op.operands[2]].reshape(-1))
            known[result] = made.reshape(shape)


def _dims(program: Program, value: int) -> range:
    return range(len(program.values[value].shape))


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
            alone.append(LeftAlone(one.contraction, reason))
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
        layout: how they are spread.
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
    """Returns values as large as the logits that replacements no longer make.

    Everything that reads the logits is known, or they are left alone: see
    `cfp.patterns.cross_entropy`. Contractions with them are made in parts.
    """
    found: set[int] = set()
    for one in replaced:
        stack = [*program.ops[one.op].results]
        size = prod(program.values[stack[0]].shape)
        while stack:
            found.add(value := stack.pop())
            for user, _ in program.users[value]:
                op = program.ops[user]
                if op.kind != "dot_general":
                    stack += [
                        v
                        for v in op.results
                        if v not in found and prod(program.values[v].shape) == size
                    ]
    return found

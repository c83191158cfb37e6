"""All cross-entropies of a program, proved, and their computation under a layout.

A proof evaluates the program's ops in float64 at a few coordinates of each dim, and the
stages that replace them in float32 at the same. Every value that enters from outside of
the ops is drawn at random, so that the rest of the program cannot hide an error. The
first and the last vocabulary entries are tried, since an op may treat some differently.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfp.analysis.layout import Layout
from cfp.patterns.build import build, spread_of
from cfp.patterns.chunked import ChunkedCrossEntropy, StageParameters, Step, resized
from cfp.patterns.cross_entropy import ARGMAX, CrossEntropy, find_cross_entropies
from cfp.patterns.expression import from_rows, to_rows
from cfp.program.evaluate import Evaluator, NotEvaluated
from cfp.program.graph import Program, numpy_dtype, searched_once
from cfp.program.replace import LeftAlone, Replacement, Sites, Use

# Relative difference of norms, of float32 and sums of a few products.
TOLERANCE = 1e-4
_WORDS, _HIDDEN, _TOKENS = 7, 5, 3
_WIDE = {"bf16": "f32", "f16": "f32"}


def objection(
    program: Program, found: CrossEntropy, replacement: Replacement
) -> str | None:
    """Returns the reason why a replacement differs on one device, or None."""
    proof = _Proof(program, found, replacement)
    try:
        return proof.differs(last=False) or proof.differs(last=True)
    except NotEvaluated as error:
        if sum(map(len, found.cuts)) > 1:
            return "its logits are cut along tokens in several ways"
        return f"not evaluated: {error}"


class _Proof:
    def __init__(self, program: Program, found: CrossEntropy, replacement: Replacement):
        functions = replacement.functions
        assert isinstance(functions, ChunkedCrossEntropy), "a cross-entropy's functions"
        self._program, self._found, self._stages = program, found, replacement.stages
        self._functions, self._evaluator = functions, Evaluator(program)
        # Compiled once for the first words and the last ones.
        self._compiled = functools.cache(_compiled)

    def differs(self, *, last: bool) -> str | None:
        """Returns what is not equal for the first words, or for the last ones."""
        words = self._functions.sheet.words
        self._first_word = max(words - _WORDS, 0) if last else 0
        self._random = np.random.default_rng(int(last))
        self._places = self._placed()
        self._sizes = {size: len(own) for size, own in self._places.items()}
        steps = tuple(
            resized(step, self._sizes, _WIDE) for step in self._functions.steps
        )
        known = self._drawn()
        self._add_words(known)
        reads = [
            [
                jnp.asarray(known[self._read(use)], numpy_dtype(one.dtype))
                for use, one in zip(stage.reads, step.takes, strict=True)
            ]
            for stage, step in zip(self._stages, steps, strict=True)
        ]
        sheet = self._functions.sheet.resized(self._sizes, _WIDE)
        with jax.default_matmul_precision("highest"):
            compute = self._compiled(steps, replace(sheet, chunks=2, first_word=0))
            every = compute(jnp.int32(self._first_word), reads)
        right = iter(
            self._evaluated([v for stage in self._stages for v in stage.makes], known)
        )
        for step, made in zip(steps, every, strict=True):
            for got in made:
                if not _close(np.asarray(got, np.float64), next(right)):
                    return f"the {step.kind} is not what the program computes"
        return None

    def _read(self, use: Use) -> int:
        return self._program.ops[use[0]].operands[use[1]]

    def _coordinates(self, value: int, dim: int) -> np.ndarray:
        size = self._program.shape(value)[dim]
        known = self._places.get(size)
        return np.arange(min(size, _TOKENS)) if known is None else known

    def _evaluated(
        self, values: Sequence[int], known: Mapping[int, np.ndarray]
    ) -> list[np.ndarray]:
        return self._evaluator.run(values, known, self._coordinates)

    def _placed(self) -> dict[int, np.ndarray]:
        """The coordinates of a dim, by its size."""
        found, words = self._found, self._functions.sheet.words
        tokens = found.head.tokens
        places = {words: self._first_word + np.arange(min(words, _WORDS))}
        for dim, first, end in (one for cut in found.cuts for one in cut):
            there = np.arange(min(end - first, _TOKENS))
            before, behind = [0] * (first > 0), [tokens[dim] - 1] * (end < tokens[dim])
            places.setdefault(end - first, there)
            every = np.array([*before, *(first + there), *behind])
            places.setdefault(tokens[dim], every)
        for size in (1, *tokens):
            places.setdefault(size, np.arange(min(size, _TOKENS)))
        steps = self._functions.steps
        arrays = [one for step in steps for one in (*step.takes, *step.makes)]
        shapes = [(one.dims, one.shape) for one in arrays if one.dims.of]
        shapes += [(dims, self._program.shape(v)) for v, dims in found.dims]
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

    def _drawn(self) -> dict[int, np.ndarray]:
        """Arrays to be read from outside: normal floats, and words that there are."""
        end = self._first_word + self._sizes[self._functions.sheet.words]
        found = {}
        values = {self._read(use) for stage in self._stages for use in stage.reads}
        for value in sorted(values):
            record = self._program.values[value]
            shape = [self._sizes[size] for size in record.shape]
            if record.dtype == "i1":
                found[value] = self._random.integers(0, 2, shape) != 0
            elif record.dtype.startswith(("i", "ui")):
                found[value] = self._random.integers(self._first_word, end, shape)
            else:
                found[value] = self._random.normal(size=shape)
        return found

    def _add_words(self, known: dict[int, np.ndarray]) -> None:
        """Adds what gathers take from one word of each token, and scatters put there.

        That they do is seen in their attributes, where they are found; so are the words
        that have the largest values.
        """
        program = self._program
        for one in self._found.reductions:
            if one.kind == ARGMAX:
                op = program.ops[program.values[one.made].producer]
                [dim] = op.integers("dimensions")
                [wide] = self._evaluated(op.operands[:1], known)
                known[one.made] = self._first_word + wide.argmax(dim)
        tokens = [self._sizes[size] for size in self._found.head.tokens]
        for number, one in self._found.indexed:
            op = program.ops[number]
            wide_dims, narrow_dims, label_dims = (
                dims.resized(self._sizes)
                for dims in (one.wide, one.narrow, one.label.dims)
            )
            [result] = op.results
            rank = len(program.shape(result))
            shape = [len(self._coordinates(result, dim)) for dim in range(rank)]
            [wide] = self._evaluated(op.operands[:1], known)
            rows = to_rows(wide, wide_dims, tokens)
            labels = to_rows(known[self._read(one.label.use)], label_dims, tokens)
            labels = labels[:, 0].astype(int) - self._first_word
            places = np.arange(len(rows)), np.clip(labels, 0, rows.shape[1] - 1)
            if op.kind == "gather":
                made, dims = rows[places][:, None], narrow_dims
            else:
                made, dims = rows.copy(), wide_dims
                updates = to_rows(known[op.operands[2]], narrow_dims, tokens)
                np.add.at(made, places, updates[:, 0])
            known[result] = from_rows(made, dims, tokens, shape)


def _compiled(steps: tuple[Step, ...], sheet: StageParameters) -> Any:
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


def _close(got: np.ndarray, right: np.ndarray) -> bool:
    finite = np.isfinite(right)  # Words may be masked by an infinite number.
    if not np.array_equal(got[~finite], right[~finite], equal_nan=True):
        return False
    size = np.linalg.norm(right[finite])
    off = np.linalg.norm(got[finite] - right[finite])
    return bool(off <= TOLERANCE * max(size, 1e-3))


_TOO_LATE = "something is made too late to be read"


@searched_once
def cross_entropies(program: Program) -> Sites[CrossEntropy]:
    """All of a program, by the ops that make logits; proved."""
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
            op = program.ops[one.contraction]
            alone.append(LeftAlone(op.id, op.source, reason, is_loss=True))
    return Sites(found, tuple(alone))


def in_parts(
    layout: Layout, ops: Collection[int], chunks: int
) -> tuple[Replacement, ...]:
    """Replacements of top-level ops' cross-entropies by so many parts; 0: none."""
    if not chunks:
        return ()
    program, made = layout.frame.program, []
    for one in cross_entropies(program).among(program, ops):
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
        start = program.ops[one.op].results
        found |= program.made_of(start, lambda op, w=wide: not w.isdisjoint(op.results))
    return found

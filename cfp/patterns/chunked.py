"""A cross-entropy in parts of the vocabulary, on one device's tokens and entries.

It never holds all logits. In the forward pass each part of the vocabulary gives its
largest logit and its sum of exponentials; a label's logit is the product of the token
with the label's column. In the backward pass the logits of each part are computed
again, and contracted at once. Tokens and vocabulary may be sharded: each device
computes its part, and sums follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cfp.patterns.expression import (
    INDEX,
    INSIDE,
    LOGITS,
    NO_DIMS,
    OTHER,
    SCALAR,
    TOKEN,
    VOCABULARY,
    Axes,
    Cut,
    Dims,
    Expr,
    evaluate,
    from_rows,
    inside,
    resized_cut,
    stripped,
    to_rows,
    widened,
)
from cfp.program.graph import numpy_dtype
from cfp.program.replace import Function


@dataclass(frozen=True, slots=True)
class Array:
    """An array that a stage reads or makes.

    Attributes:
        form: TOKEN has an entry or a vector for each token, VOCABULARY one for each
            word; SCALAR is the same for all.
        shape: of the whole.
        dtype: element type as MLIR writes it.
        leaf: of an expression, if it is one.
        words_dim: of VOCABULARY, the dim that words have.
        dims: of TOKEN.
        used_as: the element type that it is converted to; "" if it stays as it is.
    """

    form: str
    shape: tuple[int, ...]
    dtype: str
    leaf: Expr | None = None
    words_dim: int = 0
    dims: Dims = NO_DIMS
    used_as: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One stage.

    Attributes:
        kind: "largest", "sum", "total", "pick", "argmax" or "products".
        takes: what it reads, in order.
        makes: what it makes, in order.
        wide: expressions: of what is reduced, or of what each product contracts.
        label: of a pick.
        clamped: of a pick, see `cfp.patterns.cross_entropy.Reduction`.
        contractions: of products, for each (over, first, the place of the other
            operand among what it takes, or -1 of a sum).
    """

    kind: str
    takes: tuple[Array, ...]
    makes: tuple[Array, ...]
    wide: tuple[Expr, ...]
    label: Expr | None = None
    clamped: bool = False
    contractions: tuple[tuple[str, bool, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters that all stages share.

    Attributes:
        base: what is normalized, of the logits; None if no largest is taken.
        logits: their element type.
        words: of the vocabulary.
        token_axes: for each dim of the tokens the mesh axes that it is spread over.
        word_axes: the same of words.
        first_word: the number of the first word.
        cuts: of tokens' dims, by the number of the leaf INSIDE.
        precision: of products; "" is the default.
    """

    base: Expr | None
    logits: str
    tokens: tuple[int, ...]
    words: int
    chunks: int
    token_axes: tuple[Axes, ...]
    word_axes: Axes = ()
    first_word: int = 0
    cuts: tuple[Cut, ...] = ()
    precision: str = ""

    def alone(self) -> StageParameters:
        """The same on one device."""
        return replace(self, token_axes=((),) * len(self.tokens), word_axes=())

    def resized(
        self, sizes: Mapping[int, int], types: Mapping[str, str]
    ) -> StageParameters:
        """The same for other sizes and element types, on one device."""
        return replace(
            self.alone(),
            base=widened(self.base, types) if self.base else None,
            logits=types.get(self.logits, self.logits),
            tokens=tuple(sizes[n] for n in self.tokens),
            words=sizes[self.words],
            cuts=tuple(resized_cut(one, sizes) for one in self.cuts),
        )


def resized(step: Step, sizes: Mapping[int, int], types: Mapping[str, str]) -> Step:
    """A step for other sizes and element types, on one device."""

    def array(one: Array) -> Array:
        return replace(
            one,
            shape=tuple(sizes[n] for n in one.shape),
            dtype=types.get(one.dtype, one.dtype),
            leaf=widened(one.leaf, types) if one.leaf else None,
            dims=one.dims.resized(sizes),
            used_as=types.get(one.used_as, one.used_as),
        )

    return replace(
        step,
        takes=tuple(map(array, step.takes)),
        makes=tuple(map(array, step.makes)),
        wide=tuple(widened(one, types) for one in step.wide),
        label=widened(step.label, types) if step.label else None,
    )


class _Run:
    """A step with what it takes.

    Behind the first step that finds the largest the arguments end with each token's
    largest and its sum of exponentials.
    """

    def __init__(
        self,
        step: Step,
        sheet: StageParameters,
        sizes: Mapping[str, int],
        args: Sequence[jax.Array],
    ):
        self._step, self._sheet, self._sizes = step, sheet, sizes
        self._axes = sheet.token_axes
        self._word_axes = sheet.word_axes
        self._tokens = tuple(
            size // prod(sizes[a] for a in own)
            for size, own in zip(sheet.tokens, self._axes, strict=True)
        )
        self._rows = prod(self._tokens)
        self._precision = sheet.precision.lower() or None
        self._words = sheet.words // prod(sizes[a] for a in self._word_axes)
        self._reads: list[jax.Array] = []
        self._leaves: dict[Expr, jax.Array] = {}
        for one, array in zip(step.takes, args[: len(step.takes)], strict=True):
            if one.form == TOKEN:
                array = to_rows(array, one.dims, self._tokens)
            if one.used_as:
                array = array.astype(numpy_dtype(one.used_as))
            self._reads.append(array)
            if one.leaf is None:
                continue
            if one.form == VOCABULARY:
                array = array.reshape(1, self._words)
            elif one.form == SCALAR:
                array = array.reshape(1, 1)
            self._leaves[one.leaf] = array
        for one in self._kinds(INSIDE):
            self._leaves[one] = inside(sheet.cuts[one.number], self._tokens)

    def _kinds(self, kind: str) -> set[Expr]:
        """All leaves of a kind."""
        return {e for wide in self._step.wide for e in wide.walk() if e.kind == kind}

    def results(self, known: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Results of the step; then each token's largest and sum, if known."""
        kind = self._step.kind
        if kind == "products":
            return [*self._products(), *known]
        if kind == "largest":
            known = self._largest()
            found = known[0]
        elif kind == "sum":
            found = self._sum(*known)
        elif kind == "total":
            found = self._total()
        elif kind == "argmax":
            found = self._argmax()
        else:
            found = self._pick()
        [made] = self._step.makes
        found = jnp.broadcast_to(found, (self._rows, 1))
        there = made.dims.tokens
        axes = [
            a for dim, own in enumerate(self._axes) if dim not in there for a in own
        ]
        found = self._arranged(found, made)
        found = lax.psum(found, tuple(axes)) if axes else found
        return [found.astype(numpy_dtype(made.dtype)), *known]

    def _arranged(self, rows: jax.Array, made: Array) -> jax.Array:
        """Arranges rows as what is made."""
        axes = made.dims.axes(self._sheet.tokens, self._axes, self._sizes)
        shape = [
            size // prod(self._sizes[a] for a in own)
            for size, own in zip(made.shape, axes, strict=True)
        ]
        return from_rows(rows, made.dims, self._tokens, shape)

    # -- over the words ------------------------------------------------------

    def _over_words(self, carry: Any, body: Callable[[Any, Any, int], Any]) -> Any:
        """Runs a body, of a carry, a first word and a count, for each part."""
        size = self._words // self._sheet.chunks

        def one(carry: Any, place: jax.Array) -> tuple[Any, None]:
            return body(carry, place * size, size), None

        if size:
            carry, _ = lax.scan(one, carry, jnp.arange(self._sheet.chunks))
        done = size * self._sheet.chunks
        if done < self._words:
            carry = body(carry, jnp.asarray(done), self._words - done)
        return carry

    def _first_word(self) -> Any:
        """The number of this device's first word."""
        if not self._word_axes:
            return self._sheet.first_word
        return lax.axis_index(self._word_axes) * self._words

    def _logits(self, first: Any, size: int) -> jax.Array:
        x, kernel = self._reads[:2]
        dim = self._step.takes[1].words_dim
        part = lax.dynamic_slice_in_dim(kernel, first, size, dim)
        return self._product(x, part, 1, 1 - dim, numpy_dtype(self._sheet.logits))

    def _known(self, first: Any, size: int) -> dict[Expr, jax.Array]:
        """All leaves, of some words."""
        found = dict(self._leaves)
        for one in found:
            if one.kind == VOCABULARY:
                found[one] = lax.dynamic_slice_in_dim(found[one], first, size, 1)
        if any(one.has(LOGITS) for one in self._step.wide):
            found[Expr(LOGITS, self._sheet.logits)] = self._logits(first, size)
        words = self._first_word() + first + lax.iota(jnp.int32, size)[None]
        for one in self._kinds(INDEX):
            found[one] = words.astype(numpy_dtype(one.dtype))
        return found

    def _largest(self) -> tuple[jax.Array, jax.Array]:
        """Each token's largest, and its sum of exponentials less that."""
        normalized = self._sheet.base
        assert normalized is not None, "a largest is one of what is normalized"

        def body(carry: Any, first: Any, size: int) -> Any:
            most, total = carry
            known = self._known(first, size)
            base = evaluate(normalized, known).astype(jnp.float32)
            more = jnp.maximum(most, base.max(1, keepdims=True))
            shift = _finite(more)
            grown = total * jnp.exp(most - shift)
            return more, grown + jnp.exp(base - shift).sum(1, keepdims=True)

        start = jnp.full((self._rows, 1), -jnp.inf, jnp.float32)
        most, total = self._over_words((start, jnp.zeros_like(start)), body)
        if self._word_axes:
            local = most
            most = lax.pmax(most, self._word_axes)
            shrunk = total * jnp.exp(local - _finite(most))
            total = lax.psum(shrunk, self._word_axes)
        return most, total

    def _evaluated(self, wide: Expr, first: Any, size: int) -> jax.Array:
        """[tokens, size]: an expression of some words."""
        return self._in_rows(evaluate(wide, self._known(first, size)), size)

    def _in_rows(self, value: jax.Array, size: int) -> jax.Array:
        return jnp.broadcast_to(value, (self._rows, size))

    def _total(self) -> jax.Array:
        """Each token's sum over words."""
        [wide] = self._step.wide

        def body(carry: Any, first: Any, size: int) -> Any:
            value = self._evaluated(wide, first, size)
            return carry + value.astype(jnp.float32).sum(1, keepdims=True)

        found = self._over_words(jnp.zeros((self._rows, 1), jnp.float32), body)
        return lax.psum(found, self._word_axes) if self._word_axes else found

    def _argmax(self) -> jax.Array:
        """Each token's word with the largest value: the first one, or a NaN's."""
        [wide] = self._step.wide

        def body(carry: Any, first: Any, size: int) -> Any:
            most, place = carry
            value = self._evaluated(wide, first, size)
            own = jnp.argmax(value, 1, keepdims=True).astype(jnp.int32)
            value = jnp.take_along_axis(value, own, 1).astype(jnp.float32)
            better = (value > most) | (jnp.isnan(value) & ~jnp.isnan(most))
            return (
                jnp.where(better, value, most),
                jnp.where(better, self._first_word() + first + own, place),
            )

        least = jnp.full((self._rows, 1), -jnp.inf, jnp.float32)
        start = least, jnp.zeros_like(least, jnp.int32) + self._first_word()
        most, place = self._over_words(start, body)
        if self._word_axes:
            nan = jnp.isnan(most)
            any_nan = lax.pmax(nan.astype(jnp.int32), self._word_axes) > 0
            largest = lax.pmax(jnp.where(nan, -jnp.inf, most), self._word_axes)
            here = jnp.where(any_nan, nan, most == largest)
            place = jnp.where(here, place, jnp.iinfo(jnp.int32).max)
            place = lax.pmin(place, self._word_axes)
        return place

    # -- of each token -------------------------------------------------------

    def _sum(self, most: jax.Array, total: jax.Array) -> jax.Array:
        base = self._sheet.base
        assert base is not None, "a sum of exponentials is one of what is normalized"
        value = _finite(most)
        known = {**self._leaves, base: value.astype(numpy_dtype(base.dtype))}
        known[stripped(base)] = value.astype(numpy_dtype(stripped(base).dtype))
        return total * evaluate(self._step.wide[0], known).astype(jnp.float32)

    def _pick(self) -> jax.Array:
        assert self._step.label is not None, "a pick has a label"
        [wide] = self._step.wide
        label = self._leaves[self._step.label].astype(jnp.int32)
        if self._step.clamped:
            first = self._sheet.first_word
            label = jnp.clip(label, first, first + self._sheet.words - 1)
        place = label - self._first_word()
        here = (place >= 0) & (place < self._words)
        place = jnp.where(here, place, 0)
        known = dict(self._leaves)
        for one in self._leaves:
            if one.kind == VOCABULARY:
                known[one] = self._leaves[one][0][place]
        for one in wide.walk():
            if one.kind == INDEX:
                known[one] = label.astype(numpy_dtype(one.dtype))
        if wide.has(LOGITS):
            dim = self._step.takes[1].words_dim
            columns = jnp.take(self._reads[1], place[:, 0], axis=dim)
            formula = "th,th->t" if dim == 0 else "th,ht->t"
            dtype = numpy_dtype(self._sheet.logits)
            logit = jnp.einsum(
                formula,
                self._reads[0],
                columns,
                precision=self._precision,
                preferred_element_type=jnp.float32,
            )
            known[Expr(LOGITS, self._sheet.logits)] = logit[:, None].astype(dtype)
        found = jnp.where(here, evaluate(wide, known), 0)
        if self._word_axes:
            found = lax.psum(found, self._word_axes)
        return found

    # -- of all tokens -------------------------------------------------------

    def _products(self) -> list[jax.Array]:
        step = self._step
        parts = zip(step.contractions, step.wide, step.makes, strict=True)
        plans = [(*how, wide, made) for how, wide, made in parts]

        def start(made: Array, over: str) -> jax.Array:
            if over == "words":
                width = made.shape[made.dims.of.index((OTHER,))]
                return jnp.zeros((self._rows, width), jnp.float32)
            shape = list(made.shape)
            shape[made.words_dim] = self._words
            return jnp.zeros(shape, numpy_dtype(made.dtype))

        def body(carry: Any, first: Any, size: int) -> Any:
            known = self._known(first, size)
            found, done = [], {}
            for held, plan in zip(carry, plans, strict=True):
                over, is_first, place, wide, made = plan
                if wide not in done:
                    done[wide] = self._in_rows(evaluate(wide, known), size)
                value, dim = done[wide], made.words_dim
                if over == "words":
                    dim, other = step.takes[place].words_dim, self._reads[place]
                    part = lax.dynamic_slice_in_dim(other, first, size, dim)
                    found.append(held + self._product(value, part, 1, dim))
                    continue
                if place < 0:
                    part = value.astype(jnp.float32).sum(0).astype(held.dtype)
                    part = part.reshape(
                        [size if i == dim else 1 for i in range(held.ndim)]
                    )
                else:
                    other = self._reads[place]
                    pair = (value, other) if is_first else (other, value)
                    part = self._product(*pair, 0, 0, held.dtype)
                found.append(lax.dynamic_update_slice_in_dim(held, part, first, dim))
            return found

        carry = [start(made, over) for over, *_, made in plans]
        carry = self._over_words(carry, body)
        every = zip(carry, plans, strict=True)
        return [self._whole(value, made, over) for value, (over, *_, made) in every]

    def _product(
        self,
        one: jax.Array,
        other: jax.Array,
        dim: int,
        other_dim: int,
        dtype: Any = jnp.float32,
    ) -> jax.Array:
        return lax.dot_general(
            one,
            other,
            (((dim,), (other_dim,)), ((), ())),
            precision=self._precision,
            preferred_element_type=dtype,
        )

    def _whole(self, value: jax.Array, made: Array, over: str) -> jax.Array:
        """A product of all words, or all tokens."""
        if over == "words":
            value = self._arranged(value.astype(numpy_dtype(made.dtype)), made)
            return lax.psum(value, self._word_axes) if self._word_axes else value
        axes = tuple(a for own in self._axes for a in own)
        return lax.psum(value, axes) if axes else value


def _finite(most: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(most), most, 0.0)


def _function(step: Step, sheet: StageParameters, sizes: Mapping[str, int]) -> Function:
    """The function of a step, on one device's tokens and words."""

    def run(*args: jax.Array) -> Sequence[jax.Array]:
        return _Run(step, sheet, sizes, args).results(args[len(step.takes) :])

    return run


@dataclass(frozen=True, slots=True)
class ChunkedCrossEntropy:
    """The stages of a cross-entropy over parts of the vocabulary.

    Attributes:
        steps: what each stage does; the tokens' vectors and the kernel come first in
            what those take that make logits.
        sheet: what they have in common.
        how: as plans record it.
    """

    steps: tuple[Step, ...]
    sheet: StageParameters
    how: tuple[str, ...] = ()
    version: int = 2

    def stages(self, mesh: Mesh) -> Sequence[Function]:
        """A function for each stage; see `cfp.program.replace`."""
        if not self.sheet.word_axes and not any(self.sheet.token_axes):
            return self.plain()
        return [
            self._spread(mesh, _function(step, self.sheet, dict(mesh.shape)), place)
            for place, step in enumerate(self.steps)
        ]

    def plain(self) -> Sequence[Function]:
        """The same for one device, whatever the axes."""
        return [_function(step, self.sheet.alone(), {}) for step in self.steps]

    def _spread(self, mesh: Mesh, function: Function, place: int) -> Function:
        kinds = [step.kind for step in self.steps]
        first = kinds.index("largest") if "largest" in kinds else len(kinds)
        step = self.steps[place]
        axes = tuple(axis for axes in self.sheet.token_axes for axis in axes)
        rows = [PartitionSpec(axes, None)] * 2
        sizes = dict(mesh.shape)
        takes = [self._spec(one, sizes) for one in step.takes]
        makes = [self._spec(one, sizes) for one in step.makes]

        def whole(*args: jax.Array) -> Any:
            return jax.shard_map(
                function,
                mesh=mesh,
                in_specs=tuple([*takes, *(rows if place > first else [])]),
                out_specs=[*makes, *(rows if place >= first else [])],
                check_vma=False,
            )(*args)

        return whole

    def _spec(self, one: Array, sizes: Mapping[str, int]) -> PartitionSpec:
        if one.form == SCALAR:
            return PartitionSpec()
        if one.form == VOCABULARY:
            dims: list[Any] = [()] * len(one.shape)
            dims[one.words_dim] = self.sheet.word_axes
            return PartitionSpec(*dims)
        tokens, spread = self.sheet.tokens, self.sheet.token_axes
        return PartitionSpec(*one.dims.axes(tokens, spread, sizes))

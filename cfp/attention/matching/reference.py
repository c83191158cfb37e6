"""Attention and its gradients by the textbook, the dims of tensors by their letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cfp.attention.matching.found import Letters

Named = tuple[np.ndarray, list[str]]  # an array, and the letters of its dims


def real(letters: Letters) -> list[str]:
    """The letters of dims that are not of size 1."""
    return [letter for letter in letters if letter]


def squeezed(x: np.ndarray, letters: Letters) -> np.ndarray:
    """An array without the dims that have no letter."""
    return x.reshape([n for n, letter in zip(x.shape, letters, strict=True) if letter])


ORDER = ("b0", "b1", "b2", "b3", "q0", "q1", "q2", "q3", "k", "d", "e")


def index(letter: str) -> int:
    """The number of a letter, as `numpy.einsum` takes it."""
    return ORDER.index(letter)


PADDING, SEGMENTS, MASK, BIAS = "padding", "segments", "mask", "bias"


@dataclass(frozen=True, slots=True)
class SideMeaning:
    """The effect of a mask or bias that enters.

    Attributes:
        kind: PADDING hides keys from all queries, SEGMENTS those of other ids than the
            query's, MASK is for pairs of queries and keys, BIAS is added to the scores.
        above: whether keys are seen where what is read is above the level, or below.
        level: between what is read where a key is seen and where it is not.
        letters: what the dims of what a mask is made of run over: a key is seen if it
            is along any of the dims that are read besides.
        same: whether queries and keys have the same ids.
        factor: what a bias is multiplied with.
    """

    kind: str
    above: bool = True
    level: float = 0.5
    letters: Letters = ()
    same: bool = False
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Meaning:
    """The attention that was inferred from ops.

    Attributes:
        tokens: the letter of the queries; the other "q" letters are groups of heads.
        scale, softcap: as in `cfp.attention`.
        causal, left, right: the mask by position.
        sides: what enters besides.
        fills: whether a query that sees no key has the mean of all values, as where all
            its scores are made the same large negative number; otherwise it has zeros,
            where the step may have anything.
    """

    tokens: str
    scale: float
    softcap: float | None = None
    causal: bool = False
    left: int | None = None
    right: int | None = None
    sides: tuple[SideMeaning, ...] = ()
    fills: bool = False

    @property
    def is_dense(self) -> bool:
        """Tell whether what enters is as large as scores, or as rows of them."""
        return any(side.kind in (MASK, BIAS) for side in self.sides)


class Reference:
    """An attention that means something, of some arrays."""

    def __init__(
        self,
        meaning: Meaning,
        given: Mapping[str, Named],
        at: Mapping[str, np.ndarray],
        biases: Sequence[Named] = (),
        masks: Sequence[Named] = (),
        ids: Sequence[tuple[Named, Named]] = (),
    ) -> None:
        """Takes what it is computed of.

        Args:
            meaning: what is computed.
            given: "q", "k", "v", and "dout" for gradients.
            at: for each letter the coordinates that there are.
            biases: what is added.
            masks: true where a key is seen.
            ids: of queries and of keys, equal where a key is seen.
        """
        self.meaning, self.given, self.at = meaning, given, at
        self.biases, self.masks, self.ids = biases, masks, ids
        names = {x for _, letters in given.values() for x in letters}
        self.rows = [x for x in ORDER if x in names and x not in ("k", "d", "e")]
        self.pairs = [*self.rows, *(["k"] if "k" in names else [])]

    def _sum(self, *terms: Named, out: list[str]) -> np.ndarray:
        args: list = []
        for x, letters in terms:
            args += [x, [*map(index, letters)]]
        return np.einsum(*args, [*map(index, out)], optimize=True)

    def _visible(self) -> np.ndarray:
        at, meaning = self.at, self.meaning
        shape = [1] * len(self.pairs)
        q, k = at[meaning.tokens], at["k"]
        if meaning.tokens not in self.pairs or "k" not in self.pairs:
            return np.ones(shape, bool)
        here, there = self.pairs.index(meaning.tokens), self.pairs.index("k")
        q = q.reshape([-1 if i == here else 1 for i in range(len(shape))])
        k = k.reshape([-1 if i == there else 1 for i in range(len(shape))])
        seen = (q == q) & (k == k)
        if meaning.causal:
            seen &= k <= q
        if meaning.left is not None:
            seen &= q - k <= meaning.left
        if meaning.right is not None:
            seen &= k - q <= meaning.right
        return seen

    def _placed(self, named: Named) -> np.ndarray:
        """An array with a dim for each of those of the scores."""
        x, names = named
        wanted = [a for a in self.pairs if a in names]
        x = np.transpose(x, [names.index(a) for a in wanted])
        sizes = iter(x.shape)
        return x.reshape([next(sizes) if a in names else 1 for a in self.pairs])

    def visible(self) -> np.ndarray:
        """Returns which keys each query sees."""
        seen = self._visible()
        for mask in self.masks:
            seen = seen & self._placed(mask)
        for queries, keys in self.ids:
            seen = seen & (self._placed(queries) == self._placed(keys))
        return seen

    def results(self) -> dict[str, Named]:
        """Output and gradients, each with the letters of its dims."""
        meaning, given = self.meaning, self.given
        q, k, v = given["q"], given["k"], given["v"]
        raw = meaning.scale * self._sum(q, k, out=self.pairs)
        slope = np.full((), meaning.scale)
        x = raw
        if meaning.softcap is not None:
            x = meaning.softcap * np.tanh(raw / meaning.softcap)
            slope = meaning.scale * (1 - np.tanh(raw / meaning.softcap) ** 2)
        for bias in self.biases:
            x = x + self._placed(bias)
        seen = np.broadcast_to(self.visible(), x.shape)
        empty = ~seen.any(axis=-1, keepdims=True) & meaning.fills
        x = np.where(empty, 0.0, np.where(seen, x, -np.inf))
        weights = np.exp(x - x.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        p = (weights, self.pairs)
        out = [*self.rows, "e"]
        found = {"out": (self._sum(p, v, out=out), out)}
        if "dout" not in given:
            return found
        dout = given["dout"]
        dp = self._sum(dout, v, out=self.pairs)
        dx = weights * (dp - (weights * dp).sum(axis=-1, keepdims=True))
        ds = (np.where(empty, 0.0, dx * slope), self.pairs)
        found["dv"] = (self._sum(p, dout, out=v[1]), v[1])
        found["dq"] = (self._sum(ds, k, out=q[1]), q[1])
        found["dk"] = (self._sum(ds, q, out=k[1]), k[1])
        return found

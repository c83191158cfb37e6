"""What a found attention computes, and the proof of it.

The ops between the contractions are evaluated in float64 on random numbers, at some
coordinates of each dim (`cfp.program.evaluate`). Scale, soft cap, mask and bias are
read off what comes out; then the output and all gradients must be those of an attention
with these, or the match is none.
"""

from __future__ import annotations

import numpy as np

from cfp.attention.matching.found import Different, Found
from cfp.attention.matching.reference import (
    Meaning,
    Named,
    Reference,
    index,
    real,
    squeezed,
)
from cfp.attention.matching.sample import Sample
from cfp.attention.matching.view import View
from cfp.program.evaluate import Evaluator, NotEvaluated

_MASKED = -5e3  # What is added to, or stands for, the score of a key that is not seen.
_CLOSE = 1e-6


class Prover:
    """Reads off what attentions of one program compute, and proves it."""

    def __init__(self, view: View) -> None:
        """Parses the program once."""
        self.view = view
        self.evaluator = Evaluator(view.program)

    def meaning(self, found: Found) -> Meaning:
        """What an attention computes, proved.

        Raises:
            Different: it computes something else.
        """
        try:
            return _Proof(self.view, self.evaluator, found).run()
        except NotEvaluated as error:
            raise Different(f"it has {error}") from error


class _Proof(Sample):
    def run(self) -> Meaning:
        """The meaning.

        Raises:
            Different, NotEvaluated: there is none, or it cannot be found.
        """
        found = self.found
        if len(found.sides) > 1:
            where = found.sides[0].use
            source = self.program.ops[where[0]].source if where else ""
            raise Different(f"several masks or biases enter, one at {source}")
        scale, softcap = self._scale()
        side = self._side()
        causal, left, right = self._mask()
        meaning = Meaning(self.tokens, scale, softcap, causal, left, right, side)
        for _ in range(2):
            self._prove(meaning)
            self.place(self.positions())
        return meaning

    # -- what it computes --------------------------------------------------------------

    def _neutral(self) -> np.ndarray | None:
        """A value of the side that hides nothing and adds nothing, if there is one."""
        if not self.found.sides:
            return None
        [side] = self.found.sides
        dtype = self.program.values[side.value].dtype
        if dtype != "i1":
            return np.zeros(())
        seen = [(self.argument_of(0.0, np.asarray(x)) > _MASKED).sum() for x in (0, 1)]
        self.true_shows = seen[1] > seen[0]
        return np.asarray(self.true_shows)

    true_shows = True

    def _scale(self) -> tuple[float, float | None]:
        """Scale and soft cap, from the argument of a score that all have."""
        neutral = self._neutral()
        zero = self.argument_of(0.0, neutral)
        seen = zero > _MASKED
        if not seen.any():
            raise Different("no key is seen")

        def slope(score: float) -> float:
            steps = self.argument_of(score, neutral)[seen] - zero[seen]
            if not np.allclose(steps, steps[0], rtol=_CLOSE, atol=1e-12):
                raise Different("scores are not all scaled alike")
            return float(steps[0])

        small, large = slope(1e-4) / 1e-4, slope(1.0)
        if not np.isfinite(small) or small == 0.0:
            raise Different("the softmax is of something else than scaled scores")
        if np.isclose(large, small, rtol=1e-5):
            return _rounded(large), None
        cap = slope(1e6 / abs(small))
        if not np.isclose(cap * np.tanh(small / cap), large, rtol=1e-5):
            raise Different("scores go through another function before the softmax")
        return _rounded(small), _rounded(cap)

    def _side(self) -> str:
        if not self.found.sides:
            return ""
        [side] = self.found.sides
        dtype = self.program.values[side.value].dtype
        names = {x for x in side.letters if x}
        if "?" in names or names & {"d", "e"}:
            raise Different("what enters besides has other dims than the scores")
        by_key = "k" in names and not any(x[:1] == "q" for x in names)
        if dtype == "i1":
            if by_key and "k" in names:
                return "padding" if self.true_shows else "hidden"
            return "mask" if self.true_shows else "inverse mask"
        if dtype.startswith(("f", "bf")):
            return "bias"
        raise Different("what enters besides is neither a mask nor a bias")

    def _mask(self) -> tuple[bool, int | None, int | None]:
        """The mask by position: from one query in the middle, along all keys."""
        counts = self.sizes.get(self.tokens, 1), self.sizes["k"]
        neutral = self._neutral()

        def distances() -> tuple[np.ndarray, np.ndarray]:
            x = self.argument_of(0.0, neutral)
            letters = [n for n in self.found.scores.letters if n]
            order = [letters.index(n) for n in letters if n not in (self.tokens, "k")]
            rest = [letters.index(n) for n in (self.tokens, "k") if n in letters]
            seen = np.transpose(x, [*order, *rest]) > _MASKED
            value = np.transpose(x, [*order, *rest])
            seen = seen.reshape(-1, len(self.at[self.tokens]), len(self.at["k"]))
            if not (seen == seen[0]).all():
                raise Different("another mask for each sequence or head")
            if np.abs(value[value > _MASKED]).max(initial=0.0) > _CLOSE:
                raise Different("a bias that is the same in every step")
            return self.at[self.tokens][:, None] - self.at["k"][None, :], seen[0]

        def bound(sign: int) -> int | None:
            """The largest distance at which a key is seen on one side."""
            if counts[0] != counts[1]:
                away, seen = distances()
                if not seen.all():
                    raise Different("a mask by position of other queries than keys")
                return None
            low, high = 0, counts[1]
            away, seen = distances()
            while True:
                away = sign * away
                shown = away[seen & (away >= 0)]
                hidden = away[~seen & (away > 0)]
                low = max(low, int(shown.max(initial=0)))
                high = min(high, int(hidden.min(initial=counts[1])))
                if high <= low:
                    raise Different("a mask that is no window")
                if high - low == 1 or low >= counts[1] - 1:
                    return None if high >= counts[1] else low
                middle = (low + high) // 2
                first = counts[1] - 1 if sign > 0 else 0
                other = first - sign * middle
                some = self.some(counts[1])
                some = np.unique([*some, first, other, other - 1, other + 1])
                some = np.clip(some, 0, counts[1] - 1)
                self.place((np.unique(some), np.unique(some)))
                away, seen = distances()

        left, right = bound(1), bound(-1)
        if right == 0:
            return True, left, None
        return False, left, right

    # -- the proof ---------------------------------------------------------------------

    def _prove(self, meaning: Meaning) -> None:
        """Compares outputs and gradients with those of the attention that it means.

        Raises:
            Different: they are others.
        """
        roots: dict[int, np.ndarray] = {}
        for p in self.passes():
            for t in p.reads.values():
                roots.setdefault(self._root(t.value), np.empty(0))
        known = {v: self.drawn_at(v) for v in roots}
        self.drawn = self._drawn(meaning)
        known |= self.drawn
        tensors = [t for p in self.passes() for t in p.reads.values()]
        arrays = self.evaluated(tensors, known)
        made = [t for p in self.passes() for t in p.makes.values()]
        results = iter(self.evaluated(made, known))
        inputs = iter(arrays)
        side = self._named_side(meaning)
        for p in self.passes():
            given = {
                name: (squeezed(next(inputs), t.letters), real(t.letters))
                for name, t in p.reads.items()
            }
            expected = Reference(meaning, given, self.at, side).results()
            for name, t in p.makes.items():
                got = squeezed(next(results), t.letters)
                want = np.einsum(
                    expected[name][0],
                    [*map(index, expected[name][1])],
                    [*map(index, real(t.letters))],
                )
                far = np.linalg.norm(got - want)
                if not far <= _CLOSE * (np.linalg.norm(want) + 1e-30):
                    raise Different(_OTHER_RESULT[name])
        self.drawn = {}

    def _named_side(self, meaning: Meaning) -> Named | None:
        """The side that was drawn: true where a key is seen, or a bias."""
        for side in self.found.sides:
            x = self.drawn[self.view.made(side.value)]
            x = squeezed(x.reshape(self.shape_of(side.value)), side.letters)
            if meaning.side != "bias" and not self.true_shows:
                x = ~x
            return x, real(side.letters)
        return None

    def _root(self, v: int) -> int:
        """What a contraction reads, before it is transposed."""
        while True:
            v = self.view.made(v)
            op = self.view.producer(v)
            if op is None or op.kind not in ("transpose", "convert"):
                return v
            v = op.operands[0]

    def _drawn(self, meaning: Meaning) -> dict[int, np.ndarray]:
        """A random side: a bias, or a mask that shows each query some key."""
        found = {}
        for side in self.found.sides:
            v = self.view.made(side.value)
            if meaning.side == "bias":
                found[v] = self.drawn_at(v)
                continue
            array = self.random.random(self.shape_of(side.value)) < 0.7
            names = [x for x in side.letters]
            if "k" in names:
                # The first key is seen by all, a causal mask or not.
                place = [slice(None)] * array.ndim
                place[names.index("k")] = slice(0, 1)
                array[tuple(place)] = True
            array = array if self.true_shows else ~array
            found[v] = array.reshape(self.shape_of(v))
        return found


_OTHER_RESULT = {
    "out": "its output is not that of a softmax of scaled scores",
    "dq": "the gradient of the queries is another one",
    "dk": "the gradient of the keys is another one",
    "dv": "the gradient of the values is another one",
}


def _rounded(x: float) -> float:
    """A factor without the noise of its measurement."""
    return float(f"{x:.7g}")

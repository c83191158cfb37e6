"""Infers the meaning of a found attention, and proves it.

The ops between the contractions are evaluated in float64 on random numbers, at some
coordinates of each dim (`cfp.program.evaluate`). Scale, soft cap, mask and bias are
read off what comes out; then the output and all gradients must be those of an attention
with these, or the match is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from cfp.attention.matching.exact import MASKED, Numbers, is_rounded
from cfp.attention.matching.found import (
    Dims,
    Found,
    Side,
    Tensor,
    View,
    aligned,
    is_by_key,
)
from cfp.attention.matching.functions import (
    BIAS,
    MASK,
    ORDER,
    PADDING,
    SEGMENTS,
    Meaning,
    Named,
    Reference,
    SideMeaning,
    index,
    placed,
    real,
    squeezed,
    turned,
)
from cfp.program.evaluate import NotEvaluated, is_float
from cfp.program.replace import Different

_SAMPLED = 20  # Positions besides the first, the middle and the last ones.
_FEW = 2  # Coordinates of batch, heads and groups, unless they are looked at in whole.
_FEATURES = 3  # Coordinates of the dims of a head.
_MANY = 256  # Of more sequences and heads, fewer positions are looked at.
_MOST = 2**16  # Sequences and heads that are looked at together.
_SHAPES = frozenset({"transpose", "convert", "reshape"})
_MOST_PLAIN = 4096  # Coordinates of a dim of which nothing is known.
_CLOSE = 1e-6
_FAR = 1e3  # Up to such scores a function of them is looked at.
_SPREAD = 8.0  # Of drawn scores, in the second round of the proof.
_STEEP = 1e3  # What the gradient of the output is multiplied with then.
_MOST_MASKS = 4
_MOST_DRAWN = 40
_HIDDEN = 0.3  # The share of keys that a mask hides in the first draw.


def proved(view: View, found: Found) -> tuple[Found, Meaning]:
    """An attention with the masks and biases by which it is proved.

    Raises:
        Different: it computes something else.
    """
    errors: list[Different] = []
    for option in found.options:
        one = replace(found, sides=option)
        try:
            return one, _Proof(view, one).run()
        except Different as error:
            errors.append(error)
        except NotEvaluated as error:
            errors.append(Different(f"it has {error}"))
    raise errors[0]


class _Proof:
    """A found attention, evaluated at some coordinates of its dims."""

    def __init__(self, view: View, found: Found) -> None:
        self.view, self.found = view, found
        self.program = view.program
        self.random = np.random.default_rng(7)
        self.dims = Dims(view)
        self._join_all()
        self.sizes = found.sizes
        # Queries have the largest dim; the others are groups of heads.
        names = [x for x in self.sizes if x[:1] == "q"]
        self.tokens = max(names, key=lambda x: (self.sizes[x], x), default="q0")
        self.place(self.positions())

    # -- coordinates -------------------------------------------------------------------

    def _join_all(self) -> None:
        """Joins the dims of everything that is evaluated."""
        near = self.found.inside | self._to_sides()
        makes = [t.value for p in self.found.passes for t in p.makes.values()]
        reads = [t for p in self.found.passes for t in p.reads.values()]
        dots = {self.found.op, *(t.use[0] for t in reads if t.use)}
        dots |= {self.program.values[v].producer for v in makes}
        seen: set[int] = set()
        stack = [*makes, *(t.value for t in reads)]
        while stack:
            v = stack.pop()
            op = self.view.producer(v)
            if op is None or op.id in seen or op.rule is None:
                continue
            is_joined = op.id in dots
            if op.kind != "dot_general":
                is_near = op.id in near or op.kind in _SHAPES
                is_joined = is_near or self.view.is_leaf(v)
            if is_joined:
                seen.add(op.id)
                self.dims.join(op, leaves=True)
                stack += op.operands

    def _to_sides(self) -> set[int]:
        """The ops by which what enters besides becomes a mask or a bias."""
        view, inside = self.view, self.found.inside
        ends = {view.numbers.of[t.value] for s in self.found.sides for t in s.parts}
        stack = [v for op in inside for v in self.program.ops[op].operands]
        found: set[int] = set()
        while stack and ends:
            v = stack.pop()
            op = view.producer(v)
            if view.numbers.of[v] in ends or op is None or op.id in found:
                continue
            if op.id in inside or op.kind == "dot_general" or view.is_leaf(v):
                continue
            found.add(op.id)
            stack += op.operands
        return found

    def positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Some queries and some keys; the same where there are as many."""
        return self._positions(_SAMPLED)

    def _positions(self, sampled: int) -> tuple[np.ndarray, np.ndarray]:
        counts = self.sizes.get(self.tokens, 1), self.sizes["k"]
        queries, keys = (self.some(count, sampled) for count in counts)
        return queries, queries if counts[0] == counts[1] else keys

    def some(self, count: int, sampled: int = _SAMPLED) -> np.ndarray:
        near = [0, 1, 2, count // 2 - 1, count // 2, count // 2 + 1]
        near += [count - 3, count - 2, count - 1]
        near += [*self.random.integers(0, count, sampled)]
        return np.unique(np.clip(near, 0, count - 1))

    def place(
        self,
        positions: tuple[np.ndarray, np.ndarray],
        whole: int | None = None,
        most: int = _MOST_PLAIN,
    ) -> None:
        """Takes these positions of queries and keys from now on.

        Args:
            whole: of batch, heads and groups those of this size have all coordinates,
                or, where they have more, so many as `most`.
        """
        self.at: dict[str, np.ndarray] = {}
        for letter, size in self.sizes.items():
            few = _FEATURES if letter in ("d", "e") else _FEW
            if size == whole and letter not in ("d", "e"):
                few = most
            self.at[letter] = _ends(size, few)
        self.at[self.tokens], self.at["k"] = positions
        self.coordinates: dict[object, np.ndarray] = {}
        tensors = [
            t for p in self.found.passes for t in (*p.reads.values(), *p.makes.values())
        ]
        tensors += [self.found.scores, self.found.argument]
        tensors += [t for side in self.found.sides for t in (*side.parts, *side.reads)]
        for t in tensors:
            for d, letter in enumerate(t.letters):
                if not letter:
                    continue
                root = self.dims.of(t.value, d)
                known = self.coordinates.setdefault(root, self.at[letter])
                if not np.array_equal(known, self.at[letter]):
                    raise Different("dims of different kinds are one")

    def _at(self, v: int, d: int) -> np.ndarray:
        size = self.program.shape(v)[d]
        if size == 1:
            return np.zeros(1, int)
        found = self.coordinates.get(self.dims.of(v, d))
        if found is None:
            if size > _MOST_PLAIN:
                raise NotEvaluated("a long dim of which nothing is known")
            return np.arange(size)
        return found

    # -- evaluation --------------------------------------------------------------------

    def drawn_at(self, v: int) -> np.ndarray:
        return self.random.normal(size=self.shape_of(v))

    def evaluated(self, wanted: list[Tensor], known: Mapping[int, np.ndarray]) -> list:
        found = self.view.evaluator.run(
            [t.value for t in wanted], known, self._at, self.view.made
        )
        return [
            x.reshape(self.shape_of(t.value))
            for t, x in zip(wanted, found, strict=True)
        ]

    def shape_of(self, v: int) -> list[int]:
        return [len(self._at(v, d)) for d in range(len(self.program.shape(v)))]

    def argument_of(
        self, scores: np.ndarray | float, given: Mapping[int, np.ndarray]
    ) -> np.ndarray:
        """The softmax's argument, for scores (of one value, or as they lie).

        Args:
            scores: what the contraction makes.
            given: what masks and biases are made of, by values; of one value all over,
                or as they lie.
        """
        t = self.found.scores
        value = np.broadcast_to(np.asarray(scores, np.float64), self.shape_of(t.value))
        known = {self.view.made(t.value): value, **self.spread(given)}
        [x] = self.evaluated([self.found.argument], known)
        return turned(x, self.found.argument.letters, t.letters)

    def spread(self, given: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Values in their sizes."""
        return {v: np.broadcast_to(x, self.shape_of(v)) for v, x in given.items()}

    # -- what it computes --------------------------------------------------------------

    def run(self) -> Meaning:
        """The meaning, proved."""
        self._check_sides()
        self.neutral = self._neutral()
        scale, softcap = self._scale()
        causal, left, right = self._mask()
        sides = tuple(self._read(side) for side in self.found.sides)
        meaning = Meaning(
            self.tokens,
            scale,
            softcap,
            causal,
            left,
            right,
            sides,
            rounds_bias=self._rounds_bias(sides),
        )
        for spread in (None, _SPREAD):
            self._prove(meaning, self._drawn(meaning), spread)
            self.place(self.positions())
        self._prove_everywhere(meaning)
        if not any(map(self._is_mask, self.found.sides)):
            return meaning
        filled = replace(meaning, fills=True)
        try:
            self._prove(filled, self._drawn_with_empty_rows())
        except Different:
            return meaning  # Rows without keys have something else, such as no number.
        return filled

    def _check_sides(self) -> None:
        for side in self.found.sides:
            for one in (*side.parts, *side.reads):
                names = {x for x in one.letters if x}
                if "?" in names or names & {"d", "e"}:
                    raise Different("a mask or bias has other dims than the scores")
            if side.is_segments or self._is_mask(side):
                continue
            if "k" not in side.parts[0].letters:
                raise Different(
                    "scores are changed by a value that is the same for all keys: a "
                    "scale, say, that is no constant"
                )
            if not is_float(self.view.dtype(side.parts[0])):
                raise Different("what enters besides is neither a mask nor a bias")

    def _is_mask(self, side: Side) -> bool:
        return not side.is_segments and self.view.dtype(side.parts[0]) == "i1"

    def _neutral(self) -> dict[int, np.ndarray]:
        """Values of masks and biases that hide nothing and add nothing."""
        made, zero = self.view.made, np.zeros(())
        sides = self.found.sides
        given = {made(part.value): zero for side in sides for part in side.parts}
        masks = [made(side.parts[0].value) for side in sides if self._is_mask(side)]
        if len(masks) > _MOST_MASKS:
            raise Different(f"more than {_MOST_MASKS} masks enter")
        tried = []
        for values in product((True, False), repeat=len(masks)):
            one = given | {v: np.asarray(x) for v, x in zip(masks, values, strict=True)}
            tried.append(((self.argument_of(0.0, one) > MASKED).sum(), one))
        return max(tried, key=lambda pair: pair[0])[1]

    def _shows(self, side: Side) -> bool:
        """Returns the value of a mask that shows a key."""
        return bool(self.neutral[self.view.made(side.parts[0].value)])

    def _scale(self) -> tuple[float, float | None]:
        """Scale and soft cap, from the argument of a score that all have."""
        neutral = self.neutral
        zero = self.argument_of(0.0, neutral)
        seen = zero > MASKED
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
            for far in (_FAR / small, -_FAR / small):
                if not np.isclose(slope(far), small * far, rtol=1e-5):
                    raise Different("large scores go through another function")
            return _rounded(large), None
        cap = slope(1e6 / abs(small))
        if not np.isclose(cap * np.tanh(small / cap), large, rtol=1e-5):
            raise Different("scores go through another function before the softmax")
        return _rounded(small), _rounded(cap)

    def _read(self, side: Side) -> SideMeaning:
        """The meaning of a mask or bias, from what is read of it."""
        if side.is_segments:
            numbers = {self.view.numbers.of[one.value] for one in side.reads}
            return SideMeaning(SEGMENTS, same=len(numbers) == 1)
        [part], [read] = side.parts, side.reads
        letters = tuple(real(part.letters))
        place = self.view.made(part.value)
        if not self._is_mask(side):
            drawn = self.drawn_at(place)
            got = self._evaluated(read, {place: drawn})
            want = self._along(part, drawn, real(read.letters))
            # Where keys are hidden by position a bias may have any value.
            close = np.isclose(got, want, rtol=_CLOSE, atol=_CLOSE)
            if not (close | (got < MASKED)).all() or not close.any():
                raise Different("a bias is read as something else than is added")
            factor = self._factor(place)
            return SideMeaning(BIAS, letters=letters, factor=factor)
        shows = self._shows(side)
        shown, hidden = (
            self._evaluated(read, {place: np.asarray(x)}) for x in (shows, not shows)
        )
        above = bool(shown.max() > hidden.max() or shown.min() > hidden.min())
        ends = (shown.max(), hidden.max()) if above else (shown.min(), hidden.min())
        level = float(sum(np.asarray(ends, np.float64)) / 2)
        drawn = self.random.random(self.shape_of(place)) < 0.7

        def seen(x: np.ndarray) -> np.ndarray:
            return x > level if above else x < level

        names = real(read.letters)
        got = seen(self._evaluated(read, {place: drawn if shows else ~drawn}))
        want = seen(shown) & self._along(part, drawn, names)
        more = tuple(i for i, x in enumerate(names) if x not in letters)
        whole = seen(shown).any(axis=more) if more else self._covers(seen(shown), names)
        if not (got == want).all() or not np.all(whole):
            raise Different("a mask is read as something else than it is")
        kind = PADDING if is_by_key(letters) else MASK
        return SideMeaning(kind, above, level, letters)

    def _rounds_bias(self, sides: Sequence[SideMeaning]) -> bool:
        """Tell whether the biases need more precision than the queries have."""
        query = self.found.passes[0].reads["q"].value
        numbers = Numbers(self.view, self.program.values[query].dtype)
        return is_rounded(
            [
                (numbers.entering(side.entries, self.found.inside), meaning.factor)
                for side, meaning in zip(self.found.sides, sides, strict=True)
                if meaning.kind == BIAS
            ]
        )

    def _factor(self, place: int) -> float:
        """Infers the factor of a bias that is added to the scores."""
        zero = self.argument_of(0.0, self.neutral)
        one = self.argument_of(0.0, self.neutral | {place: np.ones(())})
        seen = zero > MASKED
        more = one[seen] - zero[seen]
        if not np.allclose(more, more[0], rtol=_CLOSE) or more[0] == 0.0:
            raise Different("a bias is not added to all scores alike")
        return _rounded(more[0])

    def _evaluated(self, read: Tensor, given: Mapping[int, np.ndarray]) -> np.ndarray:
        """Evaluates a tensor, with a dim for each of its letters."""
        known = self.spread(self.neutral | dict(given))
        [x] = self.evaluated([read], known)
        return np.asarray(squeezed(x, read.letters), np.float64)

    def _along(self, part: Tensor, x: np.ndarray, names: list[str]) -> np.ndarray:
        """A part with a dim for each of some letters."""
        return placed(x.reshape(self.shape_of(part.value)), part.letters, names)

    def _covers(self, seen: np.ndarray, names: list[str]) -> bool:
        """Tell whether all keys that a query sees by position are among some."""
        argument = self.argument_of(0.0, self.neutral) > MASKED
        seen = placed(seen, names, real(self.found.scores.letters))
        return bool((seen | ~argument).all())

    def _mask(self) -> tuple[bool, int | None, int | None]:
        """The mask by position: from one query in the middle, along all keys."""
        counts = self.sizes.get(self.tokens, 1), self.sizes["k"]
        neutral = self.neutral

        def distances() -> tuple[np.ndarray, np.ndarray]:
            x = self.argument_of(0.0, neutral)
            letters = [n for n in self.found.scores.letters if n]
            order = [letters.index(n) for n in letters if n not in (self.tokens, "k")]
            rest = [letters.index(n) for n in (self.tokens, "k") if n in letters]
            value = np.transpose(x, [*order, *rest])
            seen = value > MASKED
            seen = seen.reshape(-1, len(self.at[self.tokens]), len(self.at["k"]))
            if not (seen == seen[0]).all():
                raise Different("another mask for each sequence or head")
            if np.abs(value[value > MASKED]).max(initial=0.0) > _CLOSE:
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

    def _prove(
        self,
        meaning: Meaning,
        drawn: Mapping[int, np.ndarray],
        spread: float | None = None,
    ) -> None:
        """Compares outputs and gradients with those of the attention that it means.

        Args:
            spread: about the standard deviation of scores, which are all negative
                then, and gradients are large; None for usual random numbers.
        """
        reads = [t for p in self.found.passes for t in p.reads.values()]
        makes = [t for p in self.found.passes for t in p.makes.values()]
        roots = dict.fromkeys(self._root(t.value) for t in reads)
        known = {v: self.drawn_at(v) for v in roots}
        if spread is not None:
            usual = abs(meaning.scale) * len(self.at.get("d", [0])) ** 0.5
            q, k = (
                {self._root(p.reads[x].value) for p in self.found.passes} for x in "qk"
            )
            for v in q | k:
                known[v] = known[v] * (spread / usual) ** 0.5
            if q.isdisjoint(k):
                known |= {v: abs(known[v]) for v in q}
                known |= {v: -np.sign(meaning.scale) * abs(known[v]) for v in k}
            steep = (p.reads["dout"] for p in self.found.passes if "dout" in p.reads)
            for v in {self._root(t.value) for t in steep} - q - k:
                known[v] = known[v] * _STEEP
        known |= dict(drawn)
        inputs = iter(self.evaluated(reads, known))
        results = iter(self.evaluated(makes, known))
        named = self._named(drawn, meaning)
        for p in self.found.passes:
            given = {
                name: (squeezed(next(inputs), t.letters), real(t.letters))
                for name, t in p.reads.items()
            }
            expected = Reference(meaning, given, self.at, *named).results()
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

    def _prove_everywhere(self, meaning: Meaning) -> None:
        """Proves it in all sequences and heads, of which constants may differ.

        Some heads may have a window, say, a bias, or another scale.
        """
        ends = (self.tokens, "k", "d", "e")
        counts = Counter(n for x, n in self.sizes.items() if x not in ends)
        for size, dims in sorted(counts.items()):
            if size > _FEW:
                few = _SAMPLED if size**dims <= _MANY else 0
                most = min(_MOST_PLAIN, int(_MOST ** (1 / dims)))
                self.place(self._positions(few), size, most)
                self._prove(meaning, self._drawn(meaning))
        self.place(self.positions())

    def _named(
        self, drawn: Mapping[int, np.ndarray], meant: Meaning
    ) -> tuple[list[Named], list[Named], list[tuple[Named, Named]]]:
        """Biases, masks that are true where a key is seen, and ids, that were drawn."""
        biases, masks, ids = [], [], []
        for side, meaning in zip(self.found.sides, meant.sides, strict=True):
            parts = []
            for one in side.parts:
                x = drawn[self.view.made(one.value)].reshape(self.shape_of(one.value))
                parts.append((squeezed(x, one.letters), real(one.letters)))
            if side.is_segments:
                ids.append((parts[0], parts[1]))
            elif self._is_mask(side):
                [(x, names)] = parts
                masks.append((x if self._shows(side) else ~x, names))
            else:
                biases += [(meaning.factor * x, names) for x, names in parts]
        return biases, masks, ids

    def _root(self, v: int) -> int:
        """Returns a contraction's operand before transposes and conversions."""
        while True:
            v = self.view.made(v)
            op = self.view.producer(v)
            if op is None or op.kind not in ("transpose", "convert"):
                return v
            v = op.operands[0]

    def _drawn_hiding(self, hidden: float) -> dict[int, np.ndarray]:
        """Random masks and biases; a mask hides this share of the keys."""
        found = {}
        for side in self.found.sides:
            for one in side.parts:
                v = self.view.made(one.value)
                shape = self.shape_of(v)
                if side.is_segments:
                    ids = self.random.random(shape) < hidden
                    is_bool = self.view.dtype(one) == "i1"
                    found[v] = ids if is_bool else ids.astype(np.int64)
                elif self._is_mask(side):
                    shown = self.random.random(shape) >= hidden
                    found[v] = shown if self._shows(side) else ~shown
                else:
                    found[v] = self.drawn_at(v)
        return found

    def _drawn_with_empty_rows(self) -> dict[int, np.ndarray]:
        """Random masks and biases; the first keys are hidden from all queries.

        From some queries all keys are.
        """
        found = self._drawn_hiding(_HIDDEN)
        for side in filter(self._is_mask, self.found.sides):
            [one] = side.parts
            v = self.view.made(one.value)
            letters = aligned(one.letters, self.program.shape(v))
            shown = np.array(found[v] == self._shows(side))
            along = [np.moveaxis(shown, d, 0) for d, x in enumerate(letters) if x]
            if "k" in letters:
                np.moveaxis(shown, letters.index("k"), 0)[:2] = False
            if letters.count("") < len(letters) - 1:
                along[0][:1] = False
            found[v] = shown if self._shows(side) else ~shown
        return found

    def _drawn(self, meaning: Meaning) -> dict[int, np.ndarray]:
        """Random masks and biases that show each query some key."""
        rows = [x for x in self.sizes if x not in ("d", "e", "k")]
        given = {
            "q": (np.empty([len(self.at[x]) for x in rows]), rows),
            "k": (np.empty(len(self.at["k"])), ["k"]),
        }
        pairs = [x for x in ORDER if x in self.sizes and x not in ("d", "e")]
        size = [len(self.at[x]) for x in pairs]
        for tried in range(_MOST_DRAWN):
            found = self._drawn_hiding(_HIDDEN * 0.8**tried)
            named = self._named(found, meaning)
            seen = Reference(meaning, given, self.at, *named).visible()
            if np.broadcast_to(seen, size).any(axis=-1).all():
                return found
        raise Different("its masks hide all keys from some query")


_OTHER_RESULT = {
    "out": "its output is not that of a softmax of scaled scores",
    "dq": "the gradient of the queries is another one",
    "dk": "the gradient of the keys is another one",
    "dv": "the gradient of the values is another one",
}


def _ends(size: int, few: int) -> np.ndarray:
    """All coordinates of a dim, or so many of its first ones and the last one."""
    return np.arange(size) if size <= few else np.array([*range(few - 1), size - 1])


def _rounded(x: float) -> float:
    """A factor without the noise of its measurement."""
    return float(f"{x:.7g}")

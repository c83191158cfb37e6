"""What a found attention computes, and the proof of it.

The ops between the contractions are evaluated in float64 on random numbers, at some
coordinates of each dim (`cfp.program.evaluate`). Scale, soft cap, mask and bias are
read off what comes out; then the output and all gradients must be those of an attention
with these, or the match is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cfp.analysis.unionfind import UnionFind
from cfp.attention.matching.find import Different, Found, Letters, Tensor
from cfp.attention.matching.view import View
from cfp.program.evaluate import Evaluator, NotEvaluated

_MASKED = -5e3  # What is added to, or stands for, the score of a key that is not seen.
_SAMPLED = 20  # Positions besides the first, the middle and the last ones.
_FEW = 2  # Coordinates of batch, heads and groups.
_FEATURES = 3  # Coordinates of the dims of a head.
_MOST_PLAIN = 4096  # Coordinates of a dim of which nothing is known.
_CLOSE = 1e-6


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a found attention computes.

    Attributes:
        tokens: the letter of the queries; the other "q" letters are groups of heads.
        scale, softcap: as in `cfp.attention`.
        causal, left, right: the mask by position.
        side: "", or what enters besides: "padding" (a key is seen where it is true),
            "hidden" (where it is false), "segments", "mask" (of bool, like "padding"
            but for pairs), or "bias".
    """

    tokens: str
    scale: float
    softcap: float | None = None
    causal: bool = False
    left: int | None = None
    right: int | None = None
    side: str = ""

    @property
    def mask_text(self) -> str:
        """The mask in words."""
        words = []
        if self.left is not None or self.right is not None:
            words.append(f"window of {self.left} and {self.right}")
        if self.causal:
            words.append("causal")
        if self.side:
            words.append(self.side)
        return ", ".join(words) or "full"


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


class _Proof:
    def __init__(self, view: View, evaluator: Evaluator, found: Found) -> None:
        self.view, self.found, self.evaluator = view, found, evaluator
        self.program = view.program
        self.random = np.random.default_rng(7)
        self.dims = UnionFind()
        self._join_all()
        self.sizes = found.sizes
        self.tokens = self._tokens()
        self._place(self._positions())

    def run(self) -> Meaning:
        """The meaning.

        Raises:
            Different, NotEvaluated: there is none, or it cannot be told.
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
            self._place(self._positions())
        return meaning

    # -- coordinates -------------------------------------------------------------------

    def _join_all(self) -> None:
        """Joins the dims of everything that is evaluated."""
        seen: set[int] = set()
        stack = [t.value for p in self._passes() for t in p.makes.values()]
        stack += [t.value for p in self._passes() for t in p.reads.values()]
        while stack:
            v = stack.pop()
            self._join_equal(v)
            op = self.view.producer(v)
            if op is None or op.id in seen or op.rule is None:
                continue
            outside = op.id not in self.found.inside
            dots = op.id in self.found.dots.values() or op.id == self.found.op
            is_dot = op.kind == "dot_general"
            shapes = ("transpose", "convert", "reshape")
            if is_dot and not self._is_ours(op.id):
                continue
            if outside and not dots and not is_dot:
                if not self.view.is_leaf(v) and op.kind not in shapes:
                    continue
            seen.add(op.id)
            by_factor: dict[int, tuple[int, int]] = {}
            tensors = zip(
                (*op.operands, *op.results),
                (*op.rule.operands, *op.rule.results),
                strict=False,
            )
            for x, dims in tensors:
                self._join_equal(x)
                for d, factors in enumerate(dims):
                    major = op.rule.major(factors)
                    if major is not None:
                        node = (x, d)
                        if major in by_factor:
                            self.dims.union(node, by_factor[major])
                        by_factor.setdefault(major, node)
            stack += op.operands

    def _is_ours(self, op: int) -> bool:
        return op in self._contractions()

    def _contractions(self) -> set[int]:
        found = set()
        for p in self._passes():
            found |= {t.use[0] for t in p.reads.values() if t.use}
            for t in p.makes.values():
                found.add(self.program.values[t.value].producer)
        return found | {self.found.op}

    def _join_equal(self, v: int) -> None:
        made = self.view.made(v)
        if made == v:
            return
        mine = [d for d, n in enumerate(self.program.values[v].shape) if n > 1]
        its = [d for d, n in enumerate(self.program.values[made].shape) if n > 1]
        for a, b in zip(mine, its, strict=True):
            self.dims.union((v, a), (made, b))

    def _passes(self):
        found = self.found
        return [*found.forward, *([found.backward] if found.backward else [])]

    def _tokens(self) -> str:
        """Which letter runs over queries: that along which there are most."""
        names = [x for x in self.sizes if x[:1] == "q"]
        return max(names, key=lambda x: (self.sizes[x], x), default="q0")

    def _positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Some queries and some keys; the same where there are as many."""
        counts = self.sizes.get(self.tokens, 1), self.sizes["k"]
        queries, keys = (self._some(count) for count in counts)
        return queries, queries if counts[0] == counts[1] else keys

    def _some(self, count: int) -> np.ndarray:
        near = [0, 1, 2, count // 2 - 1, count // 2, count // 2 + 1]
        near += [count - 3, count - 2, count - 1]
        near += [*self.random.integers(0, count, _SAMPLED)]
        return np.unique(np.clip(near, 0, count - 1))

    def _place(self, positions: tuple[np.ndarray, np.ndarray]) -> None:
        """Takes these positions of queries and keys from now on."""
        self.at: dict[str, np.ndarray] = {}
        for letter, size in self.sizes.items():
            few = _FEATURES if letter in ("d", "e") else _FEW
            self.at[letter] = np.arange(min(few, size))
        self.at[self.tokens], self.at["k"] = positions
        self.coordinates: dict[object, np.ndarray] = {}
        tensors = [
            t for p in self._passes() for t in (*p.reads.values(), *p.makes.values())
        ]
        tensors += [self.found.scores, self.found.argument, *self.found.sides]
        for t in tensors:
            for d, letter in enumerate(t.letters):
                if not letter:
                    continue
                root = self.dims.find((t.value, d))
                known = self.coordinates.setdefault(root, self.at[letter])
                if not np.array_equal(known, self.at[letter]):
                    raise Different("dims of different kinds are one")

    def _at(self, v: int, d: int) -> np.ndarray:
        size = self.program.values[v].shape[d]
        if size == 1:
            return np.zeros(1, int)
        found = self.coordinates.get(self.dims.find((v, d)))
        if found is None:
            if size > _MOST_PLAIN:
                raise NotEvaluated("a long dim of which nothing is known")
            return np.arange(size)
        return found

    # -- evaluation --------------------------------------------------------------------

    def _random(self, v: int) -> np.ndarray:
        shape = [len(self._at(v, d)) for d in range(len(self.program.values[v].shape))]
        return self.random.normal(size=shape)

    def _run(self, wanted: list[Tensor], known: Mapping[int, np.ndarray]) -> list:
        found = self.evaluator.run(
            [t.value for t in wanted], known, self._at, self.view.made
        )
        return [
            x.reshape(self._shape(t.value)) for t, x in zip(wanted, found, strict=True)
        ]

    def _shape(self, v: int) -> list[int]:
        return [len(self._at(v, d)) for d in range(len(self.program.values[v].shape))]

    def _argument_of(
        self, scores: np.ndarray | float, side: np.ndarray | None = None
    ) -> np.ndarray:
        """The softmax's argument, for scores (of one value, or as they lie)."""
        t = self.found.scores
        value = np.broadcast_to(np.asarray(scores, np.float64), self._shape(t.value))
        known = {self.view.made(t.value): value, **self._sides(side)}
        [x] = self._run([self.found.argument], known)
        return self._ordered(x, self.found.argument.letters, t.letters)

    def _sides(self, value: np.ndarray | None = None) -> dict[int, np.ndarray]:
        """Sides, as they are read: random ones, or all of one value."""
        known = {}
        for side in self.found.sides:
            v = self.view.made(side.value)
            shape = self._shape(v)
            if value is not None:
                known[v] = np.broadcast_to(value, shape)
            elif v in self.drawn:
                known[v] = self.drawn[v]
        return known

    drawn: Mapping[int, np.ndarray] = {}

    @staticmethod
    def _ordered(x: np.ndarray, have: Letters, want: Letters) -> np.ndarray:
        """An array with its dims in another order; dims of size 1 are left out."""
        x = x.reshape([n for n, letter in zip(x.shape, have, strict=True) if letter])
        names = [letter for letter in have if letter]
        wanted = [letter for letter in want if letter]
        return np.transpose(x, [names.index(letter) for letter in wanted])

    # -- what it computes --------------------------------------------------------------

    def _neutral(self) -> np.ndarray | None:
        """A value of the side that hides nothing and adds nothing, if there is one."""
        if not self.found.sides:
            return None
        [side] = self.found.sides
        dtype = self.program.values[side.value].dtype
        if dtype != "i1":
            return np.zeros(())
        seen = [(self._argument_of(0.0, np.asarray(x)) > _MASKED).sum() for x in (0, 1)]
        self.true_shows = seen[1] > seen[0]
        return np.asarray(self.true_shows)

    true_shows = True

    def _scale(self) -> tuple[float, float | None]:
        """Scale and soft cap, from the argument of a score that all have."""
        neutral = self._neutral()
        zero = self._argument_of(0.0, neutral)
        seen = zero > _MASKED
        if not seen.any():
            raise Different("no key is seen")

        def slope(score: float) -> float:
            steps = self._argument_of(score, neutral)[seen] - zero[seen]
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
            x = self._argument_of(0.0, neutral)
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
                some = self._some(counts[1])
                some = np.unique([*some, first, other, other - 1, other + 1])
                some = np.clip(some, 0, counts[1] - 1)
                self._place((np.unique(some), np.unique(some)))
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
        for p in self._passes():
            for t in p.reads.values():
                roots.setdefault(self._root(t.value), np.empty(0))
        known = {v: self._random(v) for v in roots}
        self.drawn = self._drawn(meaning)
        known |= self.drawn
        tensors = [t for p in self._passes() for t in p.reads.values()]
        arrays = self._run(tensors, known)
        made = [t for p in self._passes() for t in p.makes.values()]
        results = iter(self._run(made, known))
        inputs = iter(arrays)
        for p in self._passes():
            given = {
                name: (_squeezed(next(inputs), t.letters), _real(t.letters))
                for name, t in p.reads.items()
            }
            expected = _Reference(self, meaning, given).results()
            for name, t in p.makes.items():
                got = _squeezed(next(results), t.letters)
                want = np.einsum(
                    expected[name][0],
                    [*map(_index, expected[name][1])],
                    [*map(_index, _real(t.letters))],
                )
                far = np.linalg.norm(got - want)
                if not far <= _CLOSE * (np.linalg.norm(want) + 1e-30):
                    raise Different(_OTHER_RESULT[name])
        self.drawn = {}

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
                found[v] = self._random(v)
                continue
            array = self.random.random(self._shape(v)) < 0.7
            names = [x for x in side.letters]
            if "k" in names:
                # The first key is seen by all, a causal mask or not.
                place = [slice(None)] * array.ndim
                place[names.index("k")] = slice(0, 1)
                array[tuple(place)] = True
            found[v] = array if self.true_shows else ~array
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


def _real(letters: Letters) -> list[str]:
    return [letter for letter in letters if letter]


def _squeezed(x: np.ndarray, letters: Letters) -> np.ndarray:
    return x.reshape([n for n, letter in zip(x.shape, letters, strict=True) if letter])


_NAMES = ("b0", "b1", "b2", "b3", "q0", "q1", "q2", "q3", "k", "d", "e")


def _index(letter: str) -> int:
    return _NAMES.index(letter)


class _Reference:
    """Attention and its gradients by the textbook, dims by their letters."""

    def __init__(self, proof: _Proof, meaning: Meaning, given: Mapping) -> None:
        self.proof, self.meaning, self.given = proof, meaning, given
        names = {x for _, letters in given.values() for x in letters}
        self.rows = [x for x in _NAMES if x in names and x not in ("k", "d", "e")]
        self.pairs = [*self.rows, *(["k"] if "k" in names else [])]

    def _sum(self, *terms, out: list[str]) -> np.ndarray:
        args = []
        for x, letters in terms:
            args += [x, [*map(_index, letters)]]
        return np.einsum(*args, [*map(_index, out)], optimize=True)

    def _visible(self) -> np.ndarray:
        proof, meaning = self.proof, self.meaning
        shape = [1] * len(self.pairs)
        q, k = proof.at[meaning.tokens], proof.at["k"]
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

    def _side(self) -> np.ndarray | None:
        proof = self.proof
        for side in proof.found.sides:
            x = proof.drawn[proof.view.made(side.value)]
            letters = side.letters
            x = x.reshape(
                [n for n, a in zip(proof._shape(side.value), letters, strict=True) if a]
            )
            names = _real(letters)
            wanted = [a for a in self.pairs if a in names]
            x = np.transpose(x, [names.index(a) for a in wanted])
            sizes = iter(x.shape)
            return x.reshape([next(sizes) if a in names else 1 for a in self.pairs])
        return None

    def results(self) -> dict[str, tuple[np.ndarray, list[str]]]:
        """Output and gradients, each with the letters of its dims."""
        meaning, given = self.meaning, self.given
        q, k, v = given["q"], given["k"], given["v"]
        raw = meaning.scale * self._sum(q, k, out=self.pairs)
        slope = np.full((), meaning.scale)
        x = raw
        if meaning.softcap is not None:
            x = meaning.softcap * np.tanh(raw / meaning.softcap)
            slope = meaning.scale * (1 - np.tanh(raw / meaning.softcap) ** 2)
        seen, side = self._visible(), self._side()
        if side is not None and meaning.side == "bias":
            x = x + side
        elif side is not None:
            seen = seen & (side if self.proof.true_shows else ~side)
        x = np.where(seen, x, -np.inf)
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
        ds = (dx * slope, self.pairs)
        found["dv"] = (self._sum(p, dout, out=v[1]), v[1])
        found["dq"] = (self._sum(ds, k, out=q[1]), q[1])
        found["dk"] = (self._sum(ds, q, out=k[1]), k[1])
        return found

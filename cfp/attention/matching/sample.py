"""A found attention at some coordinates of each dim, where its ops are evaluated."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cfp.analysis.classes import UnionFind
from cfp.attention.matching.found import Different, Found, Letters, Pass, Tensor
from cfp.attention.matching.view import View
from cfp.program.evaluate import Evaluator, NotEvaluated

_SAMPLED = 20  # Positions besides the first, the middle and the last ones.
_FEW = 2  # Coordinates of batch, heads and groups.
_FEATURES = 3  # Coordinates of the dims of a head.
_MOST_PLAIN = 4096  # Coordinates of a dim of which nothing is known.


class Sample:
    """Coordinates of a found attention's dims, and what its ops make there."""

    def __init__(self, view: View, evaluator: Evaluator, found: Found) -> None:
        self.view, self.found, self.evaluator = view, found, evaluator
        self.program = view.program
        self.random = np.random.default_rng(7)
        self.dims = UnionFind()
        self._join_all()
        self.sizes = found.sizes
        self.tokens = self._tokens()
        self.place(self.positions())

    # -- coordinates -------------------------------------------------------------------

    def _join_all(self) -> None:
        """Joins the dims of everything that is evaluated."""
        for t in self.entering():
            self._join_equal(t.value)
        path = self._to_sides()
        seen: set[int] = set()
        stack = [t.value for p in self.passes() for t in p.makes.values()]
        stack += [t.value for p in self.passes() for t in p.reads.values()]
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
            if outside and not dots and not is_dot and op.id not in path:
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

    def _is_ours(self, op: int) -> bool:
        return op in self._contractions()

    def _contractions(self) -> set[int]:
        found = set()
        for p in self.passes():
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

    def passes(self) -> list[Pass]:
        return [*self.found.passes]

    def entering(self) -> list[Tensor]:
        """Tensors that masks and biases are made of, and those that are read."""
        return [t for side in self.found.sides for t in (*side.parts, *side.reads)]

    def _tokens(self) -> str:
        """Returns the letter that runs over queries: the one of the largest dim."""
        names = [x for x in self.sizes if x[:1] == "q"]
        return max(names, key=lambda x: (self.sizes[x], x), default="q0")

    def positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Some queries and some keys; the same where there are as many."""
        counts = self.sizes.get(self.tokens, 1), self.sizes["k"]
        queries, keys = (self.some(count) for count in counts)
        return queries, queries if counts[0] == counts[1] else keys

    def some(self, count: int) -> np.ndarray:
        near = [0, 1, 2, count // 2 - 1, count // 2, count // 2 + 1]
        near += [count - 3, count - 2, count - 1]
        near += [*self.random.integers(0, count, _SAMPLED)]
        return np.unique(np.clip(near, 0, count - 1))

    def place(self, positions: tuple[np.ndarray, np.ndarray]) -> None:
        """Takes these positions of queries and keys from now on."""
        self.at: dict[str, np.ndarray] = {}
        for letter, size in self.sizes.items():
            few = _FEATURES if letter in ("d", "e") else _FEW
            self.at[letter] = np.arange(min(few, size))
        self.at[self.tokens], self.at["k"] = positions
        self.coordinates: dict[object, np.ndarray] = {}
        tensors = [
            t for p in self.passes() for t in (*p.reads.values(), *p.makes.values())
        ]
        tensors += [self.found.scores, self.found.argument, *self.entering()]
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

    def drawn_at(self, v: int) -> np.ndarray:
        shape = [len(self._at(v, d)) for d in range(len(self.program.values[v].shape))]
        return self.random.normal(size=shape)

    def evaluated(self, wanted: list[Tensor], known: Mapping[int, np.ndarray]) -> list:
        found = self.evaluator.run(
            [t.value for t in wanted], known, self._at, self.view.made
        )
        return [
            x.reshape(self.shape_of(t.value))
            for t, x in zip(wanted, found, strict=True)
        ]

    def shape_of(self, v: int) -> list[int]:
        return [len(self._at(v, d)) for d in range(len(self.program.values[v].shape))]

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
        return self.ordered(x, self.found.argument.letters, t.letters)

    def spread(self, given: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Values in their sizes."""
        return {v: np.broadcast_to(x, self.shape_of(v)) for v, x in given.items()}

    @staticmethod
    def ordered(x: np.ndarray, have: Letters, want: Letters) -> np.ndarray:
        """An array with its dims in another order; dims of size 1 are left out."""
        x = x.reshape([n for n, letter in zip(x.shape, have, strict=True) if letter])
        names = [letter for letter in have if letter]
        wanted = [letter for letter in want if letter]
        return np.transpose(x, [names.index(letter) for letter in wanted])

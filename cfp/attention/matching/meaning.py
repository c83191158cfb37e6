"""Says how a kernel takes the masks and biases of a pass that is proved.

A constant mask is evaluated on all positions: it is none, causal, a window, or of its
own. Another mask or bias is handed over whole, as the value that the program computes:
by key, if it hides keys from all queries, or for pairs of queries and keys; as lengths,
if the program compares keys' places with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from cfp.attention.matching.core import Core, Key, Side
from cfp.attention.matching.found import ORDER, Letters, Pass, Tensor
from cfp.attention.matching.functions import (
    BIAS,
    KEYS,
    LENGTHS,
    MASK,
    MEAN,
    NAN,
    Meaning,
    SideMeaning,
    placed,
    shown,
)
from cfp.attention.matching.proof import MASKED, States, Table
from cfp.program.graph import numpy_dtype
from cfp.program.replace import Different, Use

_KEYS = ORDER.index("k")
_ORDERS = MappingProxyType(
    {"GE": np.greater_equal, "GT": np.greater, "LE": np.less_equal, "LT": np.less}
)
_NOT_READ = (
    "a mask or bias is not read in the loop that computes its gradients, as it would "
    "be with jax.checkpoint around the loop's body"
)
_HIDES = "may hide all keys of a query"
Read = tuple[int, Use, Letters]
Window = tuple[bool, int | None]  # causal, and how many keys to the left


@dataclass(frozen=True)
class Proved:
    """A proved pass, with its computation by a kernel.

    Attributes:
        core: its steps as written.
        reads: the masks and biases that a kernel reads.
    """

    one: Pass
    core: Core
    meaning: Meaning
    reads: tuple[Tensor, ...]


def heads_of(one: Pass) -> str:
    """The letter by which keys have heads; "" if all queries share theirs."""
    letters = {x for t in one.reads.values() for x in t.letters if x}
    batch = [x for x in letters if x[0] == "b"]
    if len(batch) < 2 and sum(x[0] == "q" for x in letters) > 1:
        return ""
    own = [x for x in one.reads["k"].letters if x in batch]
    return own[-1] if own else ""


class Reader:
    """Reads a pass that is proved as a kernel takes it."""

    def __init__(self, core: Core, table: Table, sizes: Mapping[str, int]) -> None:
        self.core, self.table, self.sizes = core, table, sizes
        self.values, self.program = core.values, core.program
        queries = [x for x in sizes if x[0] == "q"]
        self.tokens = max(queries, key=lambda x: (sizes[x], x), default="q0")
        self.heads = heads_of(core.one)

    def proved(self, passes_hidden: bool) -> Proved:
        """A kernel's view of the pass.

        Raises:
            Different: a mask is not read where the pass is, or a query may see no key,
                and has what no kernel makes.
        """
        table, core = self.table, self.core
        self._check_biases()
        fixed = [k for k in table.masks if self.values.is_leaf(core.sides[k].node[0])]
        free = [key for key in table.masks if key not in fixed]
        own, others = self._states(fixed), self._states(free)
        constants = [(core.sides[k].node[0], core.sides[k].letters) for k in fixed]
        by_key: list[Read] = []
        window, is_full = None, False
        if len(own) * len(others) == len(table.visible):
            if others == {(1.0,)}:
                more, by_key = self._by_key(core.sides[free[0]])
                constants += more
                own = {(*one, *[1.0] * len(more)) for one in own}
            window, is_full = self._window(constants, own)
        if window is None or table.biases or (free and not by_key):
            window, (sides, reads) = (False, None), self._whole()
        else:
            sides, reads = [], []
        if not sides and by_key:
            sides, reads = self._keys_or_lengths(by_key[0], window)
        may_be_empty = bool(free) or not is_full
        return Proved(
            core.one,
            core,
            Meaning(
                tokens=self.tokens,
                scale=table.scale,
                causal=window[0],
                left=window[1],
                sides=tuple(sides),
                visible=table.visible if any(s.kind == MASK for s in sides) else (),
                empty=self._empty() if may_be_empty else "",
                passes_hidden=passes_hidden and may_be_empty,
            ),
            tuple(Tensor(v, use, letters) for v, use, letters in reads),
        )

    def _states(self, keys: Sequence[Key]) -> set[States]:
        """The states of some masks with which a key may be seen."""
        places = [[*self.table.masks].index(key) for key in keys]
        return {tuple(one[i] for i in places) for one in self.table.visible}

    # -- masks that are constants ------------------------------------------------------

    def _window(
        self, reads: Sequence[tuple[int, Letters]], states: set[States]
    ) -> tuple[Window | None, bool]:
        """The window that constants leave, and whether each query sees a key in it.

        Args:
            states: those of the constants that show a key.
        """
        if not reads:
            return (False, None), True
        if states in ({(0.0,)}, {(1.0,)}):
            [(v, letters)] = reads
            if self._is_causal(v, letters, (1.0,) in states):
                return (True, None), True
        numbers = [(self.values.number((v, ())), own) for v, own in reads]
        form = ("window", self.tokens, *numbers, *sorted(states))
        if form not in self.values.known:
            arrays = [placed(self.values.dense(v), own, ORDER) for v, own in reads]
            rows = self._rows(shown(arrays, states))
            own = self._window_of(rows[0]) if (rows == rows[0]).all() else None
            self.values.known[form] = own, bool(rows.any(axis=-1).all())
        return self.values.known[form]

    def _rows(self, x: np.ndarray) -> np.ndarray:
        """[others, queries, keys] of an array with a dim for each of `ORDER`."""
        x = np.moveaxis(x, [ORDER.index(self.tokens), _KEYS], [-2, -1])
        return x.reshape(-1, *x.shape[-2:])

    def _is_causal(self, v: int, letters: Letters, shows: bool) -> bool:
        """True for a comparison of places in which each row ends at its own place.

        Along rising numbers a comparison changes once, so that two keys of each row
        decide it, at any length.
        """
        op, count = self.program.maker(self.values.same(v)), self.sizes["k"]
        if op is None or op.kind != "compare" or op.direction not in _ORDERS:
            return False
        arrays = (placed(self.values.dense(x), letters, ORDER) for x in op.operands)
        places = [self._rows(x) for x in arrays]
        along = [x for x in places if x.shape == (1, 1, count)]
        if count == 1 or sorted(x.shape for x in places) != [
            (1, 1, count),
            (1, count, 1),
        ]:
            return False
        if (along[0][0, 0, 1:] < along[0][0, 0, :-1]).any():
            return False
        pairs = [np.broadcast_to(x[0], (count, count)) for x in places]
        own, after = (
            _ORDERS[op.direction](*(x.diagonal(k) for x in pairs)) == shows
            for k in (0, 1)
        )
        return bool(own.all() and not after.any())

    def _window_of(self, seen: np.ndarray) -> Window | None:
        """Rule 2: whether a mask is none, or causal with so many keys to the left."""
        if seen.all():
            return False, None
        count = self.sizes["k"]
        if seen.shape != (count, count):
            return None
        last = int(seen[-1].sum()) - 1
        causal, before = np.tri(count, dtype=bool), np.tri(count, k=-last - 1)
        if not np.array_equal(seen, causal & (before == 0)):
            return None
        return True, None if last >= count - 1 else last

    # -- masks that the program computes -----------------------------------------------

    def _by_key(self, side: Side) -> tuple[list[tuple[int, Letters]], list[Read]]:
        """The constants, and the mask of keys, that a mask is all of at once."""
        if not side.reads or self.program.values[side.node[0]].dtype != "i1":
            return [], []
        fixed, others = self._conjuncts(side.reads[-1])
        own = {x for _, _, letters in others for x in letters if x}
        if len(others) > 1 or "k" not in own or not own <= self._batch | {"k"}:
            return [], []
        return [(v, letters) for v, _, letters in fixed], others

    @property
    def _batch(self) -> set[str]:
        return {x for x in self.sizes if x[0] == "b" and x != self.heads}

    def _conjuncts(self, read: Read) -> tuple[list[Read], list[Read]]:
        """The masks that all have to show a key: constants, and others."""
        fixed: list[Read] = []
        others: list[Read] = []
        stack = [read]
        while stack:
            one = stack.pop()
            op = self.program.maker(one[0])
            if op is not None and op.kind == "and" and op.parent == self.core.parent:
                stack += [self.core.reads_of(op, i, one[2])[-1] for i in (0, 1)]
            else:
                (fixed if self.values.is_leaf(one[0]) else others).append(one)
        return fixed, others

    def _keys_or_lengths(
        self, read: Read, window: Window
    ) -> tuple[list[SideMeaning], list[Read]]:
        lengths = self._lengths(read) if window[1] is None else None
        kind, read = (LENGTHS, lengths) if lengths else (KEYS, read)
        letters = tuple(x for x in ORDER if x in read[2])
        return [SideMeaning(kind, letters=letters)], [read]

    def _lengths(self, read: Read) -> Read | None:
        """The lengths that a mask compares keys' places with, if it does."""
        v, _, letters = read
        op = self.program.maker(v)
        if op is None or op.kind != "compare" or op.parent != self.core.parent:
            return None
        if op.direction not in ("LT", "GT"):
            return None
        place, length = (0, 1) if op.direction == "LT" else (1, 0)
        if not self.values.is_leaf(op.operands[place]):
            return None
        counted = placed(self.values.dense(op.operands[place]), letters, ORDER)
        shape = [self.sizes["k"] if x == "k" else 1 for x in ORDER]
        if not np.array_equal(counted, np.arange(self.sizes["k"]).reshape(shape)):
            return None
        last = self.core.reads_of(op, length, letters)[-1]
        is_i32 = self.program.values[last[0]].dtype == "i32"
        return last if is_i32 and {x for x in last[2] if x} <= self._batch else None

    def _whole(self) -> tuple[list[SideMeaning], list[Read]]:
        """Returns all masks and biases as read."""
        sides, reads = [], []
        for key in (*self.table.masks, *self.table.biases):
            side = self.core.sides[key]
            if not side.reads:
                raise Different(_NOT_READ)
            kind = MASK if key in self.table.masks else BIAS
            factor = self.table.biases.get(key, 1.0)
            letters = tuple(x for x in ORDER if x in side.letters)
            sides.append(SideMeaning(kind, letters=letters, factor=factor))
            reads.append(side.reads[-1])
        return sides, reads

    def _check_biases(self) -> None:
        """Raises if a kernel would round the terms that are added to scores.

        Rounding changes weights if all keys of a query are low.
        """
        dtype = self.program.values[self.core.one.reads["q"].value].dtype
        for key, factor in self.table.biases.items():
            v = self.core.sides[key].node[0]
            if not self.values.is_leaf(v):
                raise Different(
                    "a bias that the step computes may hide all keys of a query"
                )
            x = self.values.dense(v)
            is_exact = (x.astype(numpy_dtype(dtype)) == x).all()
            if not is_exact or np.frexp(abs(factor))[0] != 0.5:
                raise Different(
                    f"a kernel adds a bias in {dtype}, which rounds this one"
                )
            if not (np.abs(x.astype(np.float64) * factor) < -MASKED).all():
                raise Different(f"a bias {_HIDES}")
        if len(self.table.biases) > 1:
            raise Different("two biases are rounded apart from their sum")

    # -- rule 5: rows without keys -----------------------------------------------------

    def _empty(self) -> str:
        """The output of a query that sees no key."""
        if len(self.table.fills) != 1:
            raise Different(
                "a query may see no key, and hidden keys have different numbers"
            )
        [fill] = self.table.fills
        if fill == -np.inf:
            return NAN
        if self.table.adds:
            raise Different(
                f"a query may see no key, and {fill:g} added to its scores hides none"
            )
        return MEAN

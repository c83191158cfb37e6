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
)
from cfp.attention.matching.proof import MASKED, Table
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
Read = tuple[int, Use, Letters]
Window = tuple[bool, int | None]  # causal, and how many keys to the left


@dataclass(frozen=True)
class Proved:
    """A pass that is proved, and how a kernel computes it.

    Attributes:
        core: its steps as it is written.
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


def proved_pass(
    core: Core, table: Table, sizes: Mapping[str, int], passes_hidden: bool
) -> Proved:
    """A kernel's view of a pass.

    Raises:
        Different: a mask is not read where the pass is, or a query may see no key, and
            has what no kernel makes.
    """
    return _Reader(core, table, sizes).proved(passes_hidden)


class _Reader:
    def __init__(self, core: Core, table: Table, sizes: Mapping[str, int]) -> None:
        self.core, self.table, self.sizes = core, table, sizes
        self.values, self.program = core.values, core.program
        queries = [x for x in sizes if x[0] == "q"]
        self.tokens = max(queries, key=lambda x: (sizes[x], x), default="q0")
        self.heads = heads_of(core.one)

    def proved(self, passes_hidden: bool) -> Proved:
        table, core = self.table, self.core
        fixed = [k for k in table.masks if self._is_leaf(core.sides[k])]
        free = [key for key in table.masks if key not in fixed]
        window, is_full = self._fixed(fixed)
        if table.biases:
            window = None
        sides, reads = [], []
        if window and free:
            sides, reads, window = self._by_key(free, window)
        if window is None or (free and not sides):
            sides, reads = self._whole()
            window = (False, None)
        may_be_empty = bool(free) or not is_full
        causal, left = window
        return Proved(
            core.one,
            core,
            Meaning(
                tokens=self.tokens,
                scale=table.scale,
                causal=causal,
                left=left,
                sides=tuple(sides),
                visible=table.visible if any(s.kind == MASK for s in sides) else (),
                empty=self._empty() if may_be_empty else "",
                passes_hidden=passes_hidden and may_be_empty,
                rounds_bias=self._rounds_bias(),
                open_bias=self._is_open(),
            ),
            tuple(Tensor(v, use, letters) for v, use, letters in reads),
        )

    def _is_leaf(self, side: Side) -> bool:
        return self.values.is_leaf(side.node[0])

    # -- masks that are constants ------------------------------------------------------

    def _fixed(self, fixed: Sequence[Key]) -> tuple[Window | None, bool]:
        """The window that constants leave, and whether each query sees a key in it.

        None if it is none, or other masks decide what constants mean.
        """
        table = self.table
        places = [[*table.masks].index(key) for key in fixed]
        own = {tuple(states[i] for i in places) for states in table.visible}
        others = {
            tuple(x for i, x in enumerate(states) if i not in places)
            for states in table.visible
        }
        if len(own) * len(others) != len(table.visible):
            return None, False
        sides = [self.core.sides[key] for key in fixed]
        reads = [(side.node[0], side.letters) for side in sides]
        if not fixed or (
            own in ({(0.0,)}, {(1.0,)}) and self._is_causal(*reads[0], (1.0,) in own)
        ):
            return (bool(fixed), None), True
        form = ("window", tuple(fixed), tuple(sorted(own)))
        if form not in self.values.known:
            seen = self._seen(reads, own)
            found = self._window(seen), bool(seen.any(axis=-1).all())
            self.values.known[form] = found
        return self.values.known[form]

    def _seen(
        self, reads: Sequence[tuple[int, Letters]], visible: set[tuple[float, ...]]
    ) -> np.ndarray:
        """The keys that constants with some states show: see `_squeezed`."""
        seen: np.ndarray = np.zeros([1] * len(ORDER), bool)
        arrays = [in_order(self.values.dense(v), letters) for v, letters in reads]
        for states in visible:
            both = np.ones([1] * len(ORDER), bool)
            for array, state in zip(arrays, states, strict=True):
                both = both & (array == state)
            seen = seen | both
        return _squeezed(seen, (self.tokens, "k"))

    def _is_causal(self, v: int, letters: Letters, shows: bool) -> bool:
        """True of a comparison of places, each row of which ends at its own place.

        Along rising numbers a comparison changes once, so that two keys of each row
        tell all of it, of whatever length.
        """
        values, keys = self.values, self.sizes["k"]
        op = self.program.maker(values.same(v))
        if op is None or op.kind != "compare":
            return False
        if op.direction not in _ORDERS or self.sizes.get(self.tokens) != keys:
            return False
        places = [in_order(values.dense(x), letters) for x in op.operands]
        sizes = [[n for n in x.shape if n > 1] for x in places]
        if sizes != [[keys], [keys]]:
            return False
        key_first = places[0].shape[_KEYS] == keys
        query, key_places = places[::-1] if key_first else places
        is_by_query = query.shape[ORDER.index(self.tokens)] == keys
        if not is_by_query or key_places.shape[_KEYS] != keys:
            return False
        query, key_places = query.reshape(-1), key_places.reshape(-1)
        if not (key_places[1:] >= key_places[:-1]).all():
            return False
        compare = _ORDERS[op.direction]

        def seen(query: np.ndarray, key: np.ndarray) -> np.ndarray:
            found = compare(key, query) if key_first else compare(query, key)
            return found == shows

        at = seen(query, key_places).all()
        return bool(at and not seen(query[:-1], key_places[1:]).any())

    def _window(self, seen: np.ndarray) -> Window | None:
        """Rule 2: whether a mask is none, or causal with so many keys to the left."""
        if seen.all():
            return False, None
        queries, keys = (self.sizes.get(x, 1) for x in (self.tokens, "k"))
        if seen.shape != (queries, keys) or queries != keys:
            return None
        count, last = len(seen), int(seen[-1].sum()) - 1
        place = np.arange(count)
        away = place[:, None] - place
        if not np.array_equal(seen, (away >= 0) & (away <= last)):
            return None
        return True, None if last >= count - 1 else last

    # -- masks that the program computes -----------------------------------------------

    def _by_key(
        self, free: Sequence[Key], window: Window
    ) -> tuple[list[SideMeaning], list[Read], Window]:
        """A mask of keys, or lengths, if that and a window are all; else nothing.

        A mask that is several ones at once counts as these.
        """
        nothing: tuple[list[SideMeaning], list[Read], Window] = [], [], window
        side = self.core.sides[free[0]]
        is_bool = self.program.values[side.node[0]].dtype == "i1"
        place = [*self.table.masks].index(free[0])
        if len(free) > 1 or not side.reads or not is_bool:
            return nothing
        if any(not states[place] for states in self.table.visible):
            return nothing
        fixed, others = self._conjuncts(side.reads[-1])
        if len(others) != 1 or (fixed and window != (False, None)):
            return nothing
        for read in fixed:
            if len(fixed) == 1 and self._is_causal(read[0], read[2], True):
                window = (True, None)
            else:
                found = self._window(self._seen([(read[0], read[2])], {(1.0,)}))
                if found is None or len(fixed) > 1:
                    return nothing
                window = found
        batch = {x for x in self.sizes if x[0] == "b" and x != self.heads}
        [read] = others
        own = {x for x in read[2] if x}
        if "k" not in own or not own <= batch | {"k"}:
            return nothing
        lengths = self._lengths(read, batch) if window[1] is None else None
        kind, read = (LENGTHS, lengths) if lengths else (KEYS, read)
        letters = tuple(x for x in ORDER if x in read[2])
        return [SideMeaning(kind, letters=letters)], [read], window

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

    def _lengths(self, read: Read, batch: set[str]) -> Read | None:
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
        counted = in_order(self.values.dense(op.operands[place]), letters)
        shape = [self.sizes["k"] if x == "k" else 1 for x in ORDER]
        if not np.array_equal(counted, np.arange(self.sizes["k"]).reshape(shape)):
            return None
        last = self.core.reads_of(op, length, letters)[-1]
        is_i32 = self.program.values[last[0]].dtype == "i32"
        return last if is_i32 and {x for x in last[2] if x} <= batch else None

    def _whole(self) -> tuple[list[SideMeaning], list[Read]]:
        """All masks and biases, as they are read."""
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

    def _rounds_bias(self) -> bool:
        """Tell whether the dtype of queries rounds what is added to scores."""
        query = self.program.values[self.core.one.reads["q"].value].dtype
        for key, factor in self.table.biases.items():
            v = self.core.sides[key].node[0]
            op = self.program.maker(v)
            narrow = v if op is None or op.kind != "convert" else op.operands[0]
            is_exact = query in (self.program.values[x].dtype for x in (v, narrow))
            if not is_exact and self.values.is_leaf(v):
                x = self.values.dense(v)
                is_exact = bool((x.astype(numpy_dtype(query)) == x).all())
            if not is_exact or np.frexp(abs(factor))[0] != 0.5:
                return True
        return len(self.table.biases) > 1

    def _is_open(self) -> bool:
        """True if a bias may be so low for all keys that rounding decides weights."""
        for key in self.table.biases:
            v = self.core.sides[key].node[0]
            if not self.values.is_leaf(v):
                return True
            x = self.values.dense(v).astype(np.float64) * self.table.biases[key]
            if not (np.abs(x) < -MASKED).all():
                return True
        return False

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


def in_order(x: np.ndarray, letters: Letters) -> np.ndarray:
    """An array with a dim for each of `ORDER`."""
    names = [a for a in letters if a]
    x = x.reshape([n for n, a in zip(x.shape, letters, strict=True) if a])
    x = x.transpose(sorted(range(len(names)), key=lambda i: ORDER.index(names[i])))
    sizes = iter(x.shape)
    return x.reshape([next(sizes) if a in names else 1 for a in ORDER])


def _squeezed(x: np.ndarray, kept: Sequence[str]) -> np.ndarray:
    """[query, key], with further dims before if it differs along these."""
    for d, letter in enumerate(ORDER):
        if letter not in kept and x.shape[d] > 1:
            same = x == x.take([0], axis=d)
            x = x.take([0], axis=d) if same.all() else x
    rest = [d for d, a in enumerate(ORDER) if a not in kept and x.shape[d] > 1]
    places = [*rest, *(ORDER.index(a) for a in kept)]
    return x.transpose(places + [d for d in range(x.ndim) if d not in places]).reshape(
        [x.shape[d] for d in places]
    )

"""Translates masks and biases of a proved pass to arguments of kernels.

A constant mask is evaluated at all positions: it hides nothing, is causal, is a window,
or is another pattern. Other masks and biases are passed as the program's values. A mask
that hides keys from all queries alike is passed by key. A comparison of key positions
with lengths is passed as the lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cfp.attention.matching.core import KEYS, ORDER, Core, Key, Tensor
from cfp.attention.matching.functions import (
    BIAS,
    LENGTHS,
    MASK,
    MEAN,
    NAN,
    Letters,
    Meaning,
    SideMeaning,
    placed,
    shown,
)
from cfp.attention.matching.proof import MASKED, States, Table
from cfp.program.graph import Op, numpy_dtype
from cfp.program.part import COMPARE
from cfp.program.replace import Different

_NOT_READ = (
    "a mask or bias is not read in the loop that computes its gradients, as it would "
    "be with jax.checkpoint around the loop's body"
)
Window = tuple[bool, int | None]  # (causal, number of keys to the left or None)


@dataclass(frozen=True, eq=False)
class Proved:
    """A proved pass, and the attention for a kernel to compute.

    Attributes:
        core: the pass's steps.
        reads: the masks and biases that a kernel reads, in the order of meaning.sides.
    """

    core: Core
    meaning: Meaning
    reads: tuple[Tensor, ...]


def heads_of(one: Core) -> str:
    """Letter of the key heads; "" if all query heads share one."""
    letters = {x for t in one.reads.values() for x in t.letters if x}
    batch = [x for x in letters if x[0] == "b"]
    if len(batch) < 2 and sum(x[0] == "q" for x in letters) > 1:
        return ""
    own = [x for x in one.reads["k"].letters if x in batch]
    return own[-1] if own else ""


def _ordered(letters: Letters) -> Letters:
    return tuple(x for x in ORDER if x in letters)


class Reader:
    """Translates a proved pass to a kernel's arguments."""

    def __init__(self, core: Core, table: Table, sizes: Mapping[str, int]) -> None:
        self.core, self.table, self.sizes = core, table, sizes
        self.values, self.program = core.every.values, core.every.program
        queries = [x for x in sizes if x[0] == "q"]
        self.tokens = max(queries, key=lambda x: (sizes[x], x), default="q0")
        self.heads = heads_of(core)

    def proved(self) -> Proved:
        """Returns the pass with its meaning.

        Raises:
            Different: a mask is not read in the pass's body; a bias would be rounded;
                or a query may see no key, and no kernel gives the program's output.
        """
        table, core = self.table, self.core
        self._check_biases()
        sides_of = {key: core.sides[key] for key in table.masks}
        fixed = [k for k, x in sides_of.items() if self.values.is_leaf(x.node[0])]
        free = [key for key in table.masks if key not in fixed]
        own, others = self._states(fixed), self._states(free)
        constants = [(sides_of[k].node[0], sides_of[k].letters) for k in fixed]
        masks, visible = [self._read(key) for key in free], tuple(sorted(others))
        if visible == ((1.0,) * len(free),):  # All masks must show a key.
            more, masks = self._conjuncts(masks)
            constants += more
            own = {(*one, *[1.0] * len(more)) for one in own}
            visible = ((1.0,) * len(masks),)
        by_key = all({*letters} <= self._batch | {"k"} for _, letters in masks)
        window, is_full = None, False
        if by_key and len(own) * len(others) == len(table.visible):
            window, is_full = self._window(constants, own)
        if window is None or table.biases:
            window, by_key, visible = (False, None), False, table.visible
            masks = [self._read(key) for key in table.masks]
        kind = MASK
        if by_key and visible == ((1.0,),) and window[1] is None:
            lengths = self._lengths(masks[0][0])
            kind, masks = (LENGTHS, [lengths]) if lengths else (MASK, masks)
        biases = [(*self._read(key), factor) for key, factor in table.biases.items()]
        sides = [SideMeaning(kind, letters) for _, letters in masks]
        sides += [SideMeaning(BIAS, letters, factor) for _, letters, factor in biases]
        may_be_empty = bool(free) or not is_full
        return Proved(
            core,
            Meaning(
                tokens=self.tokens,
                heads=self.heads,
                scale=table.scale,
                causal=window[0],
                left=window[1],
                sides=tuple(sides),
                visible=visible if kind == MASK else (),
                by_key=by_key,
                empty=self._empty() if may_be_empty else "",
                passes_hidden=core.is_backward
                and may_be_empty
                and table.hidden[0] in table.passing,
            ),
            (*(read for read, _ in masks), *(read for read, *_ in biases)),
        )

    def _states(self, keys: Sequence[Key]) -> set[States]:
        """Combinations of these masks' states with which a key may be visible."""
        places = [[*self.table.masks].index(key) for key in keys]
        return {tuple(one[i] for i in places) for one in self.table.visible}

    def _read(self, key: Key) -> tuple[Tensor, Letters]:
        """The smallest tensor of a mask or bias in the pass's body, and its letters."""
        side, op_of = self.core.sides[key], self.program.ops
        here = [x for x in side.reads if op_of[x.use[0]].parent == self.core.parent]
        if not here:
            raise Different(_NOT_READ)
        return here[-1], _ordered(side.letters)

    # -- constant masks ----------------------------------------------------------------

    def _window(
        self, reads: Sequence[tuple[int, Letters]], states: set[States]
    ) -> tuple[Window | None, bool]:
        """Window of constant masks (None for other patterns); True if no row is empty.

        Args:
            states: combinations of the masks' states that show a key.
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
            arrays = [placed(self.values.array(v), own, ORDER) for v, own in reads]
            rows = self._rows(shown(arrays, states))
            own = self._window_of(rows[0]) if (rows == rows[0]).all() else None
            self.values.known[form] = own, bool(rows.any(axis=-1).all())
        return self.values.known[form]

    def _rows(self, x: np.ndarray) -> np.ndarray:
        """Reshapes an array with the dims of `ORDER` to [others, queries, keys]."""
        x = np.moveaxis(x, [ORDER.index(self.tokens), KEYS], [-2, -1])
        return x.reshape(-1, *x.shape[-2:])

    def _is_causal(self, v: int, letters: Letters, shows: bool) -> bool:
        """True for a comparison of positions that is a causal mask.

        Along rising numbers a comparison changes once. So two keys of each query decide
        it: its own must be visible, and the next hidden.
        """
        op, count = self.program.maker(self.values.same(v)), self.sizes["k"]
        if op is None or op.kind != "compare" or op.direction in ("EQ", "NE"):
            return False
        arrays = (placed(self.values.array(x), letters, ORDER) for x in op.operands)
        places = {x.shape: x for x in map(self._rows, arrays)}
        keys = places.get((1, 1, count), np.zeros(0))
        if count == 1 or {*places} != {(1, 1, count), (1, count, 1)}:
            return False
        pairs = [np.broadcast_to(x[0], (count, count)) for x in places.values()]
        own, after = (
            COMPARE[op.direction](*(x.diagonal(k) for x in pairs)) == shows
            for k in (0, 1)
        )
        rises = (keys[..., 1:] >= keys[..., :-1]).all()
        return bool(rises and own.all() and not after.any())

    def _window_of(self, seen: np.ndarray) -> Window | None:
        """Rule 2: window of a mask [queries, keys]; None for another pattern."""
        if seen.all():
            return False, None
        count = self.sizes["k"]
        if seen.shape != (count, count):
            return None
        last = int(seen[-1].sum()) - 1
        before = np.tri(count, k=-last - 1, dtype=bool)
        is_window = np.array_equal(seen, np.tri(count, dtype=bool) & ~before)
        return (True, None if last >= count - 1 else last) if is_window else None

    # -- computed masks ----------------------------------------------------------------

    @property
    def _batch(self) -> set[str]:
        return {x for x in self.sizes if x[0] == "b" and x != self.heads}

    def _conjuncts(
        self, masks: Sequence[tuple[Tensor, Letters]]
    ) -> tuple[list[tuple[int, Letters]], list[tuple[Tensor, Letters]]]:
        """Splits masks at `and` ops; returns constant masks, and others."""
        fixed: list[tuple[int, Letters]] = []
        others: list[tuple[Tensor, Letters]] = []
        stack = [*masks]
        while stack:
            read, letters = stack.pop()
            op = self.program.maker(read.value)
            if op is not None and op.kind == "and" and op.parent == self.core.parent:
                both = (self._below(op, i, read.letters) for i in (0, 1))
                stack += [(one, _ordered(one.letters)) for one in both]
            elif self.values.is_leaf(read.value):
                fixed.append((read.value, read.letters))
            else:
                others.append((read, letters))
        return fixed, others

    def _below(self, op: Op, index: int, letters: Letters) -> Tensor:
        """An operand, or the smaller value that it broadcasts."""
        return self.core.every.reads_of(op, index, letters)[-1]

    def _lengths(self, read: Tensor) -> tuple[Tensor, Letters] | None:
        """The int32 lengths that a mask compares key positions with; None if other."""
        op = self.program.maker(read.value)
        if op is None or op.kind != "compare" or op.parent != self.core.parent:
            return None
        if op.direction not in ("LT", "GT"):
            return None
        place, length = (0, 1) if op.direction == "LT" else (1, 0)
        if not self.values.is_leaf(op.operands[place]):
            return None
        counted = placed(self.values.array(op.operands[place]), read.letters, ORDER)
        shape = [self.sizes["k"] if x == "k" else 1 for x in ORDER]
        if not np.array_equal(counted, np.arange(self.sizes["k"]).reshape(shape)):
            return None
        last = self._below(op, length, read.letters)
        is_i32 = self.program.values[last.value].dtype == "i32"
        letters = _ordered(last.letters)
        return (last, letters) if is_i32 and {*letters} <= self._batch else None

    def _check_biases(self) -> None:
        """Raises Different if a kernel would round biases, or a bias may hide all keys.

        Rounding changes weights if all scores of a query are very low.
        """
        dtype = self.program.values[self.core.reads["q"].value].dtype
        for key, factor in self.table.biases.items():
            v = self.core.sides[key].node[0]
            if not self.values.is_leaf(v):
                raise Different(
                    "a bias that the step computes may hide all keys of a query"
                )
            x = self.values.array(v)
            is_exact = (x.astype(numpy_dtype(dtype)) == x).all()
            if not is_exact or np.frexp(abs(factor))[0] != 0.5:
                raise Different(f"a kernel adds a bias in {dtype}, which rounds it")
            if not (np.abs(x.astype(np.float64) * factor) < -MASKED).all():
                raise Different("a bias may hide all keys of a query")
        if len(self.table.biases) > 1:
            raise Different("two biases are rounded apart from their sum")

    # -- rule 5: rows without keys -----------------------------------------------------

    def _empty(self) -> str:
        """Output of a query that sees no key: MEAN or NAN."""
        passes = {states in self.table.passing for states in self.table.hidden}
        if len(self.table.fills) != 1 or len(passes) > 1:
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

"""Proves that a pass is an attention, and finds its mask, bias and scale.

A mask or bias, whose value depends on the position, is a side. The softmax's
argument must be a function of the score and the sides at the same position. For each
state of the masks it is a constant, plus a multiple of the score, plus biases. The
steps are the same at all positions. So the proof compares their results on a few
positions, for numbers of all kinds, with a softmax of this argument.

`Reader` translates masks and constant biases of a proved pass to kernels' arguments. A
constant mask is evaluated at all positions: it hides nothing, is causal, is a window,
or is another pattern. Other masks and biases are passed as the program's values. A mask
that hides keys from all queries and heads alike is passed by key. A comparison of key
positions with lengths is passed as the lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import prod
from typing import Any

import numpy as np

from cfp.kernels.core import KEYS, OPS, ORDER, Arg, Core, Key, Step, Tensor, contracted
from cfp.kernels.functions import (
    BIAS,
    LENGTHS,
    MASK,
    MEAN,
    NAN,
    Letters,
    Meaning,
    SideMeaning,
    common,
    placed,
    shown,
)
from cfp.kernels.region import ELEMENTWISE, VIEWS, Values
from cfp.program.graph import Op, numpy_dtype
from cfp.program.part import COMPARE, NotConstant
from cfp.program.replace import Different

MASKED = -9e3  # An argument up to this hides the key.
_MOST_STATES = 64
_MOST_SIDES = 3  # Most bools in the formula of a mask in floats.
_MOST_OPS = 8  # Most nested ops of such a formula.
_CLOSE = 1e-6
_ROUNDED = {"f32": 1e-3, "bf16": 0.1, "f16": 0.1}
# Kinds of random scores, and their approximate size.
_KINDS = {"usual": 1, "steep": 5, "low": 20, "equal": 1, "huge": 2e3}
_DRAWS = 16  # Masks of each kind of scores.
_SMALL = {"b": 2, "q": 3, "k": 5, "d": 3, "e": 2}
_ANOTHER = "scores go through another function than a constant scale, masks, biases"

States = tuple[float, ...]
_NOT_READ = (
    "the loop that computes gradients does not read a mask or bias; it would with "
    "jax.checkpoint around the loop's body"
)
Window = tuple[bool, int | None]  # (causal, number of keys to the left or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The softmax's argument: scale * score + biases, or a number that hides a key.

    Attributes:
        argument: number of the step that makes the argument.
        masks: sides of few values, which may hide keys, with these values (states).
        biases: sides that are added, with their factors.
        visible, hidden: combinations of the masks' states that show, or hide, a key.
        passing: combinations with which the argument depends on the score.
        fills: constants in the arguments of hidden keys.
        adds: True if such a constant is added to a score without absorbing it.
    """

    argument: int
    scale: float
    masks: Mapping[Key, States]
    biases: Mapping[Key, float]
    visible: tuple[States, ...]
    hidden: tuple[States, ...]
    passing: tuple[States, ...]
    fills: frozenset[float]
    adds: bool


@np.errstate(all="ignore")
def prove(core: Core) -> Table:
    """Proves that a pass is an attention; returns its softmax's argument.

    Raises:
        Different: the pass is no attention, or it cannot be proved.
    """
    proved, form = core.every.values.known, _form(core)
    if form not in proved:
        table = _table(core)
        _compare(core, table, is_rounded=False)
        _compare(core, table, is_rounded=True)
        proved[form] = table, [*core.steps].index(table.argument)
    table, place = proved[form]
    return replace(table, argument=[*core.steps][place])


def _form(core: Core) -> tuple:
    """Key of everything that a proof depends on; equal for equal layers."""
    places: dict[Arg, int] = {number: i for i, number in enumerate(core.steps)}
    values = core.every.program.values

    def part(arg: Arg) -> tuple:
        if isinstance(arg, float) or arg in core.sides:
            return "value", repr(arg)
        letters = arg[1] if isinstance(arg, tuple) else ()
        return "place", places.setdefault(arg, len(places)), letters

    def form(step: Step) -> tuple:
        dtypes = (values[v].dtype for v in (*step.op.operands, *step.op.results))
        is_of = step.op.kind, step.op.attributes, step.letters, step.sums
        return *is_of, *dtypes, *map(part, step.args)

    names = chain(core.roots.items(), core.outputs.items(), [("", core.scores)])
    return *map(form, core.steps.values()), *((n, part(arg)) for n, arg in names)


# -------------------------------------------------------------------------- sides


def states_of(core: Core, key: Key) -> States | None:
    """Values that a side may have if they are few, which makes it a mask; else None.

    Raises:
        Different: it is not bool, f32, bf16 or f16, or a constant cannot be evaluated.
    """
    values, v = core.every.values, core.sides[key].node[0]
    dtype = core.every.program.values[v].dtype
    if dtype != "i1" and dtype not in _ROUNDED:
        raise Different(f"a mask or bias has dtype {dtype}, not bool, f32, bf16 or f16")
    if dtype == "i1" or not values.is_leaf(v):
        return _made_of_bools(values, v)
    try:
        return _distinct(values.array(v))
    except NotConstant as error:
        raise Different(f"a mask or bias depends on {error}") from error


def _distinct(x: np.ndarray) -> States | None:
    """The distinct numbers of an array, sorted; None if there are more than four."""
    found, rest = [], x.reshape(-1)
    while rest.size and len(found) <= _MOST_SIDES:
        found.append(float(rest[0]))
        rest = rest[rest != rest[0]]
    return tuple(sorted(found)) if not rest.size else None


def _made_of_bools(values: Values, v: int, most: int = _MOST_OPS) -> States | None:
    """Values that a bool, or a short formula of bools and numbers, may have; or None.

    Operands count as independent, since their iterations or positions may differ.
    """
    value, op = values.program.values[v], values.program.maker(values.same(v))
    if value.dtype == "i1":
        return 0.0, 1.0
    if (number := values.number_of_constant(v)) is not None:
        return (number,)
    if op is None or op.kind not in ELEMENTWISE | VIEWS or not most:
        return None
    own = [_made_of_bools(values, x, most - 1) or () for x in op.operands]
    if not 0 < prod(map(len, own)) <= 2**_MOST_SIDES:
        return None
    apply = OPS.get(op.kind, lambda x: x)  # Views keep numbers.
    made = np.array([apply(*one) for one in product(*own)])
    return tuple(sorted({*made.astype(numpy_dtype(value.dtype)).astype(float)}))


# ------------------------------------------------------------- the softmax's argument


def _table(core: Core) -> Table:
    """Returns the softmax's argument as a `Table`; Different if not an attention's."""
    states = {key: states_of(core, key) for key in core.sides}
    masks = {key: own for key, own in states.items() if own is not None}
    biases = [key for key, own in states.items() if own is None]
    combinations = [*product(*masks.values())]
    if len(combinations) > _MOST_STATES:
        raise Different("the masks have too many combinations of values")
    sums = _sums(core, dict(zip(masks, np.array(combinations).T, strict=True)), biases)
    argument = _argument(core, sums)
    made = sums[argument]
    assert made is not None, "an argument is a sum"
    is_hidden = made[:, 0] <= MASKED
    if is_hidden.all():
        raise Different("all keys are hidden")
    constants, scores = made[:, 0], made[:, 1:]
    first = scores[~is_hidden][0]
    passes, is_alike = scores.any(axis=1), np.isclose(scores, first, _CLOSE, 0)
    if not first[0] or not np.isfinite(first).all():
        raise Different(_ANOTHER)
    if not (is_alike[~is_hidden].all() and np.all(abs(constants[~is_hidden]) < 1e-5)):
        raise Different(_ANOTHER)
    if not is_alike[passes].all():
        raise Different("hidden scores are scaled in another way than visible ones")
    adds = is_hidden & passes & (constants + 1e5 * first[0] != constants)

    def some(chosen: Any) -> tuple[States, ...]:
        return tuple(c for c, own in zip(combinations, chosen, strict=True) if own)

    return Table(
        argument=argument,
        scale=float(f"{first[0]:.7g}"),
        masks=masks,
        biases=dict(zip(biases, map(float, first[1:]), strict=True)),
        visible=some(~is_hidden),
        hidden=some(is_hidden),
        passing=some(passes),
        fills=frozenset(map(float, constants[is_hidden])),
        adds=bool(adds.any()),
    )


def _sums(
    core: Core, masks: Mapping[Key, np.ndarray], biases: Sequence[Key]
) -> dict[Arg, np.ndarray | None]:
    """Coefficients [state, (constant, score, *biases)]; None for non-linear steps."""
    count = len(next(iter(masks.values()), [0]))

    def one(place: int, number: Any) -> np.ndarray:
        made = np.zeros((count, 2 + len(biases)))
        made[:, place] = number
        return made

    found: dict[Arg, np.ndarray | None] = {core.scores: one(1, 1.0)}
    found |= {key: one(0, own) for key, own in masks.items()}
    found |= {key: one(2 + i, 1.0) for i, key in enumerate(biases)}
    for number, step in core.steps.items():
        own = [one(0, a) if isinstance(a, float) else found.get(a) for a in step.args]
        reads = [x for x in own if x is not None]
        if number != core.scores:
            found[number] = _sum(step, reads) if len(reads) == len(own) else None
    return found


def _sum(step: Step, reads: list[np.ndarray]) -> np.ndarray | None:
    """Linear formula of an op's result from its operands'; None if not linear."""
    kind = step.op.kind
    if kind in VIEWS or (kind == "reduce" and not step.sums):
        return reads[0]
    if kind in ("add", "subtract", "negate"):
        return OPS[kind](*reads)
    if kind == "select" and not reads[0][:, 1:].any():
        return np.where(reads[0][:, :1] != 0, *reads[1:])
    if kind in ("multiply", "divide"):
        if kind == "multiply" and not reads[0][:, 1:].any():
            reads = reads[::-1]
        if not reads[1][:, 1:].any():
            return OPS[kind](reads[0], reads[1][:, :1])
    return None


def _argument(core: Core, sums: Mapping[Arg, Any]) -> int:
    """Number of the one step linear in scores that other steps read; else Different."""
    found: set[int] = set()
    others = (step for n, step in core.steps.items() if sums[n] is None)
    for arg in (a for step in others for a in step.args if isinstance(a, int)):
        if sums[arg] is not None and sums[arg][:, 1].any():
            while core.steps[arg].op.kind in VIEWS:
                [arg] = (a for a in core.steps[arg].args if isinstance(a, int))
            found.add(arg)
    if len(found) != 1:
        raise Different(_ANOTHER)
    return found.pop()


# --------------------------------------------------- a few positions stand for all


def _compare(core: Core, table: Table, is_rounded: bool) -> None:
    """Raises Different if outputs, in float64 or rounded, are not an attention's."""
    known, values = _drawn(core, table, is_rounded), core.every.program.values
    every = [v for one in core.steps.values() for v in one.op.operands + one.op.results]
    limits = (_ROUNDED.get(values[v].dtype, 0.0) for v in every)
    close = max(limits) if is_rounded else _CLOSE
    want, made = _reference(core, known, table), core.run(known, cast=is_rounded)
    # An output that should be zero, such as the gradient of equal scores, is noise.
    usual = sum(_norm(np.where(np.isfinite(x), x, 0)) for x in want.values()) + 1
    for name, number in core.outputs.items():
        got, right = np.broadcast_arrays(made[number], want[name])
        finite = np.isfinite(right)
        far, size = (_norm(np.where(finite, x, 0)) for x in (got - right, right))
        is_near = np.array_equal(np.isfinite(got), finite)
        if not is_near or not (far <= close * (size + 1e-3 * usual)).all():
            raise Different(_OTHER[name])


def _norm(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(x).reshape(len(x), -1).sum(axis=1))


def _drawn(core: Core, table: Table, is_rounded: bool) -> dict[Key, np.ndarray]:
    """Random operands and sides, for scores of all kinds, also overflowing ones.

    Values that are not proved equal get different numbers. Masks are random,
    and show few to nearly all keys. In some draws the first query sees no key or all,
    for each combination of states. If rounded, there are no such draws: scores are of
    usual size, and all queries see the first key.
    """
    random, roots = np.random.default_rng(7), core.roots
    kinds = ["usual"] if is_rounded else _KINDS
    forced = () if is_rounded else (*table.hidden, *table.visible)
    draws = [*product(kinds, (*[None] * _DRAWS, *forced))]
    dots = [step.args for step in core.steps.values() if step.op.kind == "dot_general"]
    operands = {key for key in chain(*dots, roots.values()) if isinstance(key, tuple)}
    found = {k: random.normal(size=_shape(len(draws), k[1])) for k in sorted(operands)}
    q, k = found[roots["q"]], found[roots["k"]]
    for n, (kind, _) in enumerate(draws):
        spread = (_KINDS[kind] / abs(table.scale)) ** 0.5
        q[n], k[n] = spread * q[n], spread * k[n]
        if kind == "low":
            q[n], k[n] = abs(q[n]), -np.sign(table.scale) * abs(k[n])
        if kind == "equal":
            k[n] = k[n].take([0], axis=KEYS - 1)
        if kind == "steep" and "dout" in roots:
            found[roots["dout"]][n] *= 1e3
    share = random.random(_shape(len(draws), ()))
    first = tuple(slice(None) if x == "k" else 0 for x in ORDER[1:])
    for key in core.sides:
        found[key] = random.normal(size=_shape(len(draws), key[1]))
    for place, (key, states) in enumerate(table.masks.items()):
        seen, shape = table.visible[0][place], found[key].shape
        x = random.choice(states, shape)
        found[key] = np.where(random.random(shape) < share, seen, x)
        for n, (_, others) in enumerate(draws):
            if others is not None:
                found[key][(n, *first)] = others[place]
        if is_rounded:
            np.moveaxis(found[key], KEYS, 0)[0] = seen
    return found


def _shape(draws: int, letters: Sequence[str]) -> list[int]:
    return [draws, *(_SMALL[x[0]] if x in letters else 1 for x in ORDER[1:])]


def _reference(
    core: Core, known: Mapping[Key, Any], table: Table
) -> dict[str, np.ndarray]:
    """Output, or gradients, of a softmax of the pass's argument, by the textbook."""
    roots = {name: known[key] for name, key in core.roots.items()}
    pairs = core.steps[core.scores].letters
    scores = contracted(roots["q"], roots["k"], pairs)
    x = core.run({**known, core.scores: scores})[table.argument]
    x = np.broadcast_to(x, scores.shape)
    weights = np.exp(x - x.max(axis=KEYS, keepdims=True))
    weights = weights / weights.sum(axis=KEYS, keepdims=True)

    def mixed(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return contracted(x, y, core.steps[core.outputs[name]].letters)

    if not core.is_backward:
        return {"out": mixed("out", weights, roots["v"])}
    dp = contracted(roots["dout"], roots["v"], pairs)
    dx = weights * (dp - (weights * dp).sum(axis=KEYS, keepdims=True))
    masks = [known[key] for key in table.masks]
    passes = shown(masks, table.passing) if masks else True
    ds = np.where(passes, table.scale * dx, 0.0)
    return {
        "dq": mixed("dq", ds, roots["k"]),
        "dk": mixed("dk", ds, roots["q"]),
        "dv": mixed("dv", weights, roots["dout"]),
    }


_OTHER = {
    "out": "its output is not that of a softmax of scaled scores",
    "dq": "the gradient of the queries is another one",
    "dk": "the gradient of the keys is another one",
    "dv": "the gradient of the values is another one",
}


@dataclass(frozen=True, eq=False)
class Proved:
    """A proved pass, and the attention for a kernel to compute.

    Attributes:
        core: the pass's steps.
        reads: masks, lengths and biases that a kernel reads, in order of meaning.sides.
    """

    core: Core
    meaning: Meaning
    reads: tuple[Tensor, ...]


def heads_of(one: Core) -> str:
    """Letter of key heads: keys' last batch dim; "" if all query heads share one."""
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
            Different: a mask, a bias or the output without visible keys fits no kernel.
            NotConstant: a constant mask cannot be evaluated.
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
        """A side's smallest tensor here, and the side's letters; Different if none."""
        side, op_of = self.core.sides[key], self.program.ops
        here = [x for x in side.reads if op_of[x.use[0]].parent == self.core.parent]
        if not here:
            raise Different(_NOT_READ)
        return here[-1], _ordered(side.letters)

    # -- constant masks ----------------------------------------------------------------

    def _window(
        self, reads: Sequence[tuple[int, Letters]], states: set[States]
    ) -> tuple[Window | None, bool]:
        """(causal, left) of constant masks, or None; True if all queries see a key."""
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
        """True if a comparison, equal to `shows` at visible keys, is proved causal.

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
        """(causal, left) if a mask [queries, keys] shows all or is causal; or None."""
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
        """An operand, or the value in the op's body that views make it from."""
        return self.core.every.reads_of(op, index, letters)[-1]

    def _lengths(self, read: Tensor) -> tuple[Tensor, Letters] | None:
        """The int32 lengths that a mask compares keys with; None for other masks."""
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
        """Raises Different for several biases, or computed, rounded or very large ones.

        Rounding changes weights if all scores of a query are very low.
        """
        dtype = common(self.core.dtypes.values())
        for key, factor in self.table.biases.items():
            v = self.core.sides[key].node[0]
            if not self.values.is_leaf(v):
                raise Different(
                    "a bias that the step computes may hide all keys of a query"
                )
            x = self.values.array(v)
            is_exact = (x.astype(dtype) == x).all()
            if not is_exact or np.frexp(abs(factor))[0] != 0.5:
                raise Different(f"a kernel would round a bias to {dtype}")
            if not (np.abs(x.astype(np.float64) * factor) < -MASKED).all():
                raise Different("a bias may hide all keys of a query")
        if len(self.table.biases) > 1:
            raise Different("a kernel would round the sum of two biases")

    # -- rows without keys -------------------------------------------------------------

    def _empty(self) -> str:
        """Output of a query that sees no key: MEAN or NAN; or raises Different."""
        passes = {states in self.table.passing for states in self.table.hidden}
        if len(self.table.fills) != 1 or len(passes) > 1:
            raise Different(
                "a query may see no key, and masks hide keys in different ways"
            )
        [fill] = self.table.fills
        if fill == -np.inf:
            return NAN
        if self.table.adds:
            raise Different(
                f"a query may see no key, and adding {fill:g} does not hide keys"
            )
        return MEAN

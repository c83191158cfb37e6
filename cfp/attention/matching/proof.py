"""Proves that a pass is an attention, and finds its mask, bias and scale.

A value that may vary with positions is a side: rule 2. At each position scores and
sides make the softmax's argument, so that a table of its values for all states of the
masks describes it fully. Steps do the same at all positions. Their results on a few
positions, with numbers of all kinds, must equal those of an attention with this
argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Any

import numpy as np

from cfp.attention.matching.core import (
    KEYS,
    Arg,
    Core,
    Key,
    contracted,
)
from cfp.attention.matching.found import ORDER
from cfp.attention.matching.functions import shown
from cfp.attention.matching.region import ELEMENTWISE, VIEWS
from cfp.attention.matching.values import Values
from cfp.program.constants import NotConstant
from cfp.program.graph import numpy_dtype
from cfp.program.replace import Different

MASKED = -9e3  # A score that is at most this is of a key that is hidden.
_MOST_STATES = 64
_MOST_SIDES = 3  # Bools that a float is made of.
_CLOSE = 1e-6
_ROUNDED = {"f32": 1e-3, "bf16": 0.1, "f16": 0.1}
# Kinds of scores, and about their size.
_KINDS = {"usual": 1, "steep": 5, "low": 20, "equal": 1, "huge": 2e3, "rounded": 1}
_DRAWS = 6  # Masks of each kind of scores.
_SMALL = {"b": 2, "q": 3, "k": 5, "d": 3, "e": 2}
_PROBES = (0.0, 1.0, -1e5)
_LINEAR = VIEWS | {"add", "maximum", "negate", "reduce", "select", "subtract"}

States = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The softmax's argument: scale * score + biases, or a number that hides a key.

    Attributes:
        argument: the step that makes it.
        states: of all sides: see `states_of`.
        masks: the sides that hide keys, and the states that each may have.
        visible, hidden: the states of all masks with which a key is, or is not, seen.
        biases: the sides that are added, and their factors.
        fills: the numbers that hidden keys have.
        adds: whether one of these is added to a score, and does not absorb it.
    """

    argument: Arg
    states: Mapping[Key, States | None]
    scale: float
    masks: Mapping[Key, States]
    visible: tuple[States, ...]
    hidden: tuple[States, ...]
    biases: Mapping[Key, float]
    fills: frozenset[float]
    adds: bool

    def seen(self, given: Mapping[Any, Any]) -> Any:
        """True where a key is seen, by the values of masks."""
        masks = [given[key] for key in self.masks]
        return shown(masks, self.visible) if masks else np.True_


@np.errstate(all="ignore")
def prove(core: Core) -> tuple[Table, bool]:
    """Proves a pass.

    Returns:
        The argument of its softmax, and whether gradients pass through hidden scores.

    Raises:
        Different: it computes something else.
    """
    table = _table(core)
    form, known = _form(core, table), core.values.known
    if form not in known:
        try:
            _compare(core, table, passes_hidden=False)
            known[form] = False
        except Different:
            if not core.one.is_backward:
                raise
            _compare(core, table, passes_hidden=True)
            known[form] = True
    return table, known[form]


def _form(core: Core, table: Table) -> tuple:
    """Returns a key of everything that a comparison depends on, except numbers."""
    places: dict[Arg, int] = {}

    def place(arg: Arg) -> Any:
        if isinstance(arg, tuple):
            return (
                places.setdefault(arg, len(places)),
                arg[1],
                table.states.get(arg, ()),
            )
        return arg if isinstance(arg, float) else places[arg]

    program, form = core.program, []
    for number, step in core.steps.items():
        dtype = program.values[step.op.results[0]].dtype
        args = tuple(map(place, step.args))
        form.append((step.op.kind, step.op.attributes, dtype, step.sums, args))
        places[number] = len(places)
    ends = [(n, place(a), place(b)) for n, (a, b) in core.mixes.items()]
    ends += [(n, place(key), "") for n, key in core.roots.items()]
    dtypes = [program.values[t.value].dtype for t in core.one.reads.values()]
    ends += [(place(core.scores), place(table.argument), _pairs(core))]
    return (*form, *ends, *dtypes)


# ------------------------------------------------------------------ rule 2: sides


def states_of(core: Core, key: Key) -> States | None:
    """The values that a mask may have at a position; None of any float.

    Raises:
        Different: it is neither a mask nor a bias.
    """
    values, v = core.values, core.sides[key].node[0]
    dtype = core.program.values[v].dtype
    if dtype != "i1" and dtype not in _ROUNDED:
        raise Different(f"a value in {dtype} enters between its contractions")
    try:
        if dtype != "i1" and values.is_leaf(v):
            return _distinct(values.dense(v))
        return _made_of_bools(values, v)
    except NotConstant as error:
        raise Different(f"a mask or bias of it is made by {error}") from error


def _distinct(x: np.ndarray) -> States | None:
    """The numbers of an array, if they are few."""
    found, rest = [], x.reshape(-1)
    while rest.size and len(found) <= _MOST_SIDES:
        found.append(float(rest[0]))
        rest = rest[rest != rest[0]]
    return tuple(sorted(found)) if not rest.size else None


def _made_of_bools(values: Values, v: int) -> States | None:
    """The values of a float that is made of bools alone, at each position.

    Each bool that is read counts as one of its own: another iteration's, or another
    position's, may differ from it.
    """
    stack, states = [v := values.same(v)], values.states
    while stack:
        one, op = stack[-1], values.program.maker(stack[-1])
        if values.program.values[one].dtype == "i1":
            states[one] = (0.0, 1.0)
        elif (number := values.number_of_constant(one)) is not None:
            states[one] = (number,)
        elif op is None or op.kind not in ELEMENTWISE | VIEWS:
            states[one] = None
        else:
            reads = [values.same(x) for x in op.operands]
            if missing := [x for x in reads if x not in states]:
                stack += missing
                continue
            states[one] = _combined(values, one, reads)
        stack.pop()
    return states[v]


def _combined(values: Values, v: int, reads: Sequence[int]) -> States | None:
    """The values of an op's result, by those of its operands.

    An operand that is read twice may be of two iterations.
    """
    own = [values.states[x] or () for x in reads]
    is_apart = len({*reads}) == len(reads)
    if not is_apart or not 0 < prod(map(len, own)) <= 2**_MOST_SIDES:
        return None
    found: set[float] = set()
    for combination in product(*own):
        given = {
            x: np.full([1] * len(values.program.shape(x)), number)
            for x, number in zip(reads, combination, strict=True)
        }
        found.add(float(values.dense(v, given).reshape(-1)[0]))
    return tuple(sorted(found))


# ------------------------------------------------------------- the softmax's argument


def _argument(core: Core) -> Arg:
    """The softmax's argument: an exponential's operand without a row's number."""
    found: set[Arg] = set()
    for step in core.steps.values():
        if step.op.kind != "exponential":
            continue
        [arg] = step.args
        while isinstance(arg, int):
            own = core.steps[arg]
            shift = own.args[1] if own.op.kind == "subtract" else None
            is_shifted = isinstance(shift, int) and not core.steps[shift].is_pointwise
            if own.op.kind not in VIEWS and not is_shifted:
                break
            arg = own.args[0]
        found.add(arg)
    if len(found) != 1:
        raise Different("it is not one softmax of scores")
    [arg] = found
    if not (isinstance(arg, int) and core.steps[arg].is_pointwise):
        raise Different("its scores are combined before the softmax")
    return arg


def _degree(core: Core, argument: Arg, states: Mapping[Key, States | None]) -> int:
    """Returns the degree in scores and biases together; at least 2 if not linear."""
    found: dict[Arg, int] = {core.scores: 1}
    found |= {key: int(own is None) for key, own in states.items()}
    for number, step in core.steps.items():
        own = [0 if isinstance(a, float) else found.get(a, 2) for a in step.args]
        if number == core.scores:
            continue
        if step.op.kind == "multiply":
            found[number] = sum(own)
        elif step.op.kind == "divide":
            found[number] = own[0] + 2 * own[1]
        else:
            found[number] = (1 if step.op.kind in _LINEAR else 2) * max(own)
    return found[argument]


def _table(core: Core) -> Table:
    """Evaluates the argument for all states of masks, several scores, and biases."""
    states = {key: states_of(core, key) for key in core.sides}
    argument = _argument(core)
    another = "scores go through another function than a constant scale, masks, biases"
    if _degree(core, argument, states) > 1:
        raise Different(another)
    masks = {key: own for key, own in states.items() if own is not None}
    biases = [key for key, own in states.items() if own is None]
    combinations = [*product(*masks.values())]
    if len(combinations) > _MOST_STATES:
        raise Different("more than six masks enter")
    probes = [(s, [0.0] * len(biases)) for s in _PROBES]
    for place in range(len(biases)):
        probes.append((0.0, [float(i == place) for i in range(len(biases))]))
    rows = [(c, s, f) for c in combinations for s, f in probes]
    dots = [n for n, step in core.steps.items() if step.op.kind == "dot_general"]
    given: dict[Arg, list[float]] = {n: [0.0] * len(rows) for n in dots}
    given[core.scores] = [s for _, s, _ in rows]
    given |= {key: [c[i] for c, _, _ in rows] for i, key in enumerate(masks)}
    given |= {key: [f[i] for _, _, f in rows] for i, key in enumerate(biases)}
    made = core.run(
        {name: _along_keys(x) for name, x in given.items()}, only_pointwise=True
    )
    x = np.broadcast_to(made[argument], _along_keys(given[core.scores]).shape)
    x = x.reshape(len(combinations), len(probes))
    is_seen = x[:, 0] > MASKED
    if not is_seen.any():
        raise Different("no key is seen")
    first = x[is_seen][0]
    scale = first[1] - first[0]
    factors = first[len(_PROBES) : len(_PROBES) + len(biases)] - first[0]
    want = np.array([scale * s + factors @ np.array(f) for s, f in probes])
    if scale == 0.0 or not np.isfinite(scale) or not _near(x[is_seen], want):
        raise Different(another)
    hidden = x[~is_seen]
    adds = ~np.all(hidden == hidden[:, :1], axis=1)
    if not _near(hidden[adds] - hidden[adds][:, :1], want):
        raise Different("a hidden score goes through another function")
    return Table(
        argument=argument,
        states=states,
        scale=float(f"{scale:.7g}"),
        masks=masks,
        visible=tuple(c for c, seen in zip(combinations, is_seen, strict=True) if seen),
        hidden=tuple(c for c, s in zip(combinations, is_seen, strict=True) if not s),
        biases=dict(zip(biases, map(float, factors), strict=True)),
        fills=frozenset(map(float, hidden[:, 0])),
        adds=bool(adds.any()),
    )


def _along_keys(x: Any) -> np.ndarray:
    shape = [1] * len(ORDER)
    shape[KEYS] = len(x)
    return np.array(x, np.float64).reshape(shape)


def _near(x: Any, y: Any) -> bool:
    return bool(np.allclose(x, y, rtol=_CLOSE, atol=1e-5))


# ------------------------------------------- rule 3: a few positions stand for all


def _drawn(
    core: Core, table: Table, hidden: States | None, random: np.random.Generator
) -> dict[Key, np.ndarray]:
    """Random masks and biases; each query sees a key, or the first one none."""
    found: dict[Key, np.ndarray] = {}
    plain = dict(zip(table.masks, table.visible[0], strict=True))
    for tried in range(200):
        for key, own in table.states.items():
            shape = _shape(key[1])
            x = random.choice(own, shape) if own else random.normal(size=shape)
            is_shown = random.random(shape) < tried / 200
            found[key] = np.where(is_shown, plain.get(key, x), x)
        seen = np.broadcast_to(table.seen(found), _shape(_pairs(core)))
        if hidden or seen.any(axis=KEYS).all():
            break
    row = tuple(slice(None) if d == KEYS else 0 for d in range(len(ORDER)))
    for key, state in zip(table.masks, hidden or (), strict=False):
        found[key][row] = state
    return found


def _pairs(core: Core) -> tuple[str, ...]:
    return tuple(x for x in core.region.letters(core.region.scores.results[0]) if x)


def _shape(letters: tuple[str, ...]) -> list[int]:
    return [_SMALL[x[0]] if x in letters else 1 for x in ORDER]


def _draws(core: Core, table: Table) -> Iterator[tuple[str, dict[Key, np.ndarray]]]:
    """Operands that make scores of all kinds, beyond what exponentials hold, too.

    Rule 4: what cannot be shown equal has other numbers, in each contraction.
    """
    random, roots = np.random.default_rng(7), core.roots
    dots = [step.args for step in core.steps.values() if step.op.kind == "dot_general"]
    read = chain(*dots, roots.values(), (key for _, key in core.mixes.values()))
    operands = {key for key in read if isinstance(key, tuple)}
    q, k = roots["q"], roots["k"]
    for kind, size in _KINDS.items():
        found = {key: random.normal(size=_shape(key[1])) for key in sorted(operands)}
        spread = (size / abs(table.scale)) ** 0.5
        found[q], found[k] = spread * found[q], spread * found[k]
        if kind == "low":
            found[q], found[k] = abs(found[q]), -np.sign(table.scale) * abs(found[k])
        if kind == "equal":
            found[k] = found[k].take([0], axis=KEYS).repeat(found[k].shape[KEYS], KEYS)
        if kind == "steep" and "dout" in roots:
            found[roots["dout"]] = 1e3 * found[roots["dout"]]
        yield kind, found


def _compare(core: Core, table: Table, passes_hidden: bool) -> None:
    """Compares outputs with those of an attention with this argument."""
    random = np.random.default_rng(11)
    for kind, operands in _draws(core, table):
        empty = () if kind == "rounded" else table.hidden
        for hidden in (*[None] * _DRAWS, *empty):
            known = operands | _drawn(core, table, hidden, random)
            close = _CLOSE
            if kind == "rounded":
                known = {key: _cast(core, key, x) for key, x in known.items()}
                dtypes = {
                    core.program.values[s.op.results[0]].dtype
                    for s in core.steps.values()
                }
                close = max(_ROUNDED[one] for one in dtypes)
            want = _reference(core, known, table, passes_hidden)
            found = core.outputs(core.run(known, cast=kind == "rounded"))
            # An output that is zero, as the gradient of equal scores, has noise.
            usual = max(float(np.linalg.norm(x[np.isfinite(x)])) for x in want.values())
            for name, got in found.items():
                if not _equal(got, want[name], close, 1e-3 * usual):
                    raise Different(_OTHER[name])


def _cast(core: Core, key: Key, x: np.ndarray) -> np.ndarray:
    """An operand or side in its own dtype; among the values of one number all have."""
    values = {k: core.one.reads[n].value for n, k in core.roots.items()}
    values |= {k: side.node[0] for k, side in core.sides.items()}
    v = values.get(key)
    if v is None:
        return x
    return x.astype(numpy_dtype(core.program.values[v].dtype)).astype(np.float64)


def _equal(got: np.ndarray, want: np.ndarray, close: float, least: float) -> bool:
    want = np.broadcast_to(want, np.broadcast_shapes(got.shape, want.shape))
    got = np.broadcast_to(got, want.shape)
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite):
        return False
    size = np.linalg.norm(want[finite])
    return bool(np.linalg.norm((got - want)[finite]) <= close * (size + least))


def _scores(core: Core, known: Mapping[Key, Any]) -> np.ndarray:
    """Products of the queries and keys that a kernel reads."""
    q, k = (known[core.roots[name]] for name in ("q", "k"))
    return contracted(q, k, _pairs(core))


def _reference(
    core: Core, known: Mapping[Key, Any], table: Table, passes_hidden: bool
) -> dict[str, np.ndarray]:
    """Output and gradients by the textbook, of the scores that a kernel makes."""
    roots = {name: known[key] for name, key in core.roots.items()}
    made = core.run({**known, core.scores: _scores(core, known)}, only_pointwise=True)
    x = np.broadcast_to(made[table.argument], _shape(_pairs(core)))
    weights = np.exp(x - x.max(axis=KEYS, keepdims=True))
    weights = weights / weights.sum(axis=KEYS, keepdims=True)

    def mixed(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return contracted(x, y, core.letters(name))

    if not core.one.is_backward:
        return {"out": mixed("out", weights, roots["v"])}
    dp = contracted(roots["dout"], roots["v"], _pairs(core))
    dx = weights * (dp - (weights * dp).sum(axis=KEYS, keepdims=True))
    passed = True if passes_hidden else table.seen(known)
    ds = np.where(passed, table.scale * dx, 0.0)
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

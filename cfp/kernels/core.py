"""Steps of an attention's passes, as NumPy ops on arrays with named dims.

A step is an op of a pass. The search starts at contractions that read scores or
weights. It goes back to the operands of contractions, and to sides (masks, biases and
factors). Sharding rules tell which dims of operands and results are the same, so that
only sums over keys combine positions. Arrays have one dim for each letter; transposes,
reshapes and broadcasts compute nothing. A proof runs the steps on a few positions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from cfp.analysis.contractions import UnionFind
from cfp.kernels.functions import Letters
from cfp.kernels.region import FLOATS, LARGEST, VIEWS, Node, Region, contractions, where
from cfp.program.graph import Op, Value, numpy_dtype, reached
from cfp.program.replace import Different, Use
from cfp.program.rules import Dims

# Letters, the names of dims: "b0", "b1"... batch and heads; "q0", "q1"... queries and
# groups of heads; "k" keys; "d" and "e" features of keys and of values; "n" draws of
# random numbers.
ORDER = ("n", "b0", "b1", "b2", "b3", "q0", "q1", "q2", "q3", "k", "d", "e")
KEYS = ORDER.index("k")
# The other operand of a result's contraction, and the letter of its own dim.
_OTHER = {"out": "v", "dq": "k", "dk": "q", "dv": "dout"}
_FREE = {"out": "e", "dv": "e", "dq": "d", "dk": "d"}
_GRADIENTS = ("dq", "dk", "dv")
_MERGED = "a reshape merges or splits dims of the scores"
_MIXED = "dims of a contraction or a mask are mixed up"

Key = tuple[int, Letters]  # A value's number, and names of its dims.
Arg = Key | float | int  # An operand or side; a constant; a step's number.
_Places = tuple[int, ...]  # Dims' numbers before they have letters; 0 for size 1.
_Reader = tuple[Op, int, Node, _Places]  # An operand that is not computed by a step.


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value, its reader (op, operand number) or maker (op, -1), and dims' letters."""

    value: int
    use: Use
    letters: Letters


@dataclass(frozen=True, slots=True)
class Step:
    """An op of a pass.

    Attributes:
        args: operands: keys of inputs, constants, or numbers of steps.
        sums: True if the op is a sum or maximum over keys.
    """

    op: Op
    args: tuple[Arg, ...]
    letters: Letters
    sums: bool


@dataclass(frozen=True, slots=True)
class Side:
    """A mask, bias or factor that is read between contractions.

    Attributes:
        node: the value, before broadcasts and transposes.
        letters: names of its dims.
        reads: in one list, each reader's operand, then values of which views make it.
    """

    node: Node
    letters: Letters
    reads: list[Tensor]


class Steps:
    """All steps of a region.

    Attributes:
        found: steps by number; operands come before their users.
        sides: masks, biases and factors by key.
    """

    def __init__(self, region: Region) -> None:
        """Collects the steps of a region's contractions, and names all dims.

        Raises:
            Different: an op, a dtype or a dim has no place in an attention.
        """
        self.region, self.values = region, region.values
        self.program = region.program
        self.sides: dict[Key, Side] = {}
        self._args: dict[int, list[int | float | _Reader]] = {}
        self._nodes: dict[int, Node] = {}
        self._order: dict[int, Op] = {}
        self._places: dict[int, _Places] = {}
        self._same, self._count = UnionFind(), count(1)
        self._summed: set[int] = set()
        for user in region.sinks:
            op = self.program.ops[user]
            [made], [dims] = op.results, op.known_rule.results
            self._follow((made, ()), self._of(op, made, dims, {}))
        self._names = self._named()
        sinks = [n for n, op in self._order.items() if op.id in region.sinks]
        self._roles = {n: self._role(n) for n in sinks}
        free = {self._order[n].id: _FREE[role] for n, role in self._roles.items()}
        self._free = {region.scores.id: "d", **free}
        self.found = {n: self._step(n, op) for n, op in self._order.items()}

    # -- names of dims -----------------------------------------------------------------

    def _of(self, op: Op, v: int, dims: Dims, known: dict[int, int]) -> _Places:
        """Ids of a tensor's dims, from {factor: id} `known` or new there; 0: size 1."""
        found, sizes = list[int](), op.known_rule.sizes
        for size, factors in zip(self.program.shape(v), dims, strict=True):
            large = [f for f in factors if sizes[f] > 1 and size > 1]
            if len(large) > 1:
                raise Different(_MERGED)
            found.append(known.setdefault(large[0], next(self._count)) if large else 0)
        return tuple(found)

    def _give(self, node: Node, places: _Places) -> int:
        """Adds a step, or unites its dims with those known; returns its number."""
        self._nodes[number := self.values.number(node)] = node
        known = self._places.setdefault(number, places)
        for one, other in zip(known, places, strict=True):
            self._same.union(one, other)
        return number

    def _letters(self, places: _Places, other: str = "") -> Letters:
        """Letters of dims, `other` if scores lack a dim; Different if not distinct."""
        same, names = self._same, self._names
        found = [names.get(same.find(x), other) if x else "" for x in places]
        if len({*found} - {""}) < sum(map(bool, places)):
            raise Different(_MIXED)
        return tuple(found)

    def _named(self) -> dict[object, str]:
        """Returns {root of a dim's ids: letter} of the scores; may raise Different."""
        region, names = self.region, dict[object, str]()
        made = [self._places[n] for n, op in self._order.items() if op is region.scores]
        for places in zip(*made, strict=True):
            for one in places:
                self._same.union(one, places[0])
        keys = {*map(self._same.find, self._summed)}
        if not keys:
            raise Different("no op sums exponentials of the scores")
        if len(keys) > 1:
            raise Different(
                "exponentials are summed over more than keys, as for a bias's gradient"
            )
        rule = region.scores.known_rule
        of = [{rule.major(f) for f in dims} - {None} for dims in rule.operands[:2]]
        sides: dict[str, set[int]] = {"b": set(), "q": set(), "k": set()}
        for place, factors in zip(made[0], rule.results[0], strict=True):
            if not place:
                continue
            root = self._same.find(place)
            own = {side for side in (0, 1) if rule.major(factors) in of[side]}
            kind = "k" if root in keys else "b" if len(own) > 1 else "q"
            sides[kind] |= own
            if root in names:
                raise Different("an op combines scores of different positions")
            same = sum(name[0] == kind for name in names.values())
            names[root] = kind if kind == "k" else f"{kind}{same}"
        if {len(sides["k"]), len(sides["q"])} != {1} or sides["k"] & sides["q"]:
            raise Different("the softmax is not over keys alone")
        return names

    # -- steps -------------------------------------------------------------------------

    def _follow(self, start: Node, places: _Places) -> None:
        stack = [self._give(start, places)]
        while stack:
            number = stack[-1]
            if number not in self._args:
                self._args[number] = self._operands(number)
            missing = [a for a in self._steps_of(number) if a not in self._order]
            stack += missing
            if not missing:
                self._order.setdefault(stack.pop(), self._op(number))

    def _op(self, number: int) -> Op:
        op = self.program.maker(self._nodes[number][0])
        if op is None or not (op.kind == "dot_general" or self.region.is_closed(op)):
            raise Different("a result depends on an op that the proof does not know")
        return op

    def _operands(self, number: int) -> list[int | float | _Reader]:
        op, at, known = self._op(number), self._nodes[number][1], dict[int, int]()
        rule, found = op.known_rule, list[int | float | _Reader]()
        for place, factors in zip(self._places[number], rule.results[0], strict=True):
            large = [f for f in factors if rule.sizes[f] > 1 and place]
            if len(large) > 1:
                raise Different(_MERGED)
            known.update(dict.fromkeys(large, place))
        before = {*known.values()}
        for index, v in enumerate(op.operands[: 1 if op.kind == "reduce" else None]):
            places = self._of(op, v, rule.operands[index], known)
            source = self.values.source((v, at))
            constant = self.values.number_of_constant(v)
            if source[0] in self.region.members:
                found.append(self._give(source, places))
            elif op.kind == "dot_general":
                found.append((op, index, (v, at), places))
            elif constant is not None:
                found.append(constant)
            elif any(contractions(self.values, v, self.region.size)):
                found.append(self._give(source, places))
            else:
                found.append((op, index, (v, at), places))
        if op.kind == "reduce":
            self._summed |= {*known.values()} - before
        return found

    def _step(self, number: int, op: Op) -> Step:
        found = self._args[number]
        args = [self._key(a) if isinstance(a, tuple) else a for a in found]
        shape = self.program.shape(op.operands[0])
        dims = op.integers("dimensions") if op.kind == "reduce" else ()
        sums = any(shape[d] > 1 for d in dims)
        letters = self._letters(self._places[number], self._free.get(op.id, ""))
        return Step(op, tuple(args), letters, sums)

    def _key(self, read: _Reader) -> Key:
        """Key (number, letters) of a contraction's operand or a side; adds the side."""
        op, index, node, places = read
        if op.kind == "dot_general":
            return self._root(node, self._tensor(op, index, places))
        letters = self._letters(places)
        node, own = self._stripped(node, letters, VIEWS - {"convert"})
        key = self.values.number(node), tuple(x for x in own if x)
        side = self.sides.setdefault(key, Side(node, own, []))
        side.reads.extend(self.reads_of(op, index, letters))
        return key

    def _tensor(self, op: Op, index: int, places: _Places) -> Tensor:
        """A contraction's operand by index, or its result (-1); may raise Different."""
        v = (*op.operands, *op.results)[index]
        if self.program.values[v].dtype not in FLOATS:
            raise Different(f"the product at {where(op)} is not in f32, bf16 or f16")
        letters = self._letters(places, self._free.get(op.id, "e"))
        return Tensor(v, (op.id, index), letters)

    def reads_of(self, op: Op, index: int, letters: Letters) -> list[Tensor]:
        """An operand, then the values that views make it from in the op's loop body."""
        found, parent = list[Tensor](), op.parent
        while op.parent == parent:
            v = op.operands[index]
            found.append(Tensor(v, (op.id, index), letters))
            maker = self.program.maker(v)
            before = maker and self._before(maker, letters, VIEWS - {"convert"})
            if maker is None or before is None:
                break
            op, index, letters = maker, 0, before
        return found

    # -- operands before views ---------------------------------------------------------

    def _root(self, node: Node, tensor: Tensor) -> Key:
        """Key (number, letters) of the value that views make an operand from."""
        found, own = self._stripped(node, tensor.letters, VIEWS)
        return self.values.number(found), tuple(x for x in own if x)

    def _stripped(
        self, node: Node, letters: Letters, views: frozenset[str]
    ) -> tuple[Node, Letters]:
        while True:
            node = self.values.source(node)
            op = self.program.maker(node[0])
            before = None if op is None else self._before(op, letters, views)
            if op is None or before is None:
                return node, letters
            node, letters = (op.operands[0], node[1]), before

    def _before(
        self, op: Op, letters: Letters, views: frozenset[str]
    ) -> Letters | None:
        """Letters of a view's operand; None for other ops, merged and split dims."""
        if op.kind not in views or op.rule is None:
            return None
        dtypes = {self.program.values[v].dtype for v in (*op.operands, *op.results)}
        if op.kind == "convert" and not dtypes <= FLOATS:
            return None
        [before], [after] = op.rule.operands, op.rule.results
        if any(sum(op.rule.sizes[f] > 1 for f in dim) > 1 for dim in (*before, *after)):
            return None
        known = dict(zip(map(op.rule.major, after), letters, strict=True))
        return tuple("" if f is None else known[f] for f in map(op.rule.major, before))

    # -- passes ------------------------------------------------------------------------

    def passes(self) -> list[Core]:
        """Forward passes, then the backward pass, each if any; may raise Different."""
        forward = [n for n, role in self._roles.items() if role == "out"]
        found = [self._pass({"out": n}) for n in forward]
        backward = {role: n for n, role in self._roles.items() if role != "out"}
        if not backward:
            return found
        if sorted(backward) != ["dk", "dq", "dv"]:
            raise Different("a gradient of queries, keys or values is missing")
        if len(forward) + len(backward) < len(self._roles):
            raise Different("gradients are computed more than once")
        return [*found, self._pass({name: backward[name] for name in _GRADIENTS})]

    def _role(self, number: int) -> str:
        """Names a contraction's result "out", "dq", "dk", "dv"; or raises Different."""
        [arg] = self._steps_of(number)
        own, out = (
            {*self._letters(self._places[n], "?")} - {"", "?"} for n in (arg, number)
        )
        dots = [n for n in self._made_of(arg) if self._order[n].kind == "dot_general"]
        queries = {x for x in own if x[0] == "q"}
        if own - out == {"k"}:
            return "dq" if len(dots) > 1 else "out"
        if queries and own - out == queries:
            return "dk" if len(dots) > 1 else "dv"
        place = where(self._order[number])
        raise Different(f"the product at {place} contracts more than keys or queries")

    def _made_of(self, *numbers: int) -> set[int]:
        """Numbers of the given steps, and of all steps that they depend on."""
        return {*reached(numbers, self._steps_of)}

    def _steps_of(self, number: int) -> list[int]:
        return [arg for arg in self._args[number] if isinstance(arg, int)]

    def _pass(self, sinks: Mapping[str, int]) -> Core:
        """The pass that makes `sinks`, {name: step's number}; may raise Different."""
        numbers = self._made_of(*sinks.values())
        steps = {n: step for n, step in self.found.items() if n in numbers}
        dots = [n for n in steps if steps[n].op.kind == "dot_general"]
        scores = [n for n in dots if steps[n].op is self.region.scores]
        others = {*dots} - {*scores, *sinks.values()}
        if len(scores) != 1:
            raise Different("a result needs the scores of several iterations of a loop")
        if len(others) != ("out" not in sinks):
            raise Different("a result needs other contractions than an attention's")
        [number], names = (others, ("dout", "v")) if others else (scores, ("q", "k"))
        if len({steps[n].op.parent for n in (number, *sinks.values())}) > 1:
            raise Different("the contractions are in different loops")
        both = [self._tensor(*read[:2], read[-1]) for read in self._readers(number)]
        reads = {names["k" in one.letters]: one for one in both}
        makes: dict[str, Tensor] = {}
        for name, n in sinks.items():
            [(op, index, _, places)] = self._readers(n)
            reads.setdefault(_OTHER[name], self._tensor(op, index, places))
            makes[name] = self._tensor(op, -1, self._places[n])
        roots = {n: self._root((t.value, ()), t) for n, t in reads.items()}
        read = {a for n in steps if n not in dots for a in steps[n].args}
        sides = {key: side for key, side in self.sides.items() if key in read}
        at = steps[number].op.parent
        return Core(self, reads, makes, steps, sides, roots, scores[0], sinks, at)

    def _readers(self, number: int) -> list[_Reader]:
        return [arg for arg in self._args[number] if isinstance(arg, tuple)]


@dataclass(frozen=True, slots=True)
class Core:
    """The steps of a pass, from the operands of contractions to its outputs.

    Attributes:
        every: all steps of the region.
        reads, makes: operands and results of contractions, by name.
        steps: steps by number; operands come before their users.
        sides: masks, biases and factors by key.
        roots: keys of "q", "k", "v", and "dout" in a backward pass.
        scores: number of the step that makes the scores.
        outputs: numbers of the steps that make the results, by name.
        parent: id of the loop or branch around the pass; -1 without.
    """

    every: Steps
    reads: Mapping[str, Tensor]
    makes: Mapping[str, Tensor]
    steps: Mapping[int, Step]
    sides: Mapping[Key, Side]
    roots: Mapping[str, Key]
    scores: int
    outputs: Mapping[str, int]
    parent: int

    @property
    def is_backward(self) -> bool:
        """True if the pass computes gradients."""
        return "dout" in self.reads

    @property
    def dtypes(self) -> dict[str, str]:
        """The `narrowest` dtypes of "q", "k", "v" and "weights", by these names."""
        mix = self.steps[self.outputs["dv" if self.is_backward else "out"]]
        weights = next(i for i, arg in enumerate(mix.args) if isinstance(arg, int))
        uses = {name: self.reads[name].use for name in ("q", "k", "v")}
        uses["weights"] = mix.op.id, weights
        return {name: self.narrowest(use) for name, use in uses.items()}

    def narrowest(self, use: Use) -> str:
        """Name of the narrowest dtype of an operand and of the values that it views."""
        program, values = self.every.program, self.every.values
        node, found = (self._value(use).id, ()), list[np.dtype]()
        while True:
            node = values.source(node)
            dtype, maker = program.values[node[0]].dtype, program.maker(node[0])
            found += [numpy_dtype(dtype)] if dtype in FLOATS else []
            if dtype not in FLOATS or maker is None or maker.kind not in VIEWS:
                return min(found, key=lambda one: one.itemsize).name
            node = maker.operands[0], node[1]

    def _value(self, use: Use) -> Value:
        program = self.every.program
        return program.values[program.ops[use[0]].operands[use[1]]]

    def early(self, use: Use, first: int) -> Use:
        """Returns a use, or its narrowest original, if widened after op `first`."""
        value = self._value(use)
        maker = self.every.program.maker(value.id)
        if maker is None or maker.id < first or maker.kind != "convert":
            return use
        narrow = self._value((maker.id, 0))
        is_narrower = narrow.dtype in FLOATS and narrow.size_bytes < value.size_bytes
        return self.early((maker.id, 0), first) if is_narrower else use

    def run(self, known: Mapping[Any, Any], *, cast: bool = False) -> dict[Arg, Any]:
        """Computes steps by NumPy; returns `known`, with their results by number added.

        Args:
            known: float64 arrays with a dim for each letter of `ORDER`: operands and
                sides by key; by number, results of steps that are not to be computed.
            cast: True rounds operands and results to the program's dtypes.
        """
        made: dict[Arg, Any] = dict(known)

        def rounded(x: Any, v: int) -> Any:
            dtype = numpy_dtype(self.every.program.values[v].dtype)
            return np.asarray(x).astype(dtype).astype(np.float64) if cast else x

        for number, step in self.steps.items():
            if number in made:
                continue
            args = (a if isinstance(a, float) else made[a] for a in step.args)
            reads = [*map(rounded, args, step.op.operands)]
            if step.op.kind == "dot_general":
                found = contracted(reads[0], reads[1], step.letters)
            else:
                found = _applied(step, reads)
            made[number] = rounded(found, step.op.results[0])
        return made


def contracted(x: Any, y: Any, kept: Collection[str]) -> Any:
    """Product of two arrays, summed over all dims but draws and those of `kept`."""
    sizes = np.broadcast_shapes(x.shape, y.shape)
    out = [d for d, a in enumerate(ORDER) if d == 0 or (a in kept and sizes[d] > 1)]
    terms: list[Any] = []
    for one in (x, y):
        dims = [d for d, n in enumerate(one.shape) if d == 0 or n > 1]
        terms += [one.reshape([one.shape[d] for d in dims]), dims]
    found = np.einsum(*terms, out)
    return found.reshape([n if d in out else 1 for d, n in enumerate(sizes)])


OPS = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "negate": np.negative,
    "exponential": np.exp,
    "log": np.log,
    "maximum": np.maximum,
    "select": np.where,
}


def _applied(step: Step, reads: list[Any]) -> Any:
    op = step.op
    if op.kind in VIEWS or (op.kind == "reduce" and not step.sums):
        return reads[0]
    if op.kind == "reduce":
        largest = LARGEST in op.attributes
        return (np.max if largest else np.sum)(reads[0], axis=KEYS, keepdims=True)
    if op.kind == "select":
        reads = [reads[0] != 0, *reads[1:]]
    return OPS[op.kind](*reads)

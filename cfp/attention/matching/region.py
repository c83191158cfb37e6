"""Finds the ops between the contractions of an attention: rules 1 and 3.

The search starts at a contraction that makes scores. It follows their readers through
barriers, loops and stacks, up to the contractions that read results: the mix of values,
and the gradients of queries, keys and values. All ops on the way are in a closed list.
By sharding rules each dim is the same on both sides of an op, so that only sums over
keys combine positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import prod

from cfp.analysis.contractions import UnionFind
from cfp.attention.matching.found import Letters, Pass, Tensor
from cfp.attention.matching.values import FLOATS, Values
from cfp.program.graph import Op, reached
from cfp.program.replace import Different
from cfp.program.rules import Dims, Rule

# Rule 1: the ops that may stand between contractions; `_is_closed` says how.
ELEMENTWISE = frozenset(
    {
        *("add", "subtract", "multiply", "divide", "negate", "maximum"),
        *("exponential", "log", "select"),
    }
)
VIEWS = frozenset({"broadcast_in_dim", "convert", "reshape", "transpose"})
LARGEST, SUM = "stablehlo.maximum(%0,%1; )", "stablehlo.add(%0,%1; )"
_LEAST = float("-inf")
_MOST_OPS = 400
_BATCH, _QUERY, _KEY = "b", "q", "k"
_ENDS = frozenset({"dot_general", "reduce", "exponential"})
_GRADIENTS = ("dq", "dk", "dv")
# What a result's contraction reads, and the letter of what this has besides.
_OTHER = {"out": "v", "dq": "k", "dk": "q", "dv": "dout"}
FREE = {"out": "e", "dv": "e", "dq": "d", "dk": "d"}
_RANDOM = frozenset({"bitcast_convert", "rng", "rng_bit_generator"})


def where(op: Op) -> str:
    """The line of an op, for messages."""
    return op.source or op.scope or "no line"


@dataclass
class Region:
    """The ops behind one contraction that may make scores.

    Attributes:
        scores: the contraction.
        inside: ids of the ops between contractions.
        members: their values, and scores, before these are passed on.
        late: members that depend on the weights' gradient.
        weights_gradient: the contraction that makes it.
        sinks: contractions that read members, each with the operands' indices.
        stacks: values in which loops stack members.
    """

    values: Values
    scores: Op
    inside: dict[int, None] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    weights_gradient: Op | None = None
    sinks: dict[int, list[int]] = field(default_factory=dict)
    stacks: set[int] = field(default_factory=set)

    @property
    def between(self) -> set[int]:
        """All values that no kernel makes."""
        return {w for v in self.members | self.stacks for w in self.values.standing(v)}

    def has(self, v: int) -> bool:
        """True of a member, or what it is passed on as."""
        return self.values.same(v) in self.members

    def __post_init__(self) -> None:
        self.program = self.values.program
        self._same = UnionFind()
        self._size = prod(self.program.shape(self.scores.results[0]))

    def grow(self) -> None:
        """Follows scores, then the weights' gradient, and names all dims.

        Raises:
            Different: something else reads them, or is done with them.
        """
        self._follow(self.scores.results[0], late=False)
        for op in [self.program.ops[i] for i in self.inside]:
            for v in op.operands:
                for dot in contractions(self.values, v, self._size):
                    if self.has(dot.results[0]):
                        continue
                    if self.weights_gradient not in (None, dot):
                        raise Different("more than two contractions enter it")
                    self.weights_gradient = dot
                    self._follow(dot.results[0], late=True)
        self._name_dims()

    def _follow(self, start: int, late: bool) -> None:
        stack = [(start, late)]
        while stack:
            v, late = stack.pop()
            if v in self.members and (not late or v in self.late):
                continue
            self.members.add(v)
            if late:
                self.late.add(v)
            stack += [(w, late) for w in self._made_of(v)]
            if len(self.inside) > _MOST_OPS:
                raise Different("much is computed of the scores besides a softmax")

    def _made_of(self, v: int) -> Iterator[int]:
        program = self.program
        if not {*program.outputs}.isdisjoint(self.values.standing(v)):
            raise Different(
                "the step returns the scores, the weights, or what is computed of them"
            )
        for op, index, w in self.values.readers(v):
            if op.kind == "dot_general":
                found = self.sinks.setdefault(op.id, [])
                found += [] if index in found else [index]
            elif op.kind == "dynamic_update_slice" and index == 1:
                self._add_stack(op, v)
            elif op.parent != self.values.parent(w):
                raise Different("a branch or another loop reads its scores or weights")
            elif op.kind == "tanh":
                raise Different(
                    "its scores are capped by tanh, which cuDNN's kernel does not"
                )
            elif not self.is_closed(op):
                raise Different(
                    f"{op.kind} at {where(op)} reads the scores or the weights"
                )
            else:
                if op.id not in self.inside:
                    self.inside[op.id] = None
                    self._join(op)
                yield from op.results

    def _add_stack(self, update: Op, v: int) -> None:
        """Adds a stack of a member that a loop makes, and whose slices are read."""
        program, values, [made] = self.program, self.values, update.results
        loop = program.ops[update.parent] if update.parent >= 0 else None
        if loop is None or loop.kind != "while" or made not in loop.yields:
            raise Different("its scores or weights are written into an array")
        stack = loop.results[place := loop.yields.index(made)]
        if values.update_of(loop, place) is not update:
            raise Different("its scores or weights are written into an array")
        if not {*program.outputs}.isdisjoint(values.standing(stack)):
            raise Different("the step returns its scores or weights")
        for op, _, w in (*values.readers(stack), *values.readers(made)):
            is_slice = op.kind == "dynamic_slice" and values.same(op.results[0]) == v
            if not is_slice and (w != made or op is not loop):
                raise Different(f"{op.kind} at {where(op)} reads its stacked scores")
        self.stacks |= {stack, made, update.operands[0]}

    # -- rule 1: a closed list of ops --------------------------------------------------

    def is_closed(self, op: Op) -> bool:
        """True if an op is in the list of provable ops."""
        program = self.program
        dtypes = {program.values[v].dtype for v in op.results}
        if op.rule is None or not dtypes <= FLOATS:
            return False
        if op.kind == "reduce":
            start = self.values.number_of_constant(op.operands[-1])
            is_one = len(op.results) == 1
            largest = LARGEST in op.attributes and start == _LEAST
            return is_one and (largest or (SUM in op.attributes and start == 0.0))
        if op.kind == "maximum":  # of a softmax's largest score, which is no clip
            return any(self.values.number_of_constant(x) == _LEAST for x in op.operands)
        if op.kind == "select":
            return not self.has(op.operands[0])
        if op.kind == "convert":
            return program.values[op.operands[0]].dtype in FLOATS
        return op.kind in ELEMENTWISE | VIEWS

    # -- rule 3: dims run over the same ------------------------------------------------

    def _node(self, v: int, d: int) -> tuple[int, int]:
        return self.values.same(v), d

    def _join(self, op: Op) -> None:
        """Joins the dims of members that an op's rule gives one factor."""
        by_factor: dict[int, tuple[int, int]] = {}
        rule = op.known_rule
        tensors = zip(
            (*op.operands, *op.results), (*rule.operands, *rule.results), strict=False
        )
        for v, dims in tensors:
            if not self.has(v) and v not in op.results:
                continue
            for d, factors in enumerate(dims):
                large = [f for f in factors if rule.sizes[f] > 1]
                if len(large) > 1:
                    raise Different("a reshape merges or splits dims of the scores")
                for f in large:
                    node = self._node(v, d)
                    self._same.union(node, by_factor.setdefault(f, node))

    def _name_dims(self) -> None:
        rule, [result] = self.scores.known_rule, self.scores.results
        for op in [self.program.ops[i] for i in self.inside]:
            self._join(op)  # Again: more are members now.
        of = [{rule.major(f) for f in dims} - {None} for dims in rule.operands[:2]]
        key, named = self._summed(), list[str]()
        self._names: dict[object, str] = {}
        sides: dict[str, set[int]] = {_BATCH: set(), _QUERY: set(), _KEY: set()}
        for d, factors in enumerate(rule.results[0]):
            if (major := rule.major(factors)) is None:
                continue
            root = self._same.find(self._node(result, d))
            own = {side for side in (0, 1) if major in of[side]}
            kind = _KEY if root == key else _BATCH if len(own) > 1 else _QUERY
            sides[kind] |= own
            name = kind if kind == _KEY else f"{kind}{named.count(kind)}"
            named.append(kind)
            if root in self._names:
                raise Different("its scores are combined with those of other positions")
            self._names[root] = name
        if {len(sides[_KEY]), len(sides[_QUERY])} != {1} or sides[_KEY] & sides[_QUERY]:
            raise Different("the softmax is not over keys alone")

    def _summed(self) -> object:
        """The dim that all sums and largest scores are along."""
        reductions = [self.program.ops[i] for i in self.inside]
        found = {
            self._same.find(self._node(op.operands[0], d))
            for op in reductions
            for d in op.integers("dimensions")
            if op.kind == "reduce" and self.program.shape(op.operands[0])[d] > 1
        }
        if not found:
            raise Different("nothing sums its exponentials")
        if len(found) > 1:
            raise Different(
                "it sums over more than keys, as the gradient of a bias does"
            )
        return found.pop()

    # -- letters -----------------------------------------------------------------------

    def letters(self, v: int) -> Letters:
        """Letters of the dims of a member."""
        return tuple(
            self._names.get(self._same.find(self._node(v, d)), "?") if n > 1 else ""
            for d, n in enumerate(self.program.shape(v))
        )

    def letters_of(
        self, op: Op, index: int, of: int | None = None, other: str = "?"
    ) -> Letters:
        """Returns letters of an operand, or of a result (-1), by those of a member.

        Args:
            of: the operand that is the member; None for the result.
            other: the letter for dims that the member lacks.
        """
        rule = op.known_rule
        member = op.results[0] if of is None else op.operands[of]
        names = carried(
            rule,
            self.letters(member),
            rule.results[0] if of is None else rule.operands[of],
            rule.results[0] if index < 0 else rule.operands[index],
            other,
        )
        real = [x for x in names if x]
        if "?" in real or len({*real}) < len(real):
            raise Different("dims of a contraction or a mask are mixed up")
        return names

    # -- passes ------------------------------------------------------------------------

    def passes(self) -> list[Pass]:
        """The forward passes, then the backward pass, if there is one."""
        found: dict[str, list[tuple[Op, int]]] = {}
        for user, indices in self.sinks.items():
            op = self.program.ops[user]
            if len(indices) > 1:
                raise Different("a contraction reads two tensors of the attention")
            found.setdefault(self._role(op, indices[0]), []).append((op, indices[0]))
        forward = [self._pass({"out": one}) for one in found.pop("mix", ())]
        dot = self.weights_gradient
        if not found and dot is None:
            return forward
        if dot is None or sorted(found) != ["dk", "dq", "dv"]:
            raise Different("not all gradients of queries, keys and values are there")
        if any(len(of) > 1 for of in found.values()):
            raise Different("gradients are computed more than once")
        return [*forward, self._pass({name: found[name][0] for name in _GRADIENTS})]

    def _role(self, op: Op, index: int) -> str:
        own = {x for x in self.letters(op.operands[index]) if x}
        out = {*self.letters_of(op, -1, index, "e")}
        queries = {x for x in own if x[0] == _QUERY}
        late = self.values.same(op.operands[index]) in self.late
        if own - out == {_KEY}:
            return "dq" if late else "mix"
        if queries and own - out == queries:
            return "dk" if late else "dv"
        raise Different(f"{where(op)} sums weights in another way")

    def operand(self, op: Op, index: int, of: int | None, other: str) -> Tensor:
        """An operand of a contraction that reads or makes a member."""
        letters = self.letters_of(op, index, of, other)
        if self.program.values[op.operands[index]].dtype not in FLOATS:
            raise Different(f"{where(op)} multiplies in another dtype")
        return Tensor(op.operands[index], (op.id, index), letters)

    def _pass(self, sinks: Mapping[str, tuple[Op, int]]) -> Pass:
        """A pass, by the contractions that make its results, and their operands."""
        dot, names = self.scores, ("q", "k")
        if "out" not in sinks:
            assert self.weights_gradient is not None, "there are gradients"
            dot, names = self.weights_gradient, ("dout", "v")
        if {op.parent for op, _ in sinks.values()} != {dot.parent}:
            raise Different("its contractions are computed in different loops")
        reads: dict[str, Tensor] = {}
        makes: dict[str, Tensor] = {}
        for index in (0, 1):
            one = self.operand(dot, index, None, "d" if dot is self.scores else "e")
            reads[names["k" in one.letters]] = one
        for name, (op, index) in sinks.items():
            other = self.operand(op, 1 - index, index, FREE[name])
            reads.setdefault(_OTHER[name], other)
            letters = self.letters_of(op, -1, index, FREE[name])
            makes[name] = Tensor(op.results[0], (op.id, index), letters)
        return Pass(reads, makes)


def carried(
    rule: Rule, letters: Letters, dims: Dims, wanted: Dims, other: str = "?"
) -> Letters:
    """Letters of a tensor's dims, by those of another one and an op's rule."""
    majors = map(rule.major, dims)
    known = {f: a for f, a in zip(majors, letters, strict=True) if f is not None}
    found = (rule.major(factors) for factors in wanted)
    return tuple("" if f is None else known.get(f, other) for f in found)


def contractions(values: Values, v: int, size: int) -> Iterator[Op]:
    """The contractions of a size that a value is computed of, position by position."""
    program = values.program

    def before(v: int) -> Iterator[int]:
        op = program.maker(v)
        if op is not None and op.rule is not None and op.kind not in _ENDS:
            yield from map(values.same, op.operands if is_whole(v) else ())

    def is_whole(v: int) -> bool:
        is_whole = prod(program.shape(v)) == size and not values.is_leaf(v)
        return is_whole and program.values[v].dtype != "i1"

    for one in islice(reached([values.same(v)], before), _MOST_OPS):
        op = program.maker(one)
        if op is not None and op.kind == "dot_general" and is_whole(one):
            yield op


def scores_of(values: Values, exponential: Op) -> Op | None:
    """The contraction whose result a softmax may be of."""
    [v], size = exponential.operands, prod(values.program.shape(exponential.results[0]))
    dot = next(contractions(values, v, size), None)
    return dot if dot is not None and _is_batched(dot) else None


def has_dropout(region: Region) -> bool:
    """True if random numbers enter between contractions."""
    program, values = region.program, region.values

    def before(v: int) -> Iterable[int]:
        op = program.maker(v)
        is_end = op is None or op.has_regions or op.kind in (*_ENDS, "custom_call")
        return () if op is None or is_end else map(values.same, op.operands)

    reads = (v for i in region.inside for v in program.ops[i].operands)
    start = [values.same(v) for v in reads if not region.has(v)]
    makers = map(program.maker, islice(reached(start, before), _MOST_OPS))
    return any(op is not None and op.kind in _RANDOM for op in makers)


def _is_batched(dot: Op) -> bool:
    """True if a contraction does the same for each sequence or head."""
    left, right, out = (
        {dot.known_rule.major(f) for f in dims} - {None}
        for dims in (*dot.known_rule.operands[:2], dot.known_rule.results[0])
    )
    return bool(left & right & out)

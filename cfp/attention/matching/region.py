"""Finds what is computed between the contractions of an attention: rules 1 and 3.

From a contraction that makes scores, all that is computed of it is followed, through
barriers, loops and stacks, up to the contractions that read it: the mix of values, and
the gradients of queries, keys and values. The ops on the way are of a closed list. By
their sharding rules each dim runs over the same on both sides of an op, so that nothing
but what sums over keys combines positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from cfp.analysis.contractions import UnionFind
from cfp.attention.matching.found import Letters, Pass, Tensor
from cfp.attention.matching.values import FLOATS, Values
from cfp.program.graph import Op
from cfp.program.replace import Different

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
_FINDS = {
    "tanh": "its scores are capped by tanh, which cuDNN's kernel does not",
}


_RANDOM = frozenset({"bitcast_convert", "rng", "rng_bit_generator"})


def where(op: Op) -> str:
    """The line of an op, for messages."""
    return op.source or op.scope or "no line"


@dataclass
class Region:
    """All that is computed of one contraction that may make scores.

    Attributes:
        scores: the contraction.
        inside: ids of the ops between contractions.
        members: ids of their values, and of scores.
        late: those that depend on the weights' gradient.
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
                if v not in self.members and self._is_whole(v):
                    self._add_gradient(v)
        self._name_dims()

    def _is_whole(self, v: int) -> bool:
        return prod(self.program.shape(v)) == self._size and not self.values.is_leaf(v)

    def _add_gradient(self, v: int) -> None:
        """Adds the contraction that a value is computed of, if one of this size is."""
        stack, steps = [v], 0
        while stack and steps < _MOST_OPS:
            steps += 1
            op = self.program.maker(self.values.same(stack.pop()))
            if op is None or not op.results or not self._is_whole(op.results[0]):
                continue
            if op.kind == "dot_general":
                if op.results[0] in self.members:
                    continue
                if self.weights_gradient not in (None, op):
                    raise Different("more than two contractions enter it")
                self.weights_gradient = op
                self._follow(op.results[0], late=True)
            elif op.kind in ELEMENTWISE | VIEWS:
                stack += op.operands

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
        if v in program.outputs:
            raise Different(
                "the step returns the scores, the weights, or what is computed of them"
            )
        for user, index in program.users[v]:
            op = program.ops[user]
            if op.kind == "dot_general":
                found = self.sinks.setdefault(user, [])
                found += [] if index in found else [index]
            elif op.kind == "optimization_barrier":
                yield self._alias(v, op.results[index])
            elif op.kind == "while" and index < len(op.operands):
                yield from (self._alias(v, w) for w in self._passed_on(op, index))
            elif op.kind == "dynamic_update_slice" and index == 1:
                yield from (self._alias(v, w) for w in self._unstacked(op))
            else:
                self._check_closed(op, v)
                if user not in self.inside:
                    self.inside[user] = None
                    self._join(op)
                yield from op.results

    def _passed_on(self, loop: Op, index: int) -> Iterator[int]:
        """A value that a loop passes on unchanged, in its body and behind it."""
        for v in (*loop.entered(index), loop.results[index]):
            if self.values.same(v) != self.values.same(loop.operands[index]):
                raise Different("a loop carries its scores or weights")
            yield v

    def _unstacked(self, update: Op) -> Iterator[int]:
        """The slices of a stack that a loop makes."""
        program = self.program
        loop = program.ops[update.parent] if update.parent >= 0 else None
        [made] = update.results
        if loop is None or loop.kind != "while" or made not in loop.yields:
            raise Different("its scores or weights are written into an array")
        place = loop.yields.index(made)
        if self.values.update_of(loop, place) != update or len(program.users[made]) > 1:
            raise Different("its scores or weights are written into an array")
        stack, seen = [loop.results[place]], set[int]()
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            if v in program.outputs:
                raise Different("the step returns its scores or weights")
            for user, index in program.users[v]:
                op = program.ops[user]
                if op.kind == "dynamic_slice" and index == 0:
                    yield op.results[0]
                elif op.kind == "while" and index < len(op.operands):
                    stack += self._passed_on(op, index)
                elif op.kind == "optimization_barrier":
                    stack.append(op.results[index])
                elif not op.has_regions:
                    raise Different(
                        f"{op.kind} at {where(op)} reads its stacked scores"
                    )
        self.stacks |= seen | {made, update.operands[0]}

    # -- rule 1: a closed list of ops --------------------------------------------------

    def _check_closed(self, op: Op, v: int) -> None:
        if op.parent != self._parent(v):
            raise Different("a branch or another loop reads its scores or weights")
        if not self.is_closed(op):
            reason = _FINDS.get(op.kind)
            raise Different(
                reason or f"{op.kind} at {where(op)} reads the scores or the weights"
            )

    def _parent(self, v: int) -> int:
        op = self.program.maker(v)
        return op.parent if op is not None else self.values.loop_of(v)

    def is_closed(self, op: Op) -> bool:
        """True if an op is one of those that are proved."""
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
            return op.operands[0] not in self.members
        if op.kind == "convert":
            return program.values[op.operands[0]].dtype in FLOATS
        return op.kind in ELEMENTWISE | VIEWS

    # -- rule 3: dims run over the same ------------------------------------------------

    def _node(self, v: int, d: int) -> tuple[int, int]:
        return v, sum(n > 1 for n in self.program.shape(v)[:d])

    def _alias(self, v: int, w: int) -> int:
        for d in range(sum(n > 1 for n in self.program.shape(v))):
            self._same.union((v, d), (w, d))
        return w

    def _join(self, op: Op) -> None:
        """Joins the dims of members that an op's rule gives one factor."""
        by_factor: dict[int, tuple[int, int]] = {}
        rule = op.known_rule
        tensors = zip(
            (*op.operands, *op.results), (*rule.operands, *rule.results), strict=False
        )
        for v, dims in tensors:
            if v not in self.members and v not in op.results:
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
        key = self._summed()
        self._names: dict[object, str] = {}
        counts, sides = {_BATCH: 0, _QUERY: 0}, set[int]()
        for d, factors in enumerate(rule.results[0]):
            major = rule.major(factors)
            if major is None:
                continue
            root = self._same.find(self._node(result, d))
            name = _BATCH if major in of[0] and major in of[1] else _QUERY
            if root == key:
                if name == _BATCH:
                    raise Different("the softmax is not over keys alone")
                name, self.key_side = _KEY, int(major in of[1])
            elif name == _QUERY:
                sides.add(int(major in of[1]))
            if name != _KEY:
                counts[name] += 1
                name += str(counts[name] - 1)
            if root in self._names:
                raise Different("its scores are combined with those of other positions")
            self._names[root] = name
        if _KEY not in self._names.values() or sides != {1 - self.key_side}:
            raise Different("the softmax is not over keys alone")

    def _summed(self) -> object:
        """The dim that all sums and largest scores are along."""
        found = set()
        for op in (self.program.ops[i] for i in self.inside):
            if op.kind != "reduce":
                continue
            for d in op.integers("dimensions"):
                if self.program.shape(op.operands[0])[d] > 1:
                    found.add(self._same.find(self._node(op.operands[0], d)))
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
        """Letters of an operand, or of a result (-1), by those of a member.

        Args:
            of: the operand that is the member; None if it is the result.
            other: the letter of what the member does not have.
        """
        rule = op.known_rule
        member = op.results[0] if of is None else op.operands[of]
        dims = rule.results[0] if of is None else rule.operands[of]
        known = {
            f: letter
            for factors, letter in zip(dims, self.letters(member), strict=True)
            if (f := rule.major(factors)) is not None
        }
        wanted = rule.results[0] if index < 0 else rule.operands[index]
        majors = [rule.major(factors) for factors in wanted]
        names = tuple("" if f is None else known.get(f, other) for f in majors)
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
        forward = [self._forward(*one) for one in found.pop("mix", ())]
        backward = self._backward(found)
        return forward if backward is None else [*forward, backward]

    def _role(self, op: Op, index: int) -> str:
        own = {x for x in self.letters(op.operands[index]) if x}
        out = {*self.letters_of(op, -1, index, "e")}
        queries = {x for x in own if x[0] == _QUERY}
        late = op.operands[index] in self.late
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

    def _forward(self, mix: Op, index: int) -> Pass:
        if mix.parent != self.scores.parent:
            raise Different("scores and mix are computed in different loops")
        q, k = 1 - self.key_side, self.key_side
        reads = {
            "q": self.operand(self.scores, q, None, "d"),
            "k": self.operand(self.scores, k, None, "d"),
            "v": self.operand(mix, 1 - index, index, "e"),
        }
        return Pass(reads, {"out": self._made(mix, index, "e")})

    def _made(self, op: Op, index: int, other: str) -> Tensor:
        return Tensor(op.results[0], None, self.letters_of(op, -1, index, other))

    def _backward(self, sinks: dict[str, list[tuple[Op, int]]]) -> Pass | None:
        dot = self.weights_gradient
        if not sinks and dot is None:
            return None
        if dot is None or sorted(sinks) != ["dk", "dq", "dv"]:
            raise Different("not all gradients of queries, keys and values are there")
        if any(len(of) > 1 for of in sinks.values()):
            raise Different("gradients are computed more than once")
        [(dk, of_dk)], [(dq, of_dq)], [(dv, of_dv)] = (sinks[n] for n in sorted(sinks))
        if len({one.parent for one in (dq, dk, dv, dot)}) > 1:
            raise Different("its gradients are computed in different loops")
        sides = [self.letters_of(dot, i, None, "e") for i in (0, 1)]
        given = int(any(x[:1] == _QUERY for x in sides[1]))
        reads = {
            "q": self.operand(dk, 1 - of_dk, of_dk, "d"),
            "k": self.operand(dq, 1 - of_dq, of_dq, "d"),
            "v": self.operand(dot, 1 - given, None, "e"),
            "dout": self.operand(dot, given, None, "e"),
        }
        makes = {
            "dq": self._made(dq, of_dq, "d"),
            "dk": self._made(dk, of_dk, "d"),
            "dv": self._made(dv, of_dv, "e"),
        }
        return Pass(reads, makes)


def scores_of(values: Values, exponential: Op) -> Op | None:
    """The contraction whose result a softmax may be of."""
    program = values.program
    size = prod(program.shape(exponential.results[0]))
    stack, steps = [exponential.operands[0]], 0
    while stack and steps < 64:
        steps += 1
        v = values.same(stack.pop())
        op = program.maker(v)
        if op is None or prod(program.shape(v)) != size or values.is_leaf(v):
            continue
        if op.kind == "dot_general":
            return op if _is_batched(op) else None
        if op.rule is not None and op.kind not in ("reduce", "exponential"):
            stack += reversed(op.operands)
    return None


def has_dropout(region: Region) -> bool:
    """True if random numbers enter between contractions."""
    program, values = region.program, region.values
    reads = (v for i in region.inside for v in program.ops[i].operands)
    stack, seen = [v for v in reads if v not in region.members], set[int]()
    while stack and len(seen) < _MOST_OPS:
        v = values.same(stack.pop())
        op = program.maker(v)
        if op is None or v in seen or v in region.members or values.is_leaf(v):
            continue
        seen.add(v)
        if op.kind in _RANDOM:
            return True
        if not op.has_regions and op.kind not in ("dot_general", "custom_call"):
            stack += op.operands
    return False


def _is_batched(dot: Op) -> bool:
    """True if a contraction does the same for each sequence or head."""
    left, right, out = (
        {dot.known_rule.major(f) for f in dims} - {None}
        for dims in (*dot.known_rule.operands[:2], dot.known_rule.results[0])
    )
    return bool(left & right & out)

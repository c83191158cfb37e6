"""Finds scores, softmax, mix and their gradients in a program.

From an exponential back to the contraction that made the scores, and from there to all
that is computed of them, up to the contractions that read it: the mix, and the
gradients of queries, keys and values. Which is which follows from what they sum over,
and from whether the gradient of the weights is in it. Nothing is said here about what
is computed between: `cfp.attention.matching.infer` proves that it is attention.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from math import prod

from cfp.attention.matching.found import (
    Different,
    Dims,
    Found,
    LeftAlone,
    Lettering,
    Pass,
    Tensor,
)
from cfp.attention.matching.sides import Sides
from cfp.attention.matching.view import View
from cfp.program.evaluate import KNOWN
from cfp.program.graph import Op

_SHAPES = frozenset({"convert", "transpose", "reshape", "negate"})
_MOST_OPS = 400


def candidates(view: View) -> Iterator[Found | LeftAlone]:
    """All that may be attention, one for each contraction that makes scores."""
    seen: set[int] = set()
    for op in view.program.ops:
        if op.kind != "exponential" or op.rule is None:
            continue
        dot = _scores_of(view, op)
        if dot is None or view.numbers.of[dot.results[0]] in seen:
            continue
        if not _is_batched(dot):
            continue  # such as logits, of which a loss takes the softmax
        seen.add(view.numbers.of[dot.results[0]])
        finder = _Finder(view, dot, op)
        try:
            yield finder.found()
        except Different as error:
            reason = dropout(view, finder.inside) or str(error)
            yield LeftAlone(dot.id, dot.scope, dot.source or op.source, reason)


def _is_batched(dot: Op) -> bool:
    """True if a contraction does the same for each sequence or head."""
    assert dot.rule is not None
    left, right, out = (
        {dot.rule.major(f) for f in dims} - {None}
        for dims in (*dot.rule.operands[:2], dot.rule.results[0])
    )
    return bool(left & right & out)


def _scores_of(view: View, exponential: Op) -> Op | None:
    """The contraction whose result a softmax may be of."""
    size = prod(view.program.values[exponential.results[0]].shape)
    stack, steps = [exponential.operands[0]], 0
    while stack and steps < 64:
        steps += 1
        v = stack.pop()
        op = view.producer(v)
        if op is None or view.is_leaf(v):
            continue
        if prod(view.program.values[op.results[0]].shape) != size:
            continue
        if op.kind == "dot_general":
            return op
        if op.kind in KNOWN and op.kind not in ("broadcast_in_dim", "reduce"):
            stack += reversed(op.operands)
    return None


class _Finder:
    def __init__(self, view: View, scores: Op, exponential: Op) -> None:
        self.view, self.program = view, view.program
        self.scores, self.exponential = scores, exponential
        self.dims = Dims(view)
        self.inside: dict[int, None] = {}
        self.region: set[int] = {self._number(scores.results[0])}
        self.late: set[int] = set()  # numbers that depend on the weights' gradient
        self.sinks: dict[int, list[tuple[Op, int]]] = {}
        self.gradient: list[Op] = []

    def _number(self, v: int) -> int:
        return self.view.numbers.of[v]

    def found(self) -> Found:
        """Everything about it.

        Raises:
            Different: it is something else.
        """
        self._grow(self.scores.results[0])
        self._add_gradients_of_weights()
        letters = self._name_dims()
        sinks = self._classified(letters)
        argument = self._argument(letters)
        forward = [
            self._forward(op, index, letters) for op, index in sinks.get("mix", ())
        ]
        if not forward:
            raise Different("no contraction mixes values by the weights")
        backward = self._backward(sinks, letters)
        sizes: dict[str, int] = {}
        tensors = [t for p in forward for t in (*p.reads.values(), *p.makes.values())]
        for t in tensors:
            shape = self.program.values[t.value].shape
            sizes.update((x, n) for x, n in zip(t.letters, shape, strict=True) if x)
        sides = Sides(self.view, letters, self.inside, self.region)
        return Found(
            op=self.scores.id,
            scope=self.scores.scope,
            source=self.scores.source or self.exponential.source,
            sizes=sizes,
            scores=Tensor(self.scores.results[0], None, letters.of_result(self.scores)),
            argument=argument,
            inside=frozenset(self.inside),
            between=frozenset(self.view.all_of(self.region)),
            options=sides.options([*forward, *([backward] if backward else [])]),
            forward=tuple(forward),
            backward=backward,
            dots={name: ops[0][0].id for name, ops in sinks.items()},
        )

    # -- what is computed of the scores ------------------------------------------------

    def _grow(self, start: int, late: bool = False) -> None:
        """Adds all that is computed of a value, up to the contractions that read it."""
        stack = [start]
        while stack:
            v = stack.pop()
            number = self._number(v)
            for op, index in self.view.readers(v):
                if op.kind == "dot_general":
                    self.sinks.setdefault(op.id, [])
                    if (op, index) not in self.sinks[op.id]:
                        self.sinks[op.id].append((op, index))
                    continue
                if op.kind not in KNOWN or op.rule is None:
                    raise Different(
                        f"{op.kind} at {op.source or op.scope or 'no line'} reads the "
                        "scores or the weights, too"
                    )
                is_late = late or number in self.late
                fresh = [r for r in op.results if self._number(r) not in self.region]
                if is_late:
                    newly = [r for r in op.results if self._number(r) not in self.late]
                    self.late.update(map(self._number, op.results))
                else:
                    newly = []
                if op.id not in self.inside:
                    self.inside[op.id] = None
                    self.dims.join(op)
                self.region.update(map(self._number, op.results))
                stack += dict.fromkeys([*fresh, *newly])
            if len(self.inside) > _MOST_OPS:
                raise Different("much is computed of the scores besides a softmax")
            if self.view.is_output(v):
                raise Different(
                    "the step returns the scores, the weights, or what is "
                    "computed of them"
                )

    def _add_gradients_of_weights(self) -> None:
        """Adds contractions whose results enter: the weights' gradients."""
        size = prod(self.program.values[self.scores.results[0]].shape)
        while True:
            added = False
            for op_id in [*self.inside]:
                for v in self.program.ops[op_id].operands:
                    if self._number(v) in self.region or self.view.is_leaf(v):
                        continue
                    chain = self._to_contraction(v, size)
                    if chain is None:
                        continue
                    *between, dot = chain
                    self.gradient.append(dot)
                    self.region.add(self._number(dot.results[0]))
                    self.late.add(self._number(dot.results[0]))
                    for op in between:
                        self.dims.join(op)
                        self.inside[op.id] = None
                    self._grow(dot.results[0], late=True)
                    added = True
            if not added:
                return

    def _to_contraction(self, v: int, size: int) -> list[Op] | None:
        found: list[Op] = []
        while True:
            op = self.view.producer(v)
            if op is None or prod(self.program.values[v].shape) != size:
                return None
            found.append(op)
            if op.kind == "dot_general":
                return found
            if op.kind not in _SHAPES or op.rule is None:
                return None
            v = op.operands[0]

    # -- what dims run over ------------------------------------------------------------

    def _name_dims(self) -> Lettering:
        rule = self.scores.rule
        assert rule is not None
        left, right = rule.operands[:2]
        of = [{rule.major(f) for f in dims} - {None} for dims in (left, right)]
        names: dict[Hashable, str] = {}
        result = self.scores.results[0]
        counts = {"b": 0, "q": 0}
        softmaxed = self._softmaxed()
        for d, factors in enumerate(rule.results[0]):
            major = rule.major(factors)
            if major is None:
                continue
            node = self.dims.of(result, d)
            if major in of[0] and major in of[1]:
                kind = "b"
            else:
                mine = 0 if major in of[0] else 1
                kind = "k" if node == softmaxed else "q"
                self.query_side = mine if kind == "q" else 1 - mine
            name = kind
            if kind != "k":
                name = f"{kind}{counts[kind]}"
                counts[kind] += 1
            if node in names:
                raise Different(
                    "later ops merge two dims of the scores (a reshape), which is not "
                    "supported"
                )
            names[node] = name
        if "k" not in names.values():
            raise Different("the softmax is not over keys alone")
        q_side = {
            0 if rule.major(f) in of[0] else 1
            for d, f in enumerate(rule.results[0])
            if names.get(self.dims.of(result, d), "")[:1] == "q"
        }
        if len(q_side) != 1:
            raise Different("no dim of the scores runs over queries alone")
        [self.query_side] = q_side
        return Lettering(self.dims, names)

    def _softmaxed(self) -> Hashable:
        """The dim along which exponentials are summed."""
        found = set()
        for op, _ in self.view.readers(self.exponential.results[0]):
            if op.kind != "reduce" or op.rule is None or op.id not in self.inside:
                continue
            [value] = op.operands[:1]
            kept = {f for dims in op.rule.results[0] for f in dims}
            for d, factors in enumerate(op.rule.operands[0]):
                major = op.rule.major(factors)
                if major is not None and major not in kept:
                    found.add(self.dims.of(value, d))
        if len(found) != 1:
            raise Different("nothing sums its exponentials along one dim")
        return found.pop()

    # -- which contraction is which ----------------------------------------------------

    def _classified(self, letters: Lettering) -> dict[str, list[tuple[Op, int]]]:
        found: dict[str, list[tuple[Op, int]]] = {}
        for uses in self.sinks.values():
            if len(uses) != 1:
                raise Different("a contraction reads two tensors of the attention")
            [(op, index)] = uses
            weights = op.operands[index]
            own = letters.of_value(weights)
            out = set(letters.of_result(op, index))
            names = (
                ("dq", "dk") if self._number(weights) in self.late else ("mix", "dv")
            )
            if "k" in own and "k" not in out:
                name = names[0]
            elif any(x[:1] == "q" for x in own) and not any(x[:1] == "q" for x in out):
                name = names[1]
            else:
                raise Different(f"{op.source or op.scope} sums weights in another way")
            found.setdefault(name, []).append((op, index))
        return found

    def _argument(self, letters: Lettering) -> Tensor:
        """Returns the softmax's operand: scores without the row's maximum."""
        v = self.exponential.operands[0]
        op = self.view.producer(v)
        while op is not None and op.kind == "convert":
            op = self.view.producer(op.operands[0])
        if op is not None and op.kind == "subtract":
            v = op.operands[0]
        if self._number(v) not in self.region:
            raise Different("the exponential is not of scores less a maximum")
        return Tensor(v, None, letters.of_value(v))

    def _forward(self, mix: Op, index: int, letters: Lettering) -> Pass:
        scores = self._near(self.scores, mix)
        q, k = self.query_side, 1 - self.query_side
        reads = {
            "q": letters.operand(scores, q, "d"),
            "k": letters.operand(scores, k, "d"),
            "v": letters.operand(mix, 1 - index, "e", index),
        }
        out = Tensor(mix.results[0], None, letters.of_result(mix, index, "e"))
        return Pass(reads, {"out": out})

    def _near(self, op: Op, reader: Op) -> Op:
        """The instance of an op that stands in a reader's body, last before it."""
        best = None
        for v in self.view.values[self._number(op.results[0])]:
            producer = self.program.values[v].producer
            if producer < 0 or producer >= reader.id:
                continue
            one = self.program.ops[producer]
            if one.kind == op.kind and one.parent == reader.parent:
                best = one
        if best is None:
            raise Different("scores and mix are computed in different loops")
        return best

    def _backward(
        self, sinks: Mapping[str, list[tuple[Op, int]]], letters: Lettering
    ) -> Pass | None:
        derived = [name for name in ("dq", "dk", "dv") if name in sinks]
        if not derived and not self.gradient:
            return None
        if len(derived) < 3 or len(self.gradient) != 1:
            raise Different("not all gradients of queries, keys and values are there")
        if any(len(sinks[name]) != 1 for name in derived):
            raise Different("gradients are computed more than once")
        [(dq, of_dq)], [(dk, of_dk)], [(dv, of_dv)] = (sinks[n] for n in derived)
        [weights] = self.gradient
        given = self._given(weights, letters)
        reads = {
            "q": letters.operand(dk, 1 - of_dk, "d", of_dk),
            "k": letters.operand(dq, 1 - of_dq, "d", of_dq),
            "v": letters.operand(weights, 1 - given, "e"),
            "dout": letters.operand(weights, given, "e"),
        }
        makes = {
            "dq": Tensor(dq.results[0], None, letters.of_result(dq, of_dq, "d")),
            "dk": Tensor(dk.results[0], None, letters.of_result(dk, of_dk, "d")),
            "dv": Tensor(dv.results[0], None, letters.of_result(dv, of_dv, "e")),
        }
        return Pass(reads, makes)

    def _given(self, weights: Op, letters: Lettering) -> int:
        """Returns which operand of the weights' gradient is the output's gradient."""
        for index in (0, 1):
            if any(x[:1] == "q" for x in letters.operand(weights, index, "e").letters):
                return index
        raise Different("the gradient of the weights has no queries")


# ---------------------------------------------------------------------- random numbers

# Random bits: of a generator, or made into numbers by what a float is in memory.
_RANDOM = frozenset({"bitcast_convert", "rng", "rng_bit_generator"})
_THROUGH = (KNOWN - {"dot_general", "reduce"}) | {"concatenate", "slice"}
_MOST_STEPS = 64


def dropout(view: View, inside: Iterable[int]) -> str:
    """Returns a message if random numbers enter some ops, or "".

    Args:
        view: of the program.
        inside: ids of ops between scores and mix.
    """
    numbers, ops = view.numbers.of, [view.program.ops[op] for op in inside]
    own = {numbers[v] for op in ops for v in op.results}
    entering = (v for op in ops for v in op.operands if numbers[v] not in own)
    if any(_is_random(view, v, own) for v in entering):
        return "dropout: random numbers enter its scores or weights"
    return ""


def _is_random(view: View, v: int, own: set[int]) -> bool:
    """True if elementwise ops make a value of random numbers."""
    stack, seen = [v], set[int]()
    while stack and len(seen) < _MOST_STEPS:
        number = view.numbers.of[v := stack.pop()]
        op = view.producer(v)
        if op is None or number in seen or number in own or view.is_leaf(v):
            continue
        seen.add(number)
        if op.kind in _RANDOM:
            return True
        if op.kind in _THROUGH:
            stack += op.operands
    return False

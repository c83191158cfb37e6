"""Steps of a pass, on arrays whose dims are named.

A step does the same at every position, or sums over keys; so arrays have one dim for
each letter, and transposing, reshaping or repeating them is no step at all. The steps
run on a few positions, which stand for all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cfp.attention.matching.found import ORDER, Letters, Pass
from cfp.attention.matching.region import FREE, LARGEST, VIEWS, Region, carried
from cfp.attention.matching.values import FLOATS, Node
from cfp.program.graph import Op, numpy_dtype
from cfp.program.replace import Different, Use

KEYS = ORDER.index("k")

Key = tuple[int, Letters]  # a value's number, and what its dims run over
Arg = Key | float | int  # an operand or side, a constant, a step


@dataclass(frozen=True, slots=True)
class Step:
    """An op, by what it reads.

    Attributes:
        sums: whether it is the sum, or the largest, along keys.
        is_pointwise: whether nothing is summed before it.
    """

    op: Op
    args: tuple[Arg, ...]
    sums: bool
    is_pointwise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A mask, bias or factor that is read between contractions.

    Attributes:
        node: the value, before it is repeated or turned.
        letters: what its dims run over.
        reads: (value, use, letters) in the body of the pass, the smallest last.
    """

    node: Node
    letters: Letters
    reads: list[tuple[int, Use, Letters]] = field(default_factory=list)


class Core:
    """The steps from the operands of contractions to the outputs of a pass.

    Attributes:
        steps: by number, each behind its operands.
        roots: queries, keys, values, and the output's gradient.
        scores: the step that makes the scores.
        mixes: for each output its contraction's operands: a step, and an operand.
    """

    def __init__(self, region: Region, one: Pass) -> None:
        """Collects the steps.

        Raises:
            Different: scores of two iterations enter.
        """
        self.region, self.values, self.one = region, region.values, one
        self.program = region.program
        self.steps: dict[int, Step] = {}
        self.sides: dict[Key, Side] = {}
        self.mixes: dict[str, tuple[Arg, Key]] = {}
        for name, made in one.makes.items():
            assert made.use is not None, "a contraction makes it"
            dot, index = self.program.ops[made.use[0]], made.use[1]
            other = region.operand(dot, 1 - index, index, FREE[name])
            self.parent = dot.parent
            arg = self._collected(dot.operands[index])
            self.mixes[name] = arg, self._root((other.value, ()), other.letters)
        self.roots = {
            name: self._root((read.value, ()), read.letters)
            for name, read in one.reads.items()
        }
        scores = [n for n, one in self.steps.items() if one.op is region.scores]
        if len(scores) != 1:
            raise Different("scores of two iterations of a loop enter it")
        [self.scores] = scores

    # -- steps -------------------------------------------------------------------------

    def _collected(self, v: int) -> Arg:
        """Collects what a member is computed of, and returns it."""
        stack = [start := self.values.source((v, ()))]
        while stack:
            node = stack[-1]
            number = self.values.number(node)
            if number in self.steps:
                stack.pop()
                continue
            op = self.program.maker(node[0])
            assert op is not None, "members are made by ops"
            reads = [self.values.source((x, node[1])) for x in op.operands]
            inner = [x for x in reads if x[0] in self.region.members]
            missing = [x for x in inner if self.values.number(x) not in self.steps]
            stack += missing
            if not missing:
                self.steps[number] = self._step(op, node, reads)
        return self.values.number(start)

    def _step(self, op: Op, node: Node, reads: list[Node]) -> Step:
        args: tuple[Arg, ...]
        if op.kind == "dot_general":
            other = "d" if op is self.region.scores else "e"
            read = (self.region.operand(op, i, None, other) for i in (0, 1))
            args = tuple(self._root((t.value, node[1]), t.letters) for t in read)
        else:
            args = tuple(self._arg(op, i, node, x) for i, x in enumerate(reads))
        if op.kind == "reduce":
            args = args[:1]
        before = [self.steps[a] for a in args if isinstance(a, int)]
        shape = self.program.shape(op.operands[0])
        dims = op.integers("dimensions") if op.kind == "reduce" else ()
        sums = any(shape[d] > 1 for d in dims)
        is_pointwise = not sums and all(s.is_pointwise for s in before)
        return Step(op, args, sums, is_pointwise)

    def _arg(self, op: Op, index: int, node: Node, read: Node) -> Arg:
        if read[0] in self.region.members:
            return self.values.number(read)
        v = op.operands[index]
        if (number := self.values.number_of_constant(v)) is not None:
            return number
        letters = self.region.letters_of(op, index)
        root, own = self._stripped((v, node[1]), letters, VIEWS - {"convert"})
        key = self.values.number(root), tuple(x for x in own if x)
        side = self.sides.setdefault(key, Side(node=root, letters=own))
        if op.parent == self.parent:
            side.reads.extend(self.reads_of(op, index, letters))
        return key

    def reads_of(
        self, op: Op, index: int, letters: Letters
    ) -> list[tuple[int, Use, Letters]]:
        """Lists uses of a value in the body of the pass, repeated values included."""
        found = []
        while True:
            v = op.operands[index]
            found.append((v, (op.id, index), letters))
            maker = self.program.maker(v)
            if maker is None or maker.parent != self.parent:
                return found
            before = self._before(maker, letters, VIEWS - {"convert"})
            if before is None:
                return found
            op, index, letters = maker, 0, before

    # -- what operands are, before they are turned -------------------------------------

    def _root(self, node: Node, letters: Letters) -> Key:
        root, own = self._stripped(node, letters, VIEWS)
        return self.values.number(root), tuple(x for x in own if x)

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
        """Letters of the operand of a view; None for other ops."""
        rule, dtypes = op.rule, {self.program.values[v].dtype for v in op.reads}
        if op.kind not in views or rule is None:
            return None
        dtypes |= {self.program.values[v].dtype for v in op.results}
        if op.kind == "convert" and not dtypes <= FLOATS:
            return None
        [before], [after] = rule.operands, rule.results
        if any(sum(rule.sizes[f] > 1 for f in dim) > 1 for dim in (*before, *after)):
            return None
        found = carried(rule, letters, after, before)
        return None if "?" in found else found

    def run(
        self,
        known: Mapping[Any, Any],
        *,
        cast: bool = False,
        only_pointwise: bool = False,
    ) -> dict[Arg, Any]:
        """Computes the steps.

        Args:
            known: operands and sides, with a dim for each letter of `ORDER`; and
                results of steps that need not be computed.
            cast: whether results have the program's dtypes.
            only_pointwise: whether to leave out all behind a sum.
        """
        made: dict[Arg, Any] = dict(known)
        for number, step in self.steps.items():
            if number in made or (only_pointwise and not step.is_pointwise):
                continue
            v = step.op.results[0]
            reads = [a if isinstance(a, float) else made[a] for a in step.args]
            if step.op.kind == "dot_general":
                found = contracted(reads[0], reads[1], {*self.region.letters(v)})
            else:
                found = _applied(step, reads)
            made[number] = self._rounded(found, v, cast)
        return made

    def _rounded(self, x: Any, v: int, cast: bool) -> Any:
        """An array in a value's dtype; NumPy computes on in float64."""
        if not cast:
            return x
        dtype = numpy_dtype(self.program.values[v].dtype)
        return x.astype(dtype).astype(np.float64)

    def outputs(self, made: Mapping[Arg, Any]) -> dict[str, Any]:
        """The pass's outputs, by the results of `run`."""
        return {
            name: contracted(made[arg], made[other], self.letters(name))
            for name, (arg, other) in self.mixes.items()
        }

    def letters(self, name: str) -> frozenset[str]:
        """The letters of an output."""
        return frozenset(self.one.makes[name].letters) - {""}


def contracted(x: Any, y: Any, kept: Collection[str]) -> Any:
    """The sum of products over all letters but some."""
    sizes = np.broadcast_shapes(x.shape, y.shape)
    out = [d for d, a in enumerate(ORDER) if a in kept and sizes[d] > 1]
    terms: list[Any] = []
    for one in (x, y):
        dims = [d for d, n in enumerate(one.shape) if n > 1]
        terms += [one.reshape([one.shape[d] for d in dims]), dims]
    found = np.einsum(*terms, out)
    return found.reshape([n if d in out else 1 for d, n in enumerate(sizes)])


_OPS = {
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
    return _OPS[op.kind](*reads)

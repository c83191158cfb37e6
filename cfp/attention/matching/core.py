"""Steps of a pass, on arrays whose dims are named.

A step does the same at every position, or sums over keys; so arrays have one dim for
each letter, and transposing, reshaping or repeating them is no step at all. The steps
run on a few positions, which stand for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cfp.attention.matching.found import ORDER, Letters, Pass, aligned
from cfp.attention.matching.region import LARGEST, VIEWS, Region
from cfp.attention.matching.values import FLOATS, At, Node
from cfp.program.graph import Op, numpy_dtype
from cfp.program.replace import Different, Use

SCORES, GRADIENT = "scores", "gradient of weights"
KEYS = ORDER.index("k")
_FREE = {"out": "e", "dv": "e", "dq": "d", "dk": "d"}  # of what is mixed

Key = tuple[int, Letters]  # a value's number, and what its dims run over
Arg = Key | float | int | str  # an operand or side, a constant, a step, a contraction


@dataclass(frozen=True, slots=True)
class Step:
    """An op, by what it reads.

    Attributes:
        sums: whether it is the sum, or the largest, along keys.
        is_row: whether the result is the same for all keys.
        is_pointwise: whether nothing is summed before it.
    """

    op: Op
    args: tuple[Arg, ...]
    sums: bool
    is_row: bool
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
        steps: by number, each behind what it reads.
        roots: queries, keys, values, and the output's gradient.
        dots: the operands of the contractions that steps begin with.
        mixes: for each output what is contracted: a step, and an operand.
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
        self._ats: dict[str, At] = {}
        self._dots = {region.scores.results[0]: SCORES}
        self._results = {SCORES: region.scores.results[0]}
        if region.weights_gradient is not None:
            [result] = region.weights_gradient.results
            self._dots[result], self._results[GRADIENT] = GRADIENT, result
        makers = [self.program.values[t.value].producer for t in one.makes.values()]
        self.parent = self.program.ops[makers[0]].parent
        for (name, _), maker in zip(one.makes.items(), makers, strict=True):
            dot, [index] = self.program.ops[maker], region.sinks[maker]
            other = region.operand(dot, 1 - index, index, _FREE[name])
            arg = self._collected(dot.operands[index])
            self.mixes[name] = arg, self._root((other.value, ()), other.letters)
        self.roots = {
            name: self._root((read.value, ()), read.letters)
            for name, read in one.reads.items()
        }
        self.dots = {SCORES: self._operands(region.scores, SCORES)}
        if region.weights_gradient is not None and GRADIENT in self._ats:
            self.dots[GRADIENT] = self._operands(region.weights_gradient, GRADIENT)

    def _operands(self, dot: Op, name: str) -> tuple[Key, Key]:
        """A contraction's operands, in the iteration that it is of."""
        other, at = "d" if name == SCORES else "e", self._ats.get(name, ())
        read = [self.region.operand(dot, i, None, other) for i in (0, 1)]
        left, right = (self._root((t.value, at), t.letters) for t in read)
        return left, right

    # -- steps -------------------------------------------------------------------------

    def _collected(self, v: int) -> Arg:
        """Collects what a member is computed of, and returns it."""
        stack = [start := self.values.source((v, ()))]
        while stack:
            node = stack[-1]
            number = self.values.number(node)
            if number in self.steps or node[0] in self._dots:
                self._arg_of_member(node)
                stack.pop()
                continue
            op = self.program.maker(node[0])
            assert op is not None, "members are made by ops"
            reads = [self.values.source((x, node[1])) for x in op.operands]
            inner = [x for x in reads if x[0] in self.region.members]
            missing = [
                x
                for x in inner
                if x[0] not in self._dots and self.values.number(x) not in self.steps
            ]
            stack += missing
            if not missing:
                self.steps[number] = self._step(op, node, reads)
        return self._arg_of_member(start)

    def _arg_of_member(self, node: Node) -> Arg:
        name = self._dots.get(node[0])
        if name is None:
            return self.values.number(node)
        if self._ats.setdefault(name, node[1]) != node[1]:
            raise Different("scores of two iterations of a loop enter it")
        return name

    def _step(self, op: Op, node: Node, reads: list[Node]) -> Step:
        args = tuple(self._arg(op, i, node, x) for i, x in enumerate(reads))
        if op.kind == "reduce":
            args = args[:1]
        before = [self.steps[a] for a in args if isinstance(a, int)]
        shape = self.program.shape(op.operands[0])
        dims = op.integers("dimensions") if op.kind == "reduce" else ()
        sums = any(shape[d] > 1 for d in dims)
        is_row = sums or all(
            self.steps[a].is_row
            if isinstance(a, int)
            else "k" not in a[1]
            if isinstance(a, tuple)
            else isinstance(a, float)
            for a in args
        )
        is_pointwise = not sums and all(s.is_pointwise for s in before)
        return Step(op, args, sums, is_row, is_pointwise)

    def _arg(self, op: Op, index: int, node: Node, read: Node) -> Arg:
        if read[0] in self.region.members:
            return self._arg_of_member(read)
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
        """Uses of a value in the body of the pass, and of those that it repeats."""
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
        if op.kind not in views:
            return None
        before, after = (self.program.shape(v) for v in (op.operands[0], op.results[0]))
        if op.kind == "convert":
            dtypes = {self.program.values[v].dtype for v in (*op.operands, *op.results)}
            return letters if dtypes <= FLOATS else None
        if op.kind == "transpose":
            order = op.integers("permutation")
            return tuple(letters[order.index(d)] for d in range(len(order)))
        if op.kind == "broadcast_in_dim":
            places = op.integers("broadcast_dimensions")
            pairs = zip(places, before, strict=True)
            return tuple(letters[d] if n == after[d] else "" for d, n in pairs)
        if [n for n in before if n > 1] != [n for n in after if n > 1]:
            return None
        return aligned(letters, before)

    # -- evaluation --------------------------------------------------------------------

    def run(
        self,
        known: Mapping[Any, Any],
        *,
        cast: bool = False,
        only_pointwise: bool = False,
    ) -> dict[Arg, Any]:
        """Computes the steps.

        Args:
            known: operands and sides, with a dim for each letter of `ORDER`; the
                contractions' results are computed, unless they are given.
            cast: whether results have the program's dtypes.
            only_pointwise: whether to leave out all behind a sum.
        """
        made: dict[Arg, Any] = dict(known)
        for name, (left, right) in self.dots.items():
            if name not in made and left in made and right in made:
                made[name] = contracted(made[left], made[right], name)
                made[name] = self._rounded(made[name], self._results[name], cast)
        for number, step in self.steps.items():
            if only_pointwise and not step.is_pointwise:
                continue
            reads = [a if isinstance(a, float) else made[a] for a in step.args]
            found = _applied(step, reads)
            made[number] = self._rounded(found, step.op.results[0], cast)
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
            name: contracted(made[arg], made[other], name, self.letters(name))
            for name, (arg, other) in self.mixes.items()
        }

    def letters(self, name: str) -> frozenset[str]:
        """The letters of an output."""
        return frozenset(self.one.makes[name].letters) - {""}


def contracted(x: Any, y: Any, name: str, kept: frozenset[str] | None = None) -> Any:
    """The sum of products over what a contraction sums."""
    summed = {"d" if name == SCORES else "e"} if kept is None else {*ORDER} - kept
    sizes = np.broadcast_shapes(x.shape, y.shape)
    out = [d for d, a in enumerate(ORDER) if a not in summed and sizes[d] > 1]
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

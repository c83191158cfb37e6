"""Attention as it is found: contractions, and what their dims run over.

A program is seen by value numbers: equal tensors are one, wherever they are made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from cfp.analysis.contractions import UnionFind
from cfp.analysis.numbering import StrictNumbering
from cfp.program.constants import Constants
from cfp.program.evaluate import KNOWN, Evaluator
from cfp.program.graph import Op, Program
from cfp.program.replace import Different, Use
from cfp.program.rules import Rule

_PASSES = frozenset(
    {"dynamic_update_slice", "dynamic_slice", "optimization_barrier", "while", "case"}
)


class View:
    """A program in which what is rematerialized, stacked or cast is one value."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.numbers = StrictNumbering(program).run()

    @cached_property
    def constants(self) -> Constants:
        """Evaluates what depends on no argument."""
        return Constants(self.program)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Evaluates ops of the program."""
        return Evaluator(self.program)

    @cached_property
    def values(self) -> dict[int, list[int]]:
        """The values that have a number."""
        found: dict[int, list[int]] = defaultdict(list)
        for v, number in enumerate(self.numbers.of):
            found[number].append(v)
        return found

    @cached_property
    def _made(self) -> dict[int, int]:
        """For each number the value that says best how it is made."""
        found: dict[int, int] = {}
        for number, values in self.values.items():
            found[number] = min(values, key=self._rank)
        return found

    def _rank(self, v: int) -> tuple[int, int]:
        op = self.program.maker(v)
        if op is None or op.kind in _PASSES:
            return 2, v
        if self.numbers.of[v] in {self.numbers.of[x] for x in op.operands}:
            return 2, v  # only another view of what is made elsewhere
        return (0, v) if op.kind in KNOWN else (1, v)

    def made(self, v: int) -> int:
        """The value that stands for all that are equal to one."""
        return self._made[self.numbers.of[v]]

    def dtype(self, one: Tensor) -> str:
        """The dtype of a tensor before it was cast."""
        return self.program.values[self.made(one.value)].dtype

    def producer(self, v: int) -> Op | None:
        """The op that makes the value that stands for one; None for arguments."""
        return self.program.maker(self.made(v))

    def readers(self, v: int) -> list[tuple[Op, int]]:
        """Returns (op, operand index) pairs that read a value or an equal one."""
        found = []
        for same in self.values[self.numbers.of[v]]:
            for user, index in self.program.users[same]:
                op = self.program.ops[user]
                if op.kind not in _PASSES and not op.has_regions:
                    found.append((op, index))
        return found

    def all_of(self, numbers: Iterable[int]) -> Iterator[int]:
        """All values that have some numbers, and what loops stack of them."""
        users, ops = self.program.users, self.program.ops
        stack = [v for number in numbers for v in self.values[number]]
        while stack:
            v = stack.pop()
            yield v
            for user, index in users[v]:
                op = ops[user]
                is_shaped = op.kind in ("reshape", "broadcast_in_dim")
                if is_shaped or (op.kind == "dynamic_update_slice" and index == 1):
                    stack += op.results
                elif op.kind == "while" and index >= len(op.operands):
                    stack.append(op.results[index - len(op.operands)])

    @cached_property
    def outputs(self) -> frozenset[int]:
        """Numbers of what the program returns."""
        return frozenset(self.numbers.of[o] for o in self.program.outputs)

    @cached_property
    def leaves(self) -> frozenset[int]:
        """Numbers of what is computed of no argument, in a loop's body too."""
        number, leaf_ops = self.numbers.of, self.program.leaf_ops
        found: set[int] = set()
        for op in self.program.ops:
            read = (number[v] in found for v in op.operands)
            if op.id in leaf_ops or (op.kind in KNOWN and all(read)):
                found.update(number[r] for r in op.results)
        return frozenset(found)

    def is_leaf(self, v: int) -> bool:
        """True if a value is the same in every step."""
        return self.numbers.of[v] in self.leaves


Letters = tuple[str, ...]  # for each dim what it runs over; "" of size 1


@dataclass(frozen=True, slots=True)
class Tensor:
    """An operand or result of a contraction.

    Attributes:
        use: by whom it is read; None for results.
        letters: what each of its dims runs over: "b0", "b1"... for batch and heads,
            "q0", "q1"... for queries and groups of heads, "k", "d", "e".
    """

    value: int
    use: Use | None
    letters: Letters


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or a backward pass: tensors that it reads and makes, by name."""

    reads: Mapping[str, Tensor]
    makes: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A mask or a bias that enters an attention.

    Attributes:
        parts: the values that it is made of, and their letters: one, or the segment
            ids of queries and those of keys.
        reads: what a kernel reads for each part: the part itself, or what is made of
            it where only that is there.
        uses: for each pass where it reads those.
        entries: the numbers of what the attention's ops read of it.
    """

    parts: tuple[Tensor, ...]
    reads: tuple[Tensor, ...]
    uses: tuple[tuple[Use, ...], ...]
    entries: frozenset[int]

    @property
    def is_segments(self) -> bool:
        """Tell whether it compares ids of queries with ids of keys."""
        return len(self.parts) > 1


@dataclass(frozen=True, kw_only=True)
class Found:
    """A possible attention.

    Attributes:
        op: the contraction that makes the scores.
        source: the line that it is from.
        sizes: of each letter.
        argument: the value whose softmax is taken, and its letters.
        inside: ids of the ops between the contractions.
        between: ids of the values between them, scores and weights and their gradients,
            wherever they are computed, so that none is made by a kernel.
        options: ways to see the masks and biases that enter, the best one first; each
            has all of them.
        sides: the one that is looked at.
        forward, backward: the passes; a backward pass has all three gradients.
    """

    op: int
    source: str
    scores: Tensor
    argument: Tensor
    forward: tuple[Pass, ...]
    backward: Pass | None
    sizes: Mapping[str, int] = field(default_factory=dict)
    inside: frozenset[int] = frozenset()
    between: frozenset[int] = frozenset()
    options: tuple[tuple[Side, ...], ...] = ()
    sides: tuple[Side, ...] = ()
    dots: Mapping[str, int] = field(default_factory=dict)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """All passes, the backward pass last."""
        return (*self.forward, *([self.backward] if self.backward else []))


# ----------------------------------------------------------------------------- letters

# "b0", "b1"... are batch and heads, "q0", "q1"... queries and groups of heads, "k"
# keys, "d" and "e" the features of keys and of values; "" is a dim of size 1.


class Dims:
    """Dims of tensors that run over the same; those of size 1 do not count."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._same = UnionFind()

    def join(self, op: Op, *, leaves: bool = False) -> None:
        """Joins dims of an op's operands and results.

        Args:
            leaves: also those of what is the same in every step, which attentions of
                other dims may share.
        """
        tensors = zip(
            (*op.operands, *op.results),
            (*op.known_rule.operands, *op.known_rule.results),
            strict=False,
        )
        by_factor: dict[int, tuple[int, int]] = {}
        for v, dims in tensors:
            if not leaves and self.view.is_leaf(v):
                continue
            for d, factors in enumerate(dims):
                major = op.known_rule.major(factors)
                if major is None:
                    continue
                node = self._node(v, d)
                if major in by_factor:
                    self._same.union(node, by_factor[major])
                by_factor.setdefault(major, node)

    def of(self, v: int, d: int) -> Hashable:
        """Returns the class of dims that a tensor's dim belongs to."""
        return self._same.find(self._node(v, d))

    def _node(self, v: int, d: int) -> tuple[int, int]:
        shape = self.view.program.shape(v)
        return self.view.numbers.of[v], sum(n > 1 for n in shape[:d])


def is_by_key(letters: Letters) -> bool:
    """True of what has keys, and no queries."""
    return "k" in letters and not any(x[:1] == "q" for x in letters)


def majors_of(rule: Rule, dims: tuple[tuple[int, ...], ...]) -> list[int | None]:
    """The factors by which dims may be sharded."""
    return [rule.major(factors) for factors in dims]


class Lettering:
    """Letters of the dims of an attention's tensors."""

    def __init__(self, dims: Dims, names: Mapping[Hashable, str]) -> None:
        self._dims, self._names = dims, names

    def of_value(self, v: int) -> Letters:
        """Returns the letters of a value between the contractions."""
        shape = self._dims.view.program.shape(v)
        return tuple(
            self._names.get(self._dims.of(v, d), "?") if n > 1 else ""
            for d, n in enumerate(shape)
        )

    def _factors(self, op: Op, weights: int | None) -> dict[int, str]:
        """The letters of a contraction's factors, by the operand that is known."""
        if weights is None:
            v, dims = op.results[0], op.known_rule.results[0]
        else:
            v, dims = op.operands[weights], op.known_rule.operands[weights]
        majors = majors_of(op.known_rule, dims)
        pairs = zip(majors, self.of_value(v), strict=True)
        return {f: letter for f, letter in pairs if f is not None and letter}

    def operand(
        self, op: Op, index: int, other: str, weights: int | None = None
    ) -> Tensor:
        """An operand; ``other`` names the dim that the known tensor does not have."""
        known = self._factors(op, weights)
        names = _named(
            majors_of(op.known_rule, op.known_rule.operands[index]), known, other
        )
        return Tensor(op.operands[index], (op.id, index), names)

    def of_result(
        self, op: Op, weights: int | None = None, other: str = "e"
    ) -> Letters:
        """A contraction's result."""
        known = self._factors(op, weights)
        return _named(majors_of(op.known_rule, op.known_rule.results[0]), known, other)

    def of_operand(self, op: Op, index: int) -> Letters:
        """Returns the letters of an operand, by the result of the op that reads it."""
        known, majors = (
            self._factors(op, None),
            majors_of(op.known_rule, op.known_rule.operands[index]),
        )
        return tuple("" if f is None else known.get(f, "?") for f in majors)


def aligned(letters: Letters, shape: tuple[int, ...]) -> Letters:
    """Letters of a value that equals one with these letters, but for dims of size 1."""
    names = iter([x for x in letters if x])
    return tuple(next(names) if n > 1 else "" for n in shape)


def _named(majors: list[int | None], known: dict[int, str], other: str) -> Letters:
    names = tuple("" if f is None else known.get(f, other) for f in majors)
    if len({n for n in names if n}) < sum(bool(n) for n in names) or "?" in names:
        raise Different("dims of a contraction are mixed up")
    return names

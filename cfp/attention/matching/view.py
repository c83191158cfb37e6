"""A program seen by value numbers: equal tensors are one, wherever they are made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property

from cfp.analysis.numbering import Numbers, number_values
from cfp.program.evaluate import KNOWN
from cfp.program.graph import Op, Program

_PASSES = frozenset(
    {"dynamic_update_slice", "dynamic_slice", "optimization_barrier", "while", "case"}
)


class View:
    """A program with what is rematerialized, stacked by a loop, or cast, seen as one.

    Attributes:
        program: the program.
        numbers: of its values.
    """

    def __init__(self, program: Program, numbers: Numbers | None = None) -> None:
        """Numbers the values, if that was not done already."""
        self.program = program
        self.numbers = numbers or number_values(program)

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
        producer = self.program.values[v].producer
        if producer < 0:
            return 2, v
        op = self.program.ops[producer]
        same = {self.numbers.of[x] for x in op.operands} & {self.numbers.of[v]}
        if same or op.kind in _PASSES:
            return 2, v  # only another view of what is made elsewhere
        return (0, v) if op.kind in KNOWN else (1, v)

    def made(self, v: int) -> int:
        """The value that stands for all that are equal to one."""
        return self._made[self.numbers.of[v]]

    def producer(self, v: int) -> Op | None:
        """The op that makes the value that stands for one; None for arguments."""
        producer = self.program.values[self.made(v)].producer
        return self.program.ops[producer] if producer >= 0 else None

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

    def is_output(self, v: int) -> bool:
        """True if the program returns a value or one that is equal."""
        outputs = {self.numbers.of[o] for o in self.program.outputs}
        return self.numbers.of[v] in outputs

    @cached_property
    def leaves(self) -> frozenset[int]:
        """Numbers of what depends on no argument."""
        leaf_ops = self.program.leaf_ops
        found = {
            self.numbers.of[r] for op in leaf_ops for r in self.program.ops[op].results
        }
        return frozenset(found)

    def is_leaf(self, v: int) -> bool:
        """True if a value is the same in every step."""
        return self.numbers.of[v] in self.leaves or self._follows(v)

    def _follows(self, v: int) -> bool:
        """True if a value is computed from leaves only, in a loop's body too."""
        seen: set[int] = set()
        stack = [self.made(v)]
        while stack:
            x = stack.pop()
            if x in seen or self.numbers.of[x] in self.leaves:
                continue
            seen.add(x)
            producer = self.program.values[x].producer
            if producer < 0 or self.program.ops[producer].kind not in KNOWN:
                return False
            if len(seen) > 64:
                return False
            stack += [self.made(o) for o in self.program.ops[producer].operands]
        return True

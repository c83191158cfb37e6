"""Value numbering: equal numbers mean equal tensors (up to dtype).

Rematerialised code recomputes values; a backward loop reads what the forward loop
stacked. Numbers see through both, through casts and through barriers, so that an op
of the backward pass can be matched with the op it was differentiated from.
"""

from __future__ import annotations

from cfp.program.graph import Op, Program

_TRANSPARENT = frozenset({"convert", "optimization_barrier"})


def number_values(program: Program) -> list[int]:
    """A number for each value; equal for values that are equal by construction."""
    return _Numbering(program).run()


class _Numbering:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.numbers = [-1] * len(program.values)
        self.table: dict[tuple, int] = {}
        self.stacked: dict[int, int] = {}  # number of a stack -> number of its slices

    def fresh(self) -> int:
        return self.intern(("fresh", len(self.table)))

    def intern(self, key: tuple) -> int:
        return self.table.setdefault(key, len(self.table))

    def run(self) -> list[int]:
        for value in self.program.args:
            self.numbers[value] = self.fresh()
        invariant = self._invariant_entries()
        for op in self.program.ops:
            self._bind_entries(op.operands, invariant)
            self._number(op, invariant)
        return [n if n >= 0 else self.fresh() for n in self.numbers]

    def _invariant_entries(self) -> set[int]:
        """Loop-body arguments that every iteration passes on unchanged."""
        found = set()
        for op in self.program.ops:
            if op.kind != "while":
                continue
            body_args = op.entries[len(op.operands) :]
            for arg, yielded in zip(body_args, op.yields, strict=True):
                if arg == yielded:
                    found.add(arg)
        return found

    def _bind_entries(self, operands: tuple[int, ...], invariant: set[int]) -> None:
        for v in operands:
            if self.numbers[v] < 0:
                origin = self.program.values[v].origin
                known = v in invariant and self.numbers[origin] >= 0
                self.numbers[v] = self.numbers[origin] if known else self.fresh()

    def _number(self, op: Op, invariant: set[int]) -> None:
        numbers = self.numbers
        if op.kind == "while":
            self._number_loop(op)
            return
        if op.kind in _TRANSPARENT:
            for result, operand in zip(op.results, op.operands, strict=True):
                numbers[result] = numbers[operand]
            return
        operands = tuple(numbers[v] for v in op.operands)
        if op.parent >= 0 and op.kind == "dynamic_slice":
            # The iteration's slice of a stack, whatever the order of iteration.
            stack = operands[0]
            key = ("slice", stack, op.attributes)
            numbers[op.results[0]] = self.stacked.get(stack, self.intern(key))
            return
        if op.body or op.kind in ("custom_call", "rng"):
            for result in op.results:
                numbers[result] = self.fresh()
            return
        for index, result in enumerate(op.results):
            shape = self.program.values[result].shape
            key = (op.name, op.attributes, operands, shape, index)
            numbers[result] = self.intern(key)

    def _number_loop(self, op: Op) -> None:
        body_args = op.entries[len(op.operands) :]
        for arg, yielded, operand, result in zip(
            body_args, op.yields, op.operands, op.results, strict=True
        ):
            if arg == yielded:
                self.numbers[result] = self.numbers[operand]
                continue
            self.numbers[result] = number = self.fresh()
            producer = self.program.values[yielded].producer
            if producer < 0:
                continue
            update = self.program.ops[producer]
            if update.kind == "dynamic_update_slice" and update.operands[0] == arg:
                self.stacked[number] = self.numbers[update.operands[1]]

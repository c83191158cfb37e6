"""The classic strategies, as choices for any program.

None of them knows a model. A mesh axis gets a *role*, and the role walks through the
blocks in program order:

``data``
    Shards what came from the batch: the first dim of the data among the arguments
    (:func:`data_arguments`), followed through the program by the ops' own factors.
``tensor``
    Shards weights: a contraction with a weight is split along the weight's own
    factor (by columns) unless its input arrives sharded along the contracted
    factor, which is then split (by rows, with a reduction at the exit); other
    contractions go along with their inputs. Megatron-LM, arXiv 1909.08053.
``sequence``
    The same, but reductions scatter to the second dim of the activations instead of
    replicating them. Megatron's sequence parallelism, arXiv 2205.05198.
``expert``
    ``data``, except where weights have a batch factor of their own (one matrix per
    expert), which is then sharded. GShard, arXiv 2006.16668.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from cfp.analysis.blocks import Block
from cfp.analysis.layout import Choice, Frame, Storage
from cfp.analysis.strategies import NONE, AxisChoice, Strategy, axis_choices
from cfp.program.graph import Op, Program
from cfp.program.rules import Rule

ROLES = ("data", "tensor", "sequence", "expert")

# The classics that need no axis of their own: what every axis does, and the storage.
CLASSICS = {
    "data_parallel": ("data", Storage.USED),
    "zero1": ("data", Storage.OPTIMIZER),
    "fully_sharded": ("data", Storage.SHARDED),
    "tensor_parallel": ("tensor", Storage.USED),
    "tensor_sequence_parallel": ("sequence", Storage.USED),
    "expert_parallel": ("expert", Storage.USED),
}


def presets(frame: Frame) -> dict[str, Choice]:
    """Every classic that makes sense for a program on its mesh, by name.

    Classics that come out equal to an earlier one (experts in a program without
    any) are left out.
    """
    found: dict[str, Choice] = {}
    walks = _Walks(frame)
    for name, (role, storage) in CLASSICS.items():
        roles = (role,) * len(frame.mesh)
        _add(found, name, walks.preset(roles, storage))
    if len(frame.mesh) > 1:
        for roles in product(ROLES, repeat=len(frame.mesh)):
            if len(set(roles)) == 1:
                continue
            for storage, suffix in ((Storage.USED, ""), (Storage.SHARDED, "+sharded")):
                pairs = zip(frame.mesh, roles, strict=True)
                name = ",".join(f"{axis}={role}" for (axis, _), role in pairs)
                _add(found, name + suffix, walks.preset(roles, storage))
    return found


def _add(found: dict[str, Choice], name: str, choice: Choice) -> None:
    if choice not in found.values():
        found[name] = choice


def preset(frame: Frame, roles: Sequence[str], storage: Storage) -> Choice:
    """The choice in which each mesh axis plays one role.

    Args:
        frame: the program on its mesh.
        roles: one of :data:`ROLES` for each mesh axis.
        storage: how every storage group is kept.
    """
    return _Walks(frame).preset(roles, storage)


class _Walks:
    """Walks through one program; what is known already is not walked again."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._weight = _weights(frame)
        self._known: dict[tuple[str, int], list[AxisChoice]] = {}

    def preset(self, roles: Sequence[str], storage: Storage) -> Choice:
        """The choice in which each mesh axis plays one role."""
        frame = self._frame
        columns = [
            self._column(role, size)
            for (_, size), role in zip(frame.mesh, roles, strict=True)
        ]
        strategies = tuple(
            _compatible(frame, block, tuple(column[block.index] for column in columns))
            for block in frame.blocks
        )
        return Choice(strategies, (storage,) * len(frame.groups))

    def _column(self, role: str, axis_size: int) -> list[AxisChoice]:
        key = (role, axis_size)
        if key not in self._known:
            self._known[key] = _Walk(self._frame, *key, self._weight).run()
        return self._known[key]


def _compatible(frame: Frame, block: Block, strategy: Strategy) -> Strategy:
    """Drops the later of two axes that do not split a factor together."""
    rule = frame.program.ops[block.anchor].rule
    assert rule is not None
    split: dict[int, int] = {}
    kept = []
    for (_, size), choice in zip(frame.mesh, strategy, strict=True):
        factors = {f for f in (choice.inner, choice.exit) if f != NONE}
        if not all(rule.splits(f, split.get(f, 1) * size) for f in factors):
            kept.append(AxisChoice())
            continue
        for f in factors:
            split[f] = split.get(f, 1) * size
        kept.append(choice)
    return tuple(kept)


class _Walk:
    """One axis's way through a program: which dims it has sharded so far."""

    def __init__(
        self, frame: Frame, role: str, axis_size: int, weight: Sequence[bool]
    ) -> None:
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; the roles are {', '.join(ROLES)}")
        self.frame = frame
        self.program = frame.program
        self.role = role
        self.size = axis_size
        self.marked: dict[int, set[int]] = {}  # value id -> dims that carry the axis
        self.weight = weight  # for each value id: made of parameters alone

    def run(self) -> list[AxisChoice]:
        program = self.program
        choices = [AxisChoice()] * len(self.frame.blocks)
        anchors = {b.anchor: b.index for b in self.frame.blocks}
        if self.role in ("data", "expert"):
            for position in data_arguments(self.frame):
                self.marked[program.args[position]] = {0}
        for op in program.ops:
            for entry in op.entries:
                self._follow_entry(entry)
            for v in op.operands:
                self._follow_entry(v)
            if op.id in anchors:
                choice = self._choose(op)
                choices[anchors[op.id]] = choice
                self._mark_result(op, choice)
            elif op.has_regions:
                for result, value in zip(op.results, op.yields, strict=False):
                    self.marked[result] = set(self.marked.get(value, ()))
            elif op.rule is not None:
                self._pass_on(op, op.rule)
        return choices

    def _follow_entry(self, value: int) -> None:
        origin = self.program.values[value].origin
        if origin >= 0 and value not in self.marked:
            self.marked[value] = set(self.marked.get(origin, ()))

    def _factors_of(self, op: Op, rule: Rule, index: int) -> list[int]:
        """Factors of an operand's dims that carry the axis."""
        marked = self.marked.get(op.operands[index], ())
        majors = [rule.major(dim) for dim in rule.operands[index]]
        return [f for d, f in enumerate(majors) if f is not None and d in marked]

    def _pass_on(self, op: Op, rule: Rule) -> None:
        carried = {
            f for i in range(len(rule.operands)) for f in self._factors_of(op, rule, i)
        }
        self._mark(op, rule, carried - rule.reduction - rule.fixed)

    def _mark(self, op: Op, rule: Rule, factors: set[int]) -> None:
        for result, dims in zip(op.results, rule.results, strict=False):
            found = {d for d, dim in enumerate(dims) if rule.major(dim) in factors}
            if found:
                self.marked[result] = {min(found)}

    def _mark_result(self, op: Op, choice: AxisChoice) -> None:
        rule = op.rule
        assert rule is not None
        outer = choice.inner if choice.exit == NONE else choice.exit
        if outer != NONE:
            self._mark(op, rule, {outer})

    def _choose(self, op: Op) -> AxisChoice:
        rule = op.rule
        assert rule is not None
        allowed = axis_choices(rule, self.size)
        wish = self._wish(op, rule)
        return next((c for c in wish if c in allowed), AxisChoice())

    def _wish(self, op: Op, rule: Rule) -> list[AxisChoice]:
        """What the role would have this block do, best first."""
        in_result = [f for f in map(rule.major, rule.results[0]) if f is not None]
        weights = [i for i, v in enumerate(op.operands) if self.weight[v]]
        own = {
            i: {rule.major(dim) for dim in dims} - {None}
            for i, dims in enumerate(rule.operands)
        }
        arriving = [
            f
            for i in range(len(rule.operands))
            if i not in weights
            for f in self._factors_of(op, rule, i)
        ]
        if self.role == "expert":
            shared = [
                f
                for f in in_result
                if weights and all(f in own[i] for i in range(min(2, len(own))))
            ]
            if shared:
                return [AxisChoice(f) for f in shared]
        if self.role in ("data", "expert"):
            return [AxisChoice(f) for f in in_result if f in arriving]
        contracted = [f for f in arriving if f in rule.reduction]
        if contracted:
            return self._reduced(rule, contracted[0], in_result)
        if not weights or len(weights) == len(rule.operands):
            return [AxisChoice(f) for f in in_result if f in arriving]
        if op.kind == "gather":
            table = [f for f in sorted(rule.reduction) if f in own[0]]
            return [c for f in table for c in self._reduced(rule, f, in_result)]
        others = set().union(*(own[i] for i in own if i not in weights))
        columns = [f for f in in_result if f not in others]
        return [AxisChoice(f) for f in columns]

    def _reduced(
        self, rule: Rule, factor: int, in_result: list[int]
    ) -> list[AxisChoice]:
        plain = AxisChoice(factor)
        if self.role == "sequence" and len(in_result) > 1:
            return [AxisChoice(factor, in_result[1]), plain]
        return [plain]


def data_arguments(frame: Frame) -> list[int]:
    """Positions of the arguments that hold a batch, as far as structure tells.

    State is no data, nor is anything that is passed along with it in one argument.
    Of the other arguments of the step those are data whose leaves agree in their
    first dim, as the leaves of a batch do and those of a set of weights do not. Where
    nothing is state, the argument with the most leaves holds the weights.
    """
    program = frame.program
    roots: dict[str, list[int]] = {}
    for position, name in enumerate(program.arg_names):
        roots.setdefault(name.partition("/")[0], []).append(position)
    held = {program.arg_names[p].partition("/")[0] for p in frame.group_of_arg}
    if not held and len(roots) > 1:
        largest = max(roots, key=lambda root: len(roots[root]))
        held = {largest} if len(roots[largest]) > 1 else set()
    found = []
    for root, positions in roots.items():
        shapes = {p: program.values[program.args[p]].shape for p in positions}
        leading = {shape[0] for shape in shapes.values() if shape}
        if root not in held and len(leading) == 1:
            found.extend(p for p, shape in shapes.items() if shape)
    return found


def _weights(frame: Frame) -> list[bool]:
    """For each value whether it is made of parameters alone."""
    program: Program = frame.program
    state = [False] * len(program.values)
    data = set(data_arguments(frame))
    for position, value in enumerate(program.args):
        state[value] = position not in data
    for op in program.ops:
        for v in (*op.operands, *op.entries):
            origin = program.values[v].origin
            if origin >= 0:
                state[v] = state[origin]
        # A number, such as that of an iteration, makes no weight into anything else.
        reads = [
            v
            for v in op.operands
            if program.values[v].shape
            and program.values[v].producer not in program.leaf_ops
        ]
        only = bool(reads) and all(state[v] for v in reads) and not op.has_regions
        for result in op.results:
            state[result] = only
    return state

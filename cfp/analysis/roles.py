"""Roles of a mesh axis: its strategy in every block of a program.

No role knows a model. A walk visits the ops in program order, and marks the dims that
the axis has sharded so far:

``data``
    Shards the batch (:func:`data_arguments`), values that ops make of it, and values
    that they combine with its rows. Rows that the step draws at random and multiplies
    with weights are a batch, too. A contraction that sums over the batch is split along
    it. A batch cut into parts is split by parts, or else by rows of a part. If a loop
    slices the batch's first dim, the walk is repeated with the next dim. The walk that
    splits most FLOPs counts.
``tensor``
    Shards weights (Megatron-LM, arXiv 1909.08053). A contraction with a weight is split
    along the weight's columns. If its input arrives sharded along the contracted
    factor, it is split by rows instead, with a reduction. Other contractions follow
    their inputs. If these are sharded differently, a batch factor wins, as for keys and
    values with fewer heads than devices.
``sequence``
    ``tensor`` with reductions that scatter to the second dim of activations. Megatron's
    sequence parallelism, arXiv 2205.05198.
``expert``
    ``data``, but weights with a batch factor (one matrix per expert) are sharded along
    it. GShard, arXiv 2006.16668.

At each block the role has a list of choices. The axis takes the first that its size
allows, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache

from cfp.analysis.contractions import DimClasses, is_contraction
from cfp.analysis.layout import Frame
from cfp.analysis.storage import is_gradient
from cfp.analysis.strategies import NONE, AxisChoice, axis_choices
from cfp.program.graph import Op, Value, op_flops, reached, searched_once
from cfp.program.rules import Rule

ROLES = ("data", "tensor", "sequence", "expert")

# {dim or factor that an axis may shard: rank}. Of the dims that an op can split, the
# axis takes one of the lowest rank. Only dims from the batch have ranks over 0.
Ranks = Mapping[int, int]
_NOTHING: Ranks = {}


@searched_once
def axis_walk(
    frame: Frame, role: str, axis_size: int, dim: int = 0
) -> Sequence[AxisChoice]:
    """Returns the choice of an axis of this size in each block, under a role.

    Args:
        dim: dim of the batch's arguments that ``data`` and ``expert`` shard first: 1
            spreads the tokens of sequences.

    Raises:
        ValueError: the role is unknown.
    """
    if role not in ROLES:
        raise ValueError(f"There is no role {role!r}. Give one of {', '.join(ROLES)}.")
    if role == "expert" and not has_experts(frame):
        return axis_walk(frame, "data", axis_size, dim)
    if role in ("tensor", "sequence"):
        whole: frozenset[int] = frozenset()
        while True:
            walk = _Walk(frame, role, axis_size, {}, whole)
            if walk.unfit <= whole:
                return walk.choices
            whole |= walk.unfit
    program, ranks = frame.program, data_arguments(frame)
    shapes = {p: program.shape(program.args[p]) for p in ranks}
    first = {p: min(dim, len(shapes[p]) - 1) for p in ranks}
    drawn = {v: {d: 0} for v, d in _drawn_rows(frame, dim).items()}
    best: list[AxisChoice] = []
    most_flops = -1
    while True:
        batch = {program.args[p]: {first[p]: rank} for p, rank in ranks.items()}
        walk = _settled(frame, role, axis_size, _together(batch, drawn))
        # The loop that slices the batch may be all of the step, or little of it.
        if (flops := walk.shared_flops()) > most_flops:
            best, most_flops = walk.choices, flops
        taken = {
            p: dim + 1
            for p, dim in first.items()
            if shapes[p][dim] in walk.taken and dim + 1 < len(shapes[p])
        }
        if not taken:
            return best
        first |= taken


def batch_rows(frame: Frame, samples: int) -> int:
    """Returns the rows that data parallelism shards: all samples, or a microbatch's.

    Of the sizes that divide `samples`, the one with the most FLOPs counts; if blocks
    have other rows only, such as all tokens, `samples`. 0 if no block is split.
    """
    rows = Counter[int]()
    for ways in (*(size for _, size in frame.mesh), 1):
        if ways == 1 and any(rows.values()):
            break
        walk = axis_walk(frame, "data", ways)
        for block, choice in zip(frame.blocks, walk, strict=True):
            if choice.inner != NONE:
                op = frame.program.ops[block.anchor]
                size = op.known_rule.sizes[choice.inner]
                fits = samples % size == 0
                rows[size if fits else samples] += fits * op_flops(frame.program, op)
    return max(rows, key=lambda size: rows[size], default=0)


@searched_once
def _drawn_rows(frame: Frame, dim: int) -> dict[int, int]:
    """Returns {value: `dim` or its last dim} for values that the step draws randomly.

    Examples are a generator's noise and indices into a replay buffer. They come from
    random keys, scalars and weights, without data. A product with weights or a lookup
    reads them.
    """
    program, weight = frame.program, made_of_parameters(frame)
    anchors = {block.anchor for block in frame.blocks}
    leaves = program.leaf_ops
    drawn = [False] * len(program.values)
    for value in program.args:
        drawn[value] = is_key(program.values[value])
    found: dict[int, int] = {}
    for op in program.ops:
        for v in op.operands:
            for outside, inside in program.entered(v):
                drawn[inside] = drawn[outside]
        if op.id in anchors:
            rule = op.known_rule
            if op.kind == "gather" or any(weight[v] for v in op.operands):
                for v, dims in zip(op.operands, rule.operands, strict=False):
                    place = min(dim, len(dims) - 1)
                    if drawn[v] and dims and rule.major(dims[place]) in in_result(rule):
                        found[v] = place
            continue
        reads = [v for v in op.operands if program.values[v].producer not in leaves]
        others = [v for v in reads if program.shape(v) and not drawn[v]]
        made = any(drawn[v] for v in reads) and all(weight[v] for v in others)
        for result in op.results:
            drawn[result] = made or (not others and is_key(program.values[result]))
    return found


def _settled(frame: Frame, role: str, size: int, marks: Mapping[int, Ranks]) -> _Walk:
    """Returns a walk repeated with `carried` and `joining` marks until none is new."""
    known: Mapping[int, Ranks] = {}
    while True:
        walk = _Walk(frame, role, size, _together(marks, known))
        found = _together(known, walk.carried(), walk.joining())
        # Marks are only added, and ranks only fall, so that the loop ends.
        if found == known:
            return walk
        known = found


def has_experts(frame: Frame) -> bool:
    """True if a block multiplies by a weight with a batch dim, such as experts."""
    weight, ops = made_of_parameters(frame), frame.program.ops
    anchors = [ops[block.anchor] for block in frame.blocks]
    rules = [op.rule for op in anchors if any(weight[v] for v in op.operands)]
    return any(rule is not None and shared_factors(rule) for rule in rules)


def _together(*many: Mapping[int, Ranks]) -> dict[int, Ranks]:
    """Merges marks, {value: {dim: rank}}; each dim has its lowest rank."""
    found: dict[int, dict[int, int]] = {}
    for marks in many:
        for value, ranks in marks.items():
            mine = found.setdefault(value, {})
            for d, rank in ranks.items():
                mine[d] = min(rank, mine.get(d, rank))
    return dict(found)


@searched_once
def _computed(frame: Frame) -> set[int]:
    """Returns values that blocks' anchors make, and all values computed from them."""
    anchors = {block.anchor for block in frame.blocks}
    program = frame.program
    found: set[int] = set()
    for op in program.ops:
        reads = {*op.reads}
        reads |= {outside for v in op.reads for outside, _ in program.entered(v)}
        if op.id in anchors or found & reads:
            found.update(op.results)
    return found


class _Walk:
    """One axis's walk through a program, with the dims that it has sharded so far.

    Attributes:
        weight: result of `made_of_parameters`.
        computed: values that blocks' anchors make, and all values computed from them.
        choices: the axis's choice in each block.
        marked: {canonical value: {dim that the axis may shard: rank}}.
        taken: sizes of marked dims that loops slice, with no marked dim left.
        by_minor: anchors with weights sharded along other than their major columns.
        unfit: anchors in `by_minor` whose results a later contraction needs in another
            sharding.
    """

    def __init__(
        self,
        frame: Frame,
        role: str,
        size: int,
        marks: Mapping[int, Ranks],
        whole: frozenset[int] = frozenset(),
    ) -> None:
        """Walks from marked values; weights of anchors in `whole` are not sharded."""
        self.frame, self.program, self.role = frame, frame.program, role
        self.weight, self.computed = made_of_parameters(frame), _computed(frame)
        self.size, self.follows_batch = size, role in ("data", "expert")
        self.same = frame.canonical
        self.marked: dict[int, Ranks] = {}
        for value, ranks in marks.items():
            self._note(value, ranks)
        self.taken: set[int] = set()
        self.whole, self.unfit, self.by_minor = whole, set[int](), set[int]()
        self.anchors = {b.anchor: b.index for b in self.frame.blocks}
        self.choices = self._run()

    def shared_flops(self) -> int:
        """Counts all FLOPs of the anchor contractions that the axis splits."""
        anchors = (self.program.ops[block.anchor] for block in self.frame.blocks)
        return sum(
            op_flops(self.program, op)
            for op, choice in zip(anchors, self.choices, strict=True)
            if choice.inner != NONE and is_contraction(op)
        )

    def _run(self) -> list[AxisChoice]:
        program = self.program
        choices = [AxisChoice()] * len(self.frame.blocks)
        for op in program.ops:
            if op.id in self.anchors:
                choice = _first(op.known_rule, self._wish(op), self.size)
                choices[self.anchors[op.id]] = choice
                self._mark_result(op, choice)
            elif op.rule is not None:
                if any(map(self._marks, op.operands)):
                    self._mark(op, op.rule, self._carried(op, op.rule))
            elif self.follows_batch and not op.has_regions:
                self._mark_by_place(op)
        return choices

    def carried(self) -> dict[int, Ranks]:
        """Returns marks of values at loops, branches and barriers, by `canonical`."""
        carried = {*self.same.values()}
        return {v: ranks for v, ranks in self.marked.items() if v in carried}

    def joining(self) -> dict[int, Ranks]:
        """Returns rank-0 marks of unmarked operands along a result's rank-0 dims."""
        found: dict[int, Ranks] = {}
        for op in reversed(self.program.ops):
            if op.rule is None or self.computed.isdisjoint(op.results):
                continue
            same = (self.same.get(r, r) for r in op.results)
            results = [found.get(r) or self._marks(r) for r in same]
            rows = {
                op.rule.major(dims[d])
                for marks, dims in zip(results, op.rule.results, strict=False)
                for d, rank in marks.items()
                if rank == 0
            } - {None}
            for v, dims in zip(op.operands, op.rule.operands, strict=False):
                if not rows or self._marks(v):
                    continue
                majors = map(op.rule.major, dims)
                if marks := {d: 0 for d, f in enumerate(majors) if f in rows}:
                    found[self.same.get(v, v)] = marks
        return found

    def _marks(self, value: int) -> Ranks:
        return self.marked.get(self.same.get(value, value), _NOTHING)

    def _note(self, value: int, ranks: Ranks) -> None:
        """Marks dims; ``data``, ``expert`` keep a carried value's earlier marks."""
        one = self.same.get(value, value)
        if self.follows_batch and value in self.same:
            ranks = _together({one: self._marks(one)}, {one: ranks})[one]
        self.marked[one] = ranks

    def _carried(self, op: Op, rule: Rule) -> Ranks:
        """Returns {factor: rank} of operands' marked factors that results can have."""
        found: dict[int, int] = {}
        for i in range(len(rule.operands)):
            for f, rank in self._arriving(op, rule, i).items():
                if f not in rule.reduction:
                    found[f] = min(rank, found.get(f, rank))
        if self.follows_batch:
            return found
        return {f: rank for f, rank in found.items() if f not in rule.closed}

    def _summed(self, op: Op, rule: Rule) -> Ranks:
        """Returns {factor: rank} of summed factors that all operands with them mark."""
        if not is_contraction(op):
            return _NOTHING
        arriving = [self._arriving(op, rule, i) for i in range(len(rule.operands))]
        found: dict[int, int] = {}
        for factor in rule.reduction:
            holders = [
                ranks
                for ranks, dims in zip(arriving, rule.operands, strict=True)
                if any(factor in dim for dim in dims)
            ]
            if holders and all(factor in ranks for ranks in holders):
                found[factor] = min(ranks[factor] for ranks in holders)
        return found

    def _arriving(self, op: Op, rule: Rule, index: int) -> dict[int, int]:
        """Returns {factor: rank} of an operand's marked dims; minor ones rank later."""
        dims = rule.operands[index]
        found: dict[int, int] = {}
        for d, rank in self._marks(op.operands[index]).items():
            if d < len(dims):
                factors = [f for f in dims[d] if rule.sizes[f] > 1]
                found |= {f: rank + i for i, f in enumerate(factors)}
        return found

    def _mark(self, op: Op, rule: Rule, carried: Ranks) -> None:
        for result, dims in zip(op.results, rule.results, strict=False):
            found: dict[int, int] = {}
            for d, dim in enumerate(dims):
                factors = dim if self.follows_batch else (rule.major(dim),)
                ranks = [carried[f] for f in factors if f is not None and f in carried]
                if ranks and self.program.shape(result)[d] > 1:
                    found[d] = min(ranks)
            if not self.follows_batch:
                found = {d: 0 for d in sorted(found)[:1]}
            if found:
                self._note(result, found)
            elif carried and op.kind == "dynamic_slice" and op.parent >= 0:
                marks = self._marks(op.operands[0])
                shape = self.program.shape(op.operands[0])
                self.taken |= {shape[d] for d in marks}

    def _mark_by_place(self, op: Op) -> None:
        """Copies operands' marks to equal dims at equal places of unmarked results."""
        values = self.program.values
        for v in op.operands:
            for result in op.results:
                pairs = zip(values[v].shape, values[result].shape, strict=False)
                same = {d for d, (a, b) in enumerate(pairs) if a == b > 1}
                found = {d: rank for d, rank in self._marks(v).items() if d in same}
                if found and not self._marks(result):
                    self._note(result, found)

    def _mark_result(self, op: Op, choice: AxisChoice) -> None:
        rule = op.known_rule
        outer = choice.inner if choice.exit == NONE else choice.exit
        if choice.inner == NONE and not self.follows_batch:
            # With fewer groups of heads than devices, for example, a merged dim splits.
            outer = self._common_factor(op, rule, [])
        carried = self._carried(op, rule) if self.follows_batch else _NOTHING
        is_known = outer in carried or outer == NONE
        self._mark(op, rule, carried if is_known else {outer: 0})

    def _wish(self, op: Op) -> list[AxisChoice]:
        """Returns the choices that the role prefers for this block, best first."""
        rule, kept = op.known_rule, in_result(op.known_rule)
        weights = [i for i, v in enumerate(op.operands) if self.weight[v]]
        own = own_factors(rule)
        if self.role == "expert" and weights and (shared := shared_factors(rule)):
            return [AxisChoice(f) for f in shared]
        if self.follows_batch:
            if op.kind == "gather" and self._is_whole(op.operands[0]):
                return []
            carried = self._carried(op, rule)
            found = {f: carried[f] for f in kept if f in carried}
            found = found or self._summed(op, rule)
            return [AxisChoice(f) for f in sorted(found, key=lambda f: found[f])]
        arriving = [
            f
            for i in range(len(rule.operands))
            if i not in weights
            for f in self._arriving(op, rule, i)
        ]
        common = self._common_factor(op, rule, kept)
        if common != NONE:
            for index, value in enumerate(op.operands):
                if common not in self._arriving(op, rule, index):
                    self.unfit |= self._makers(value) & self.by_minor
            return [AxisChoice(common)]
        contracted = [f for f in arriving if f in rule.reduction]
        if contracted:
            return self._reduced(contracted[0], kept)
        if not weights or len(weights) == len(rule.operands):
            return [AxisChoice(f) for f in kept if f in arriving]
        if op.kind == "gather":
            table = [f for f in sorted(rule.reduction) if f in own[0]]
            return [c for f in table for c in self._reduced(f, kept)]
        others = set[int | None]().union(
            *(factors for i, factors in enumerate(own) if i not in weights)
        )
        columns = [f for f in kept if f not in others]
        if op.id in self.whole:
            return []
        wishes = [AxisChoice(f) for f in columns]
        major = wishes[0] if len(wishes) > 1 else AxisChoice()
        if _first(rule, wishes, self.size) not in (major, AxisChoice()):
            self.by_minor.add(op.id)
        return wishes

    def _common_factor(self, op: Op, rule: Rule, kept: list[int]) -> int:
        """Returns the factor that splits a contraction without weights; -1 if none.

        It is a batch factor that an operand has marked, if the axis splits it alone or
        with a minor one. Otherwise, if an operand may stay whole, it is a marked factor
        of another, in `kept`. Other ops have none, nor have contractions with weights.
        """
        if any(self.weight[v] for v in op.operands) or not is_contraction(op):
            return NONE
        arriving = [self._arriving(op, rule, i) for i in range(len(rule.operands))]
        for factor in shared_factors(rule):
            if any(factor in ranks for ranks in arriving):
                own, size = rule.sizes[factor], self.size
                is_split = AxisChoice(factor) in _allowed(rule, size)
                if is_split or (1 < own < size and size % own == 0):
                    return factor
        gives_way = [
            bool(ranks and self._makers(value) & self.by_minor)
            for value, ranks in zip(op.operands, arriving, strict=False)
        ]
        if all(gives_way):  # A summed factor would need a reduction.
            gives_way = [bool(rule.reduction & ranks.keys()) for ranks in arriving]
        firm = (
            factor
            for ranks, gives in zip(arriving, gives_way, strict=False)
            for factor in ranks
            if not gives and factor in kept
        )
        return next(firm, NONE) if any(gives_way) else NONE

    def _makers(self, value: int) -> set[int]:
        """Op ids of a value's nearest upstream anchors; enters no loop or branch."""

        def before(v: int) -> Iterable[int]:
            made = self.program.maker(v)
            if made is None or made.id in self.anchors:
                return ()
            return filter(self.computed.__contains__, made.operands)

        makers = filter(None, map(self.program.maker, reached([value], before)))
        return {op.id for op in makers} & self.anchors.keys()

    def _is_whole(self, value: int) -> bool:
        """True for a computed value without marks, which all devices have whole."""
        is_made = value in self.computed and not self.weight[value]
        return is_made and not self._marks(value)

    def _reduced(self, factor: int, kept: list[int]) -> list[AxisChoice]:
        plain = AxisChoice(factor)
        if self.role == "sequence" and len(kept) > 1:
            return [AxisChoice(factor, kept[1]), plain]
        return [plain]


def _first(rule: Rule, wish: Sequence[AxisChoice], size: int) -> AxisChoice:
    allowed = _allowed(rule, size)
    return next((choice for choice in wish if choice in allowed), AxisChoice())


@lru_cache(maxsize=4096)  # Equal layers have equal rules.
def _allowed(rule: Rule, size: int) -> frozenset[AxisChoice]:
    return frozenset(axis_choices(rule, size))


def in_result(rule: Rule) -> list[int]:
    """Returns major factors of the first result's dims, in order; no dims of size 1."""
    return [f for f in map(rule.major, rule.results[0]) if f is not None]


def own_factors(rule: Rule) -> list[set[int | None]]:
    """Returns for each operand the set of its dims' major factors."""
    return [{*map(rule.major, dims)} - {None} for dims in rule.operands]


def shared_factors(rule: Rule) -> list[int]:
    """Returns batch factors of a contraction: in the result and first two operands."""
    own = own_factors(rule)[:2]
    return [f for f in in_result(rule) if all(f in factors for factors in own)]


# ------------------------------------------------------- purposes of a step's arguments

# Element types that a batch may have (labels, tokens, masks), and weights do not.
_COUNTED = ("i32", "i64", "i1")

# Last dims of JAX's random keys, as 32-bit numbers.
_KEY_SIZES = ((2,), (4,))

# Ops that give a scalar the shape and dtype of another operand.
_SHAPING = ("broadcast_in_dim", "reshape", "convert")


@searched_once
def data_arguments(frame: Frame) -> dict[int, int]:
    """Returns {leaf's position: rank of its first dim} for arguments with a batch.

    Each argument of the step, a tree of leaves, is judged by structure:

    - An argument with state that the step changes is no data. Without such, of several
      arguments the one with the most leaves (two or more) holds the weights.
    - Other arguments are data if their leaves agree in their first dim, or if some are
      int32, int64 or bool (a graph's nodes and edges, tokens, masks).
    - An argument returned unchanged is data if its leaves agree in their first dim,
      also with other data, if any.
    - If nothing is data, but other arguments exist, state is data whose leaves agree in
      their first dim, such as a search's beams.
    - If there is still none, untrained state with rows is data: :func:`_rows_of_state`.

    The rank is 0 for the first dim that most leaves of an argument have, 1 for others.
    Scalars and random keys are left out.
    """
    program = frame.program
    root_of = [name.partition("/")[0] for name in program.arg_names]
    roots: dict[str, list[int]] = {}
    for position, root in enumerate(root_of):
        roots.setdefault(root, []).append(position)
    held = {root_of[p] for p in frame.group_of_arg.keys() - _handed_back(frame)}
    unsure = {root_of[p] for p in frame.group_of_arg} - held
    if not held and len(roots) > 1:
        largest = max(roots, key=lambda root: len(roots[root]))
        held = {largest} if len(roots[largest]) > 1 else set()
    found, carried, same, sizes, others = {}, {}, {}, set[int](), False
    for root, positions in roots.items():
        values = {p: program.values[program.args[p]] for p in positions}
        values = {p: v for p, v in values.items() if v.shape and not is_key(v)}
        leading = {p: v.shape[0] for p, v in values.items()}
        counted = any(v.dtype in _COUNTED for v in values.values())
        alike = len({*leading.values()}) == 1
        if root in held:
            carried |= dict.fromkeys(leading if alike else (), 0)
            continue
        others = others or bool(leading)
        if root in unsure:
            same |= leading if alike else {}
            continue
        if not leading or not (alike or counted):
            continue
        ((usual, _),) = Counter(leading.values()).most_common(1)
        found |= {p: int(size != usual) for p, size in leading.items()}
        sizes.add(usual)
    found |= {p: 0 for p, size in same.items() if not sizes or size in sizes}
    return found or (carried if others else {}) or _rows_of_state(frame)


def _rows_of_state(frame: Frame) -> dict[int, int]:
    """Returns {position: 0} for state with rows, such as a policy's environments.

    Trained state (parameters, an optimizer's moments) has gradients in its update, and
    no rows. Other state has rows if its first dim is a dim of products, and no dim of
    trained state or other arguments. Of several such dims, most FLOPs decide.
    """
    program, outputs = frame.program, {*frame.program.outputs}
    trained = {
        position
        for group in frame.groups
        if any(is_gradient(program, v, outputs) for v in group.gradients)
        for position in group.args
    }
    classes = DimClasses(
        program, range(len(program.ops)), (), frame.canonical, axis_size=2
    )
    constant = _handed_back(frame)
    first: dict[Hashable, list[int]] = {}
    others: set[Hashable] = set()
    for position, value in enumerate(program.args):
        record = program.values[value]
        if is_key(record):
            continue
        is_row = position in frame.group_of_arg and position not in constant
        for dim in range(len(record.shape)):
            found = classes.of_dim(value, dim)
            if not is_row or position in trained:
                others.add(found)
            elif not dim:
                first.setdefault(found, []).append(position)
    flops = Counter[Hashable]()
    for op in filter(is_contraction, program.ops):
        factors = range(len(op.rule.sizes)) if op.rule is not None else ()
        for one in {classes.of_factor(op.id, factor) for factor in factors}:
            flops[one] += op_flops(program, op)
    rows = [one for one in first if one not in others and flops[one]]
    best = max(rows, key=lambda one: flops[one], default=None)
    return dict.fromkeys(first[best], 0) if best is not None else {}


def _handed_back(frame: Frame) -> set[int]:
    """Returns positions of arguments whose storage group is returned unchanged."""
    program = frame.program

    def is_result(position: int) -> bool:
        output = frame.paired[position]
        return output is not None and program.outputs[output] == program.args[position]

    groups = (group.args for group in frame.groups)
    return {p for args in groups if all(map(is_result, args)) for p in args}


def is_key(value: Value) -> bool:
    """True for uint32 values with a last dim of 2 or 4, like raw random keys."""
    return value.dtype == "ui32" and value.shape[-1:] in _KEY_SIZES


@searched_once
def made_of_parameters(frame: Frame) -> list[bool]:
    """Returns by value id True if made of arguments other than data and keys.

    Constants and any scalars may be mixed in. False for results of loops and branches.
    """
    program = frame.program
    is_number = [not value.shape for value in program.values]
    state = [False] * len(program.values)
    data = data_arguments(frame)
    for position, value in enumerate(program.args):
        state[value] = position not in data and not is_key(program.values[value])
    for op in program.ops:
        for v in (*op.operands, *op.entries):
            for outside, inside in program.entered(v):
                state[inside] = state[outside]
        numbers = all(is_number[v] for v in op.operands)
        if op.kind in _SHAPING and numbers:
            is_number[op.results[0]] = True
        reads = [v for v in op.operands if not is_number[v] and not program.is_leaf(v)]
        only = bool(reads) and all(state[v] for v in reads) and not op.has_regions
        for result in op.results:
            state[result] = only
    return state

"""Adapts a plan to another program of the same segments, or to other devices.

The new program may have more layers, another batch, or a mesh with axes of the same
names and other sizes. Each segment copies the choices of one that looks like it: the
same blocks, in the same order, by name (numbers aside) and by op, with the same sizes
or one size scaled. Arguments of both programs must be sharded as before, but where
one of two numbers of devices divides them and the other does not. Nothing is compiled
or measured: `cfp verify` does that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import groupby
from typing import Any, Never

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis, analyze
from cfp.analysis.host_state import movable_state
from cfp.analysis.layout import Choice, Storage, lay_out
from cfp.analysis.segments import Segment
from cfp.analysis.storage import even_spec
from cfp.analysis.strategies import Mesh as StrategyMesh
from cfp.analysis.strategies import Spec, Strategy, block_strategies
from cfp.attention.matching.called import with_token_factors
from cfp.errors import PlanMismatch
from cfp.plan.compose import compose_plan
from cfp.plan.describe import axis_roles, op_text
from cfp.plan.figures import Figures
from cfp.plan.parts import (
    AxisRole,
    PlanRow,
    PlanSegment,
    roles_text,
    shape_of,
    type_text,
)
from cfp.plan.placing import mesh_here
from cfp.plan.plan import Plan
from cfp.profiling.key import environment_parts
from cfp.program.calling import check_keywords
from cfp.program.step import FlatStep, flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.race.programs import RaceOutcome
from cfp.solution import Candidate

_NUMBER = re.compile(r"\d+")
_SHAPE = re.compile(r"\[([\d,]*)\]")
_TRY = "the segments that were planned, more of them or with another batch; or cfp plan"

_Rows = tuple[PlanRow, ...]
_Roles = tuple[AxisRole, ...]


def adapt(
    plan: Plan,
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    **kwargs: Any,
) -> Plan:
    """The plan of one step, carried over to another, or to other devices.

    Args:
        plan: of the other step.
        fn: the step: more layers of the same kinds, or another batch size.
        args, kwargs: its arguments, as arrays or ``jax.ShapeDtypeStruct`` s.
        mesh: the devices, more or fewer of them, with axes of the plan's names; by
            default the plan's.
        static_argnums, static_argnames, donate_argnums, donate_argnames: as for
            :func:`cfp.plan`.

    Returns:
        A plan that nothing of was measured: its rung is "estimated".

    Raises:
        PlanMismatch: a segment or an argument does not match; the message names it.
        OptionError: there is a keyword that neither the step nor this function has.
    """
    check_keywords(fn, kwargs, _OPTIONS, "cfp.adapt")
    if mesh is not None:
        mesh = planning_mesh(mesh)
        check_axes(plan, mesh)
    else:
        mesh = plan.mesh or mesh_here(plan.mesh_axes, plan.environment)
    step = flatten_step(
        fn,
        args,
        kwargs,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )
    return adapt_step(plan, step, mesh)


def adapt_step(plan: Plan, step: FlatStep, mesh: Mesh) -> Plan:
    """Carries a plan over to a step over flat arguments; see :func:`adapt`.

    Raises:
        PlanMismatch: a segment or an argument does not match; the message names it.
    """
    mesh = planning_mesh(mesh)
    axes = tuple(mesh.shape.items())
    program, lowering = trace(step, mesh)
    analysis = analyze(with_token_factors(program), axes)
    if plan.in_host:
        step = step.with_state_in_host(_host_pairs(plan, analysis))
        program, lowering = trace(step, mesh)
        analysis = analyze(with_token_factors(program), axes)
    if not plan.rows:
        _refuse("The plan does not say what it does to each block.", "rows", "none")
    plan = _along(plan, analysis.frame.mesh)
    pairs = _paired(plan, analysis)
    if any(pair.scaled for pair in pairs):
        _check_state(plan, analysis, step)
    planned = _planned_arguments(plan, analysis)
    choice = _as_planned(analysis, _choice(plan, analysis, pairs), planned)
    winner = Candidate(
        name=plan.winner,
        choice=choice,
        predicted_ms=_predicted_ms(plan, analysis, pairs),
        level=plan.level,
        options=plan.options,
    )
    outcome = RaceOutcome(winner=winner, counts={"adapted": 1.0})
    environment = dict(environment_parts(list(mesh.devices.flat)))
    made = compose_plan(analysis, mesh, environment, outcome)
    made = made.bound_to(step, lowering.out_tree)
    named = {text.split(" (")[0] for text in made.uneven}
    whole = [
        f"{made.arg_names[i]} ({one.indivisible})"
        for i, one in planned.items()
        if not any(made.arg_specs[i]) and one.indivisible
        if made.arg_names[i] not in named
    ]
    uneven = (*made.uneven, *whole)
    return replace(made, rung="estimated", figures=Figures(), uneven=uneven)


_OPTIONS = tuple(signature(adapt).parameters)[3:-1]  # not plan, fn, args, kwargs


def _host_pairs(plan: Plan, analysis: Analysis) -> list[tuple[int, int]]:
    """State like what a plan keeps in the memory of the host: numbers may differ."""
    names = analysis.frame.program.arg_names
    forms = {_form(plan.arg_names[argument]) for argument, _ in plan.in_host}
    return [
        (one.argument, one.result)
        for one in movable_state(analysis.frame)
        if _form(names[one.argument]) in forms
    ]


def check_axes(plan: Plan, mesh: Mesh) -> None:
    """Refuses a mesh with other axes than a plan's; their sizes may be others, or one.

    Raises:
        PlanMismatch: an axis has another name, or there are more, or fewer.
    """
    planned = [name for name, _ in plan.mesh_axes]
    if not plan.has_names_of(mesh):
        axes = f"a mesh with the axes {', '.join(planned)}" if planned else "one device"
        raise PlanMismatch(
            "A plan is carried over along axes of the same names.",
            expected=axes,
            got=f"a mesh {dict(mesh.shape)}",
            attempt="such a mesh with as many devices as there are, or plan again"
            if planned
            else "plan again",
        )


def _along(plan: Plan, mesh: Sequence[tuple[str, int]]) -> Plan:
    """The plan without what it does along axes that a mesh has not, or of size one."""
    axes = dict(mesh)
    rows = tuple(
        replace(row, strategy=tuple(one for one in row.strategy if one.axis in axes))
        for row in plan.rows
    )
    specs = tuple(
        tuple(tuple(axis for axis in dim if axis in axes) for dim in spec)
        for spec in plan.arg_specs
    )
    kept = tuple((name, size) for name, size in plan.mesh_axes if name in axes)
    return replace(plan, rows=rows, arg_specs=specs, mesh_axes=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A segment of the new program, and the segment of a plan that it takes after.

    Attributes:
        rows: blocks of that.
        scaled: whether sizes differ.
    """

    segment: Segment
    old: PlanSegment
    rows: _Rows
    scaled: bool


def _paired(plan: Plan, analysis: Analysis) -> list[_Pair]:
    """For each segment the one of the plan that it takes after."""
    old: dict[Any, list[_Rows]] = {}
    for _, rows in groupby(plan.rows, key=lambda row: row.segment):
        found = tuple(rows)
        form = tuple((_form(row.name), _form_of_op(row.op)) for row in found)
        old.setdefault(form, []).append(found)
    new: dict[Any, list[Segment]] = {}
    for segment in analysis.segments:
        form = tuple(
            (_form(name), _form_of_op(op)) for name, op in _blocks(analysis, segment)
        )
        if form not in old:
            _refuse_segment(analysis, segment, old)
        new.setdefault(form, []).append(segment)
    missing = [rows for form, all_ in old.items() if form not in new for rows in all_]
    if missing:
        first = missing[0]
        _refuse(
            f"Segment {first[0].segment} of the plan is not in the step.",
            f"a segment like {first[0].name}: {first[0].op}",
            f"{len(analysis.segments)} segments, none of them like it",
        )
    ratios: dict[float, str] = {}
    pairs = {}
    for form, segments in new.items():
        for i, segment in enumerate(segments):
            rows = _after(old[form], i, len(segments))
            here = {
                ratio
                for row, (_, op) in zip(rows, _blocks(analysis, segment), strict=True)
                for ratio in _ratios(row.op, op)
            }
            ratios.update({ratio: rows[0].name for ratio in here})
            pairs[segment.index] = _Pair(
                segment=segment,
                old=plan.segments[rows[0].segment],
                rows=rows,
                scaled=bool(here),
            )
    if len(ratios) > 1:
        text = ", ".join(f"{ratio:g} times at {name}" for ratio, name in ratios.items())
        _refuse("More than one size differs from the plan.", "one, the batch", text)
    return [pairs[segment.index] for segment in analysis.segments]


def _check_state(plan: Plan, analysis: Analysis, step: FlatStep) -> None:
    """Refuses other sizes of what a step updates: another batch changes none.

    Types are the step's, as a plan has them: a key is no key in the program.
    """
    types = dict(zip(plan.arg_names, plan.arg_types, strict=True))
    for position in analysis.frame.group_of_arg:
        name, found = step.arg_names[position], type_text(step.avals[position])
        if types.get(name, found) != found:
            _refuse(
                f"The argument {name} is of another type. A plan is carried over to "
                "another batch, or to more layers, and what a step updates stays.",
                f"{name} as {types[name]}",
                found,
            )


def _after(old: Sequence[_Rows], i: int, count: int) -> _Rows:
    """Returns the old segment that the i-th of some equal new ones takes after.

    The first as the first, the last as the last, and what is more as the middle.
    """
    half = len(old) // 2
    if i < half:
        return old[i]
    behind = count - i
    return old[-behind] if behind < len(old) - half else old[half]


def _blocks(analysis: Analysis, segment: Segment) -> Iterator[tuple[str, str]]:
    """Name and anchor of each block of a segment, as a plan's rows have them."""
    program = analysis.frame.program
    for b in segment.blocks:
        block = analysis.frame.blocks[b]
        yield block.name, op_text(program, program.ops[block.anchor])


def _form(name: str) -> str:
    return _NUMBER.sub("#", name)


def _numbered(name: str) -> tuple[str, list[int]]:
    """Sort key: names of one form by their numbers, ``layer_9`` before ``layer_10``."""
    return _form(name), [int(number) for number in _NUMBER.findall(name)]


def _form_of_op(op: str) -> str:
    """An op with its types, without sizes: ``dot f32[,] x f32[,] -> f32[,]``."""
    return _SHAPE.sub(lambda found: f"[{',' * found[1].count(',')}]", op)


def _ratios(old: str, new: str) -> set[float]:
    """By how much the sizes of two ops of one form differ."""
    sizes = [
        [int(n) for shape in _SHAPE.findall(op) for n in shape.split(",") if n]
        for op in (old, new)
    ]
    return {b / a for a, b in zip(*sizes, strict=True) if a != b}


def _refuse_segment(
    analysis: Analysis, segment: Segment, old: Mapping[Any, Sequence[_Rows]]
) -> None:
    """Says where the closest segment of a plan begins to differ."""
    _refuse_more_layers(analysis, old)
    blocks = list(_blocks(analysis, segment))
    best, same = "no segment at all", -1
    for form in old:
        pairs = zip(form, blocks, strict=False)
        alike = [(_form(n), _form_of_op(op)) == known for known, (n, op) in pairs]
        count = alike.index(False) if False in alike else len(alike)
        if count > same:
            same = count
            rows = old[form][0]
            best = (
                f"{rows[count].name}: {rows[count].op}"
                if count < len(rows)
                else f"the end of a segment of {len(rows)} blocks"
            )
    got = ": ".join(blocks[min(same, len(blocks) - 1)])
    if same == len(blocks):
        got = f"a segment that ends after {len(blocks)} blocks, with {got}"
    _refuse(f"Segment {segment.index} of the step is none of the plan.", best, got)


def _refuse_more_layers(analysis: Analysis, old: Mapping[Any, Sequence[_Rows]]) -> None:
    """Refuses a plan of one segment, in which no layer repeats, for more layers."""
    planned = [rows for alike in old.values() for rows in alike]
    here = [op for s in analysis.segments for _, op in _blocks(analysis, s)]
    known = {_form_of_op(row.op) for rows in planned for row in rows}
    if len(planned) > 1 or len(here) <= len(planned[0]):
        return
    if known <= {*map(_form_of_op, here)}:
        raise PlanMismatch(
            "The plan is of one segment, in which no layer repeats: it does not say "
            "what more layers take after.",
            expected="a plan of a step with repeated layers, three or more",
            got=f"a plan of {len(planned[0])} blocks in 1 segment, and a step of "
            f"{len(here)} blocks",
            attempt="cfp plan for three layers or more, and --adapt with that plan; or "
            "cfp plan for this step",
        )


def _choice(plan: Plan, analysis: Analysis, pairs: Sequence[_Pair]) -> Choice:
    """The strategies and storage of all segments' models."""
    frame, names = analysis.frame, analysis.frame.program.arg_names
    modes = [one.storage for old in plan.segments for one in old.parameters]
    common = max(dict.fromkeys(modes), key=modes.count, default=Storage.USED)
    storage = [common] * len(frame.groups)
    strategies: dict[int, Strategy] = {}
    for pair in pairs:
        for b, row in zip(pair.segment.blocks, pair.rows, strict=True):
            strategies[b] = _strategy(plan, analysis, b, row)
        stored = [(plan.arg_names[p.argument], p.storage) for p in pair.old.parameters]
        own = [mode for _, mode in sorted(stored, key=lambda one: _numbered(one[0]))]
        groups = [(names[frame.groups[g].args[0]], g) for g in pair.segment.groups]
        groups = [g for _, g in sorted(groups, key=lambda one: _numbered(one[0]))]
        if len(own) != len(groups):
            own = [pair.old.storage or common] * len(groups)
        for group, mode in zip(groups, own, strict=True):
            storage[group] = mode
    if not frame.mesh:  # One device keeps all of each parameter.
        storage = [Storage.USED] * len(storage)
    return Choice(
        tuple(strategies[b] for b in range(len(frame.blocks))),
        tuple(storage),
        tuple(pair.segment.index for pair in pairs if pair.old.rematerialized),
        tuple(
            (pair.segment.index, pair.old.kernels) for pair in pairs if pair.old.kernels
        ),
    )


def _strategy(plan: Plan, analysis: Analysis, block: int, row: PlanRow) -> Strategy:
    """The strategy of a block that takes after a plan's: sizes may be others.

    On another number of devices it is as much of that as these divide.
    """
    frame = analysis.frame
    program, one = frame.program, frame.blocks[block]
    op = program.ops[one.anchor]
    strategies = {
        axis_roles(frame, op, strategy): strategy
        for strategy in reversed(block_strategies(program, one, frame.mesh))
    }
    if (found := strategies.get(row.strategy)) is not None:
        return found
    if frame.mesh != plan.mesh_axes:
        parts = [roles for roles in strategies if _is_part(roles, row.strategy)]
        return strategies[max(parts, key=lambda roles: _shared(roles, row.strategy))]
    _refuse(
        f"The choice for {row.name} cannot be carried over.",
        f"a block that can be sharded as {roles_text(row.strategy)}",
        op_text(program, op),
    )


def _is_part(roles: _Roles, planned: _Roles) -> bool:
    """True if roles shard nothing that planned ones do not; sums may stay whole."""
    return all(
        role in planned or (role.scattered_dim is None and role in _summed(planned))
        for role in roles
    )


def _shared(roles: _Roles, planned: _Roles) -> tuple[int, int]:
    """Ranks parts of planned roles: as many axes as can be, then as they were."""
    return len(roles), sum(role in planned for role in roles)


def _summed(roles: _Roles) -> _Roles:
    return tuple(replace(role, scattered_dim=None) for role in roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """An argument of both programs.

    Attributes:
        spec: its sharding in the plan.
        shape, mesh: its sizes there, and those of the devices.
        new_shape, new_mesh: the same of the new program.
    """

    spec: Spec
    shape: tuple[int, ...]
    mesh: StrategyMesh
    new_shape: tuple[int, ...]
    new_mesh: StrategyMesh

    def allows(self, spec: Spec) -> bool:
        """True for the planned sharding; others where it, or they, cannot be in both.

        Another batch alone must be divided as the planned one was.
        """
        if spec == self.spec or self.mesh == self.new_mesh:
            return spec == self.spec
        divided_before = even_spec(spec, self.shape, self.mesh) == spec
        return bool(self.indivisible) or not divided_before

    @property
    def indivisible(self) -> str:
        """The size that the new devices do not divide, ``10 over x=4``; or ""."""
        even = even_spec(self.spec, self.new_shape, self.new_mesh)
        for size, names, kept in zip(self.new_shape, self.spec, even, strict=True):
            if names != kept:
                over = ",".join(f"{a}={n}" for a, n in self.new_mesh if a in names)
                return f"{size} over {over}"
        return ""


def _planned_arguments(plan: Plan, analysis: Analysis) -> dict[int, _Planned]:
    """The arguments that a plan has, too, by their positions in the new program."""
    program, mesh = analysis.frame.program, analysis.frame.mesh
    planned = {
        name: (spec, shape_of(kind))
        for name, spec, kind in zip(
            plan.arg_names, plan.arg_specs, plan.arg_types, strict=True
        )
    }
    found = {}
    for i, (name, value) in enumerate(
        zip(program.arg_names, program.args, strict=True)
    ):
        if name in planned:
            (spec, shape), new_shape = planned[name], program.shape(value)
            # A key's type is not that of its words, which no batch changes.
            shape = shape if len(shape) == len(spec) else new_shape
            found[i] = _Planned(
                spec=spec,
                shape=shape,
                mesh=plan.mesh_axes,
                new_shape=new_shape,
                new_mesh=mesh,
            )
    return found


def _as_planned(
    analysis: Analysis, choice: Choice, planned: Mapping[int, _Planned]
) -> Choice:
    """A choice whose storage groups are kept as those of a plan's arguments."""
    frame = analysis.frame
    count = len(frame.groups)
    layouts = {
        mode: lay_out(frame, replace(choice, storage=(mode,) * count))
        for mode in Storage
    }
    storage = list(choice.storage)
    for group in frame.groups:
        common = [i for i in group.args if i in planned]
        for mode in dict.fromkeys((storage[group.index], *Storage)):
            if all(planned[i].allows(layouts[mode].arg_spec(i)) for i in common):
                storage[group.index] = mode
                break
    choice = replace(choice, storage=tuple(storage))
    layout = lay_out(frame, choice)
    for i, one in planned.items():
        if not one.allows(layout.arg_spec(i)):
            _refuse(
                f"The argument {frame.program.arg_names[i]} would be sharded otherwise "
                "than planned.",
                f"{one.spec}",
                f"{layout.arg_spec(i)}",
            )
    return choice


def _predicted_ms(
    plan: Plan, analysis: Analysis, pairs: Sequence[_Pair]
) -> float | None:
    """The plan's step time with what is more, or less: segments, iterations of loops.

    Segments count by what the plan says that they take. Where its step took something
    else than they do together, the new step's is taken to be as much of that.
    """
    if analysis.frame.mesh != plan.mesh_axes:
        return None
    new = [_segment_ms(analysis, pair) for pair in pairs]
    known = [one.time_ms for one in plan.segments if one.time_ms is not None]
    found = [ms for ms in new if ms is not None]
    if len(known) < len(plan.segments) or len(found) < len(new):
        return None
    more = sum(found) - sum(known)
    if plan.measured_ms is None:
        return None if plan.predicted_ms is None else plan.predicted_ms + more
    if plan.predicted_ms:
        return plan.measured_ms * (plan.predicted_ms + more) / plan.predicted_ms
    # What is estimated for virtual devices is not what takes time there.
    return None if "strategies_estimated" in plan.search else plan.measured_ms + more


def _segment_ms(analysis: Analysis, pair: _Pair) -> float | None:
    """Estimates a segment's time from its old one's; None if unknown."""
    program, blocks = analysis.frame.program, analysis.frame.blocks
    ratios = {
        program.ops[blocks[b].anchor].repeat / row.repeats
        for b, row in zip(pair.segment.blocks, pair.rows, strict=True)
    }
    took = pair.old.time_ms
    # Of a segment that is half in a loop no time is known for either half.
    if took is None or len(ratios) != 1 or pair.scaled:
        return None
    return took * ratios.pop()


def _refuse(summary: str, expected: str, got: str) -> Never:
    raise PlanMismatch(summary, expected=expected, got=got, attempt=_TRY)

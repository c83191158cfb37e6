"""From choices to things to measure: segments, and whole programs, as jobs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import (
    Choice,
    Frame,
    Layout,
    SegmentKernels,
    constraints,
    lay_out,
)
from cfp.analysis.storage import even_spec
from cfp.analysis.strategies import Spec
from cfp.attention.matching.matches import replacements
from cfp.cost.costs import SegmentChoice, layout_of
from cfp.cost.memory import kernel_sites, turning_point
from cfp.presets.presets import activations
from cfp.printable import mesh_text
from cfp.profiling.builder import Job
from cfp.profiling.key import Parts, ProfileKey
from cfp.program.constrain import Constraints
from cfp.program.part import Part, cut_part, numbered, whole
from cfp.program.rematerialize import VERSION, rematerializable
from cfp.program.replace import Replacement
from cfp.settings import ConstraintLevel


def constraints_of(
    analysis: Analysis, choice: Choice, level: ConstraintLevel
) -> Constraints:
    """The constraints of a whole program's choice."""
    layout, part = lay_out(analysis.frame, choice), whole(analysis.frame.program)
    return _constrain(analysis, layout, part, choice.remat, choice.kernels, level)


def _constrain(
    analysis: Analysis,
    layout: Layout,
    part: Part,
    remat: Iterable[int],
    kernels: Iterable[tuple[int, SegmentKernels]],
    level: ConstraintLevel = ConstraintLevel.EVERYTHING,
) -> Constraints:
    """Makes the constraints of a part of a program, reduced to a level.

    Includes rematerialization and kernels of segments, by their indices. Operands of a
    kernel are sharded as the kernel reads them: keys of a ring must not be gathered.
    """
    frame, program = layout.frame, layout.frame.program
    replaced: list[Replacement] = []
    for index, one in kernels:
        ops = analysis.segments[index].ops
        for match, way in kernel_sites(layout, ops, one):
            replaced += replacements(program, match, way)
    turn, within = turning_point(frame), set(part.ops)
    again = (
        rematerializable(
            program, within & {*analysis.segments[index].ops}, turn, within
        )
        for index in remat
    )
    constrained = constraints(layout, program.with_bodies(part.ops))
    kernels_read = (stage.reads for one in replaced for stage in one.stages)
    own = {use for reads in kernels_read for use in reads}
    values, uses = constrained.values, dict[tuple[int, int], Spec]()
    if not frame.mesh:
        # On one device they say nothing, and a step took 3 % longer with them:
        # docs/decisions.md, "Presets race with and without constraints inside".
        values = {}
    elif level is not ConstraintLevel.EVERYTHING:
        shared = () if level is ConstraintLevel.ARGUMENTS else activations(frame)
        # What the compiler fills in itself begins at these values, and it does not know
        # which ops read the padding of an uneven one as numbers (a scatter's indices).
        values = {
            v: even_spec(spec, program.values[v].shape, frame.mesh)
            for v, spec in values.items()
            if v in shared
        }
        _hold(layout, part, values, uses)
    else:
        # Of what enters a loop's body no constraint says how it is sharded.
        _hold(layout, part, {}, uses, products=False)
        held = [use for use in uses if program.ops[use[0]].operands[use[1]] in values]
        for use in held:
            del uses[use]
        uses |= constrained.uses
        uses = {use: spec for use, spec in uses.items() if use not in own}
    return Constraints(
        values,
        uses,
        rematerialized=tuple(one for one in again if one is not None),
        replaced=tuple(replaced),
    )


def _hold(
    layout: Layout,
    part: Part,
    values: dict[int, Spec],
    uses: dict[tuple[int, int], Spec],
    products: bool = True,
) -> None:
    """Adds constraints of ops whose shardings the compiler must not choose.

    Products fail on meshes of several axes only. Their operands must agree, while the
    compiler may spread the sum.
    """
    program = layout.frame.program
    several = sum(size > 1 for _, size in layout.frame.mesh) > 1
    for op_id in program.with_bodies(part.ops):
        op = program.ops[op_id]
        if op.rule is None or not op.rule.held or op_id not in layout.axes:
            continue
        is_product = op.kind == "dot_general"
        if is_product and not (several and products):
            continue
        for index, v in enumerate(op.operands):
            wanted = layout.use_spec(op_id, index)
            if wanted is not None and program.values[v].shape:
                uses[op_id, index] = wanted
        if not is_product:
            values.update(
                (v, layout.value_spec[v]) for v in op.results if v in layout.value_spec
            )


def part_job(
    analysis: Analysis,
    candidates: Mapping[int, SegmentChoice],
    environment: Parts,
    label: str,
) -> Job:
    """The job that measures a segment, or neighbouring ones together."""
    layout = layout_of(analysis, candidates)
    ops = sorted(op for index in candidates for op in analysis.segments[index].ops)
    part = cut_part(analysis.frame.program, ops)
    again = [index for index, candidate in candidates.items() if candidate.remat]
    kernels = [(index, candidate.kernels) for index, candidate in candidates.items()]
    constrained = _constrain(analysis, layout, part, again, kernels)
    job = _job(layout, part, constrained, environment, label)
    return replace(job, expected_ms=sum(c.estimate_ms for c in candidates.values()))


def whole_job(
    analysis: Analysis,
    choice: Choice,
    environment: Parts,
    label: str,
    level: ConstraintLevel = ConstraintLevel.EVERYTHING,
    options: Mapping[str, str] | None = None,
) -> Job:
    """The job that measures a whole program under a choice, with compiler options."""
    tuned = tuple(sorted((options or {}).items()))
    frame = analysis.frame
    # A choice needs as much in two programs only if both give up the same memory.
    given = repr((frame.program.alias, sorted(frame.pins.items())))
    digest = hashlib.sha256(given.encode()).hexdigest()
    environment = (
        *environment,
        ("what", "whole program, raced when warm"),
        ("arguments", digest),
    )
    if tuned:
        environment = (*environment, ("options", repr([*tuned])))
    how = {"level": level, "options": dict(options or {})}
    chosen = json.dumps({"choice": asdict(choice), **how})
    layout, part = lay_out(frame, choice), whole(frame.program)
    constrained = _constrain(
        analysis, layout, part, choice.remat, choice.kernels, level
    )
    job = _job(layout, part, constrained, environment, label)
    return replace(job, options=tuned, choice=chosen)


def _returned(frame: Frame, part: Part) -> Iterator[tuple[int, int, int]]:
    """Yields inputs and outputs of a part that are an argument and its new value."""
    program = frame.program
    position = {v: i for i, v in enumerate(program.args)}
    places = {v: i for i, v in enumerate(part.outputs)}
    is_whole = part.is_whole(program)
    seen: set[int] = set()
    for place, v in enumerate(part.inputs):
        argument = position.get(v)
        output = frame.paired[argument] if argument is not None else None
        if argument is None or output is None:
            continue
        made = output if is_whole else places.get(program.outputs[output])
        # One value that becomes two arguments goes back into the first.
        if made is not None and made not in seen:
            seen.add(made)
            yield place, made, argument


def _job(
    layout: Layout, part: Part, constrained: Constraints, environment: Parts, label: str
) -> Job:
    """The job that measures a part of a program under a layout.

    Its key has its ops and shardings numbered from its own start: equal layers of
    different models, or of different depths, have equal keys.
    """
    frame, program = layout.frame, layout.frame.program

    def even(v: int, spec: Spec | None) -> Spec:
        """A sharding that arguments and results of a program may have."""
        shape = program.values[v].shape
        return even_spec(spec or ((),) * len(shape), shape, frame.mesh)

    made_before = {v for v in part.inputs if program.values[v].producer >= 0}
    in_specs = tuple(
        even(v, layout.read_spec(v) if v in made_before else layout.spec(v))
        for v in part.inputs
    )
    specs = [even(v, layout.spec(v)) for v in part.outputs]
    feedback: list[tuple[int, int]] = []
    for place, made, argument in _returned(frame, part):
        specs[made] = in_specs[place]
        if program.alias[argument] is not None:
            feedback.append((place, made))
    out_specs = tuple(specs)
    numbers = numbered(program, part)
    inside = numbers.translated(constrained)
    again = inside.rematerialized
    what = (sorted(inside.values.items()), sorted(inside.uses.items()))
    what += (in_specs, out_specs, feedback, again and VERSION, again, inside.replaced)
    given = dict(zip(program.args, program.given, strict=False))
    decided = [
        (numbers.values[v], given[v].hex())
        for v in part.inputs
        if given.get(v) and program.decides(v)
    ]
    key = (
        ("ops", numbers.digest),
        ("shardings", hashlib.sha256(repr(what).encode()).hexdigest()),
        *([("given", repr(sorted(decided)))] if decided else []),
        ("mesh", mesh_text(frame.mesh)),
        *environment,
    )
    return Job(
        key=ProfileKey(key),
        label=label,
        part=part,
        constraints=constrained,
        in_specs=in_specs,
        out_specs=out_specs,
        feedback=tuple(feedback),
    )

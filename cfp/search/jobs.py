"""From choices to things to measure: segments, and whole programs, as jobs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from cfp.analysis.abridge import Abridged
from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import (
    Choice,
    Frame,
    Layout,
    constraints,
    lay_out,
)
from cfp.analysis.specs import even_spec
from cfp.analysis.strategies import Spec
from cfp.attention.matching.graft import NAME as ATTENTION
from cfp.attention.matching.matches import replacements
from cfp.cost.choice import SegmentChoice, parts_layout, segment_layout
from cfp.cost.kept import kernel_sites
from cfp.cost.memory import turning_point
from cfp.profiling.builder import Job
from cfp.profiling.key import Parts, ProfileKey
from cfp.program.given import deciding
from cfp.program.graft import Constraints, Part, cut_part
from cfp.program.part import numbered
from cfp.program.recompute import VERSION, Recompute, recomputable
from cfp.program.replace import Replacement
from cfp.settings import ConstraintLevel


def constraints_of(
    analysis: Analysis, choice: Choice, level: ConstraintLevel
) -> Constraints:
    """The constraints of a whole program's choice.

    Args:
        analysis: of the program.
        choice: for all of it.
        level: how much the compiler is constrained.
    """
    layout = lay_out(analysis.frame, choice)
    return _constrain(analysis, layout, choice.remat, dict(choice.kernels), level)


def _constrain(
    analysis: Analysis,
    layout: Layout,
    remat: Iterable[int],
    kernels: Mapping[int, str],
    level: ConstraintLevel = ConstraintLevel.EVERYTHING,
    part: Part | None = None,
) -> Constraints:
    """The constraints of a program, or of a part, reduced to a level.

    With what is rematerialized and replaced of some segments, by their indices. What a
    kernel of attention reads it has sharded as it wants it: keys that are to go round
    in a ring must not be gathered before.
    """
    program = layout.frame.program
    constrained = constraints(
        layout, None if part is None else program.with_bodies(part.ops)
    )
    if level is not ConstraintLevel.EVERYTHING:
        constrained = replace(constrained, values={}, uses={})
    replaced = _replaced(analysis, layout, kernels)
    own = {
        use
        for one in replaced
        if one.name == ATTENTION
        for stage in one.stages
        for use in stage.reads
    }
    uses = {use: spec for use, spec in constrained.uses.items() if use not in own}
    again = _recomputed(analysis, remat, part)
    return replace(constrained, uses=uses, recompute=again, replaced=replaced)


def _replaced(
    analysis: Analysis, layout: Layout, kernels: Mapping[int, str]
) -> tuple[Replacement, ...]:
    """Kernels in the place of attentions of segments, and parts of vocabularies."""
    found: list[Replacement] = []
    for index, kernel in kernels.items():
        ops = analysis.segments[index].ops
        attentions, losses = kernel_sites(layout, ops, kernel)
        for match, way in attentions:
            found += replacements(layout.frame.program, match, way)
        found += losses
    return tuple(found)


def _recomputed(
    analysis: Analysis, indices: Iterable[int], part: Part | None
) -> tuple[Recompute, ...]:
    """What is computed again of some segments, or of what a part has of them."""
    frame = analysis.frame
    turn = turning_point(frame)
    owned = [set(analysis.segments[i].ops) for i in indices]
    within = None if part is None else set(part.ops)
    if within is not None:
        owned = [ops & within for ops in owned]
    found = (recomputable(frame.program, ops, turn, within) for ops in owned)
    return tuple(one for one in found if one is not None)


def part_job(
    analysis: Analysis,
    candidates: Mapping[int, SegmentChoice],
    environment: Parts,
    label: str,
) -> Job:
    """The job that measures a segment, or neighbouring ones together.

    Args:
        analysis: of the program.
        candidates: the choice for each segment, by its index.
        environment: what measurements depend on.
        label: what progress calls it.
    """
    segments = analysis.segments
    if len(candidates) == 1:
        layout = segment_layout(analysis, *next(iter(candidates.items())))
    else:
        stored = {
            group: candidate.storage
            for index, candidate in candidates.items()
            for group in segments[index].groups
        }
        layout = parts_layout(analysis, candidates, stored)
    ops = sorted(op for index in candidates for op in segments[index].ops)
    part = cut_part(analysis.frame.program, ops)
    again = [index for index, candidate in candidates.items() if candidate.remat]
    kernels = {index: candidate.kernel for index, candidate in candidates.items()}
    constrained = _constrain(analysis, layout, again, kernels, part=part)
    job = _job(layout, part, constrained, environment, label)
    return replace(job, expected_ms=sum(c.estimate_ms for c in candidates.values()))


def whole_job(
    analysis: Analysis,
    choice: Choice,
    environment: Parts,
    label: str,
    level: ConstraintLevel = ConstraintLevel.EVERYTHING,
    options: Mapping[str, str] | None = None,
    abridged: Abridged | None = None,
) -> Job:
    """The job that measures a whole program under a choice, with compiler options.

    Args:
        analysis: of the program.
        choice: for all of it.
        environment: what measurements depend on.
        label: what progress calls it.
        level: how much the compiler is constrained.
        options: of the compiler.
        abridged: what is to stand for the program, and for the choice.
    """
    what = "abridged program" if abridged else "whole program"
    environment = (*environment, ("what", f"{what}, raced"))
    if options:
        environment = (*environment, ("options", repr(sorted(options.items()))))
    layout, program = lay_out(analysis.frame, choice), analysis.frame.program
    again, kernels = choice.remat, dict(choice.kernels)
    if abridged:
        part, chosen = abridged.part, ""
        again = [index for index in again if index in abridged.segments]
        kernels = {i: kernels[i] for i in abridged.segments if i in kernels}
        constrained = _constrain(analysis, layout, again, kernels, level, part)
    else:
        part = cut_part(program, [op.id for op in program.ops if op.parent < 0])
        constrained = _constrain(analysis, layout, again, kernels, level)
        kept = {**asdict(choice), "extent": level, "options": dict(options or {})}
        chosen = json.dumps(kept)
    job = _job(layout, part, constrained, environment, label)
    return replace(job, options=tuple(sorted((options or {}).items())), choice=chosen)


def _job(
    layout: Layout, part: Part, constrained: Constraints, environment: Parts, label: str
) -> Job:
    """The job that measures a part of a program under a layout."""
    frame, program = layout.frame, layout.frame.program
    position = {v: i for i, v in enumerate(program.args)}
    in_specs = tuple(_input_spec(layout, v) for v in part.inputs)
    out_place = {v: i for i, v in enumerate(part.outputs)}
    out_specs = [_even(layout, v, layout.spec(v)) for v in part.outputs]
    feedback = []
    settled: set[int] = set()
    for place, v in enumerate(part.inputs):
        argument = position.get(v)
        output = frame.paired[argument] if argument is not None else None
        if argument is None or output is None:
            continue
        made = program.outputs[output]
        if made in settled or made not in out_place:
            continue  # one value that becomes two arguments goes back into the first
        settled.add(made)
        out_specs[out_place[made]] = in_specs[place]
        if program.alias[argument] is not None:
            feedback.append((place, out_place[made]))
    return Job(
        key=_key(
            frame, part, constrained, in_specs, tuple(out_specs), feedback, environment
        ),
        label=label,
        part=part,
        constraints=constrained,
        in_specs=in_specs,
        out_specs=tuple(out_specs),
        feedback=tuple(feedback),
    )


def _input_spec(layout: Layout, v: int) -> Spec:
    program = layout.frame.program
    value = program.values[v]
    spec = layout.spec(v) if value.producer < 0 else layout.read_spec(v)
    return _even(layout, v, spec)


def _even(layout: Layout, v: int, spec: Spec | None) -> Spec:
    """A sharding that arguments and results of a program may have."""
    shape = layout.frame.program.values[v].shape
    return even_spec(spec or ((),) * len(shape), shape, layout.frame.mesh)


def _key(
    frame: Frame,
    part: Part,
    constrained: Constraints,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    feedback: Sequence[tuple[int, int]],
    environment: Parts,
) -> ProfileKey:
    """The key of a job: its ops and shardings, numbered from its own start.

    Equal layers of different models, or of different depths, have equal keys.
    """
    numbers = numbered(frame.program, part)
    local, local_op = numbers.values, numbers.ops
    told_digest = hashlib.sha256()
    values = sorted((local[v], s) for v, s in constrained.values.items())
    uses = sorted(((local_op[o], i), s) for (o, i), s in constrained.uses.items())
    shardings = (values, uses, in_specs, out_specs, feedback)
    told_digest.update(repr(shardings).encode())
    for one in constrained.recompute:
        again = [[local_op[op] for op in ops] for ops in (one.forward, one.backward)]
        told_digest.update(repr((VERSION, again)).encode())
    for one in constrained.replaced:
        if (local_one := one.translated(local, local_op)) is not None:
            told_digest.update(repr(local_one).encode())
    given = dict(zip(frame.program.args, frame.program.given, strict=False))
    decided = [
        (local[v], given[v].hex())
        for v in part.inputs
        if given.get(v) and deciding(frame.program, v)
    ]
    return ProfileKey(
        (
            ("ops", numbers.digest),
            ("shardings", told_digest.hexdigest()),
            *([("given", repr(sorted(decided)))] if decided else []),
            ("mesh", ",".join(f"{name}={size}" for name, size in frame.mesh)),
            *environment,
        )
    )

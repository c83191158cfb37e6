"""Composes the plan of a race's winner: segments, blocks, and unsharded parts.

A block is an op and ops sharded with it; a segment is a run of blocks.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from jax.sharding import AxisType, Mesh

from cfp.analysis.analyze import (
    Analysis,
    long_branches,
    model_work,
    program_flops,
    uncounted_loops,
    update_blocks,
)
from cfp.analysis.contractions import is_product
from cfp.analysis.flow import Flow, origin_of, passes
from cfp.analysis.layout import Choice, Frame, Layout, Storage, lay_out
from cfp.analysis.roles import axis_walk, batch_rows, data_arguments
from cfp.analysis.storage import even_spec, spec_ways
from cfp.analysis.strategies import NONE, Spec, Strategy
from cfp.cost.costs import segment_candidate
from cfp.cost.described import DescribedMesh
from cfp.cost.terms import Terms, transition
from cfp.plan.execute import ReusableExecutable
from cfp.plan.parts import (
    NOT_CHOSEN,
    AxisRole,
    MoveFigure,
    PlanRow,
    PlanSegment,
    Role,
    Site,
    StoredParameter,
    type_text,
)
from cfp.plan.plan import Plan
from cfp.printable import format_bytes, mesh_text
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.collectives import Rates
from cfp.profiling.record import configuration
from cfp.program.constrain import Constraints
from cfp.program.graph import Op, Program, call_flops
from cfp.program.part import aval, signature
from cfp.program.partitioned import call_of
from cfp.program.read import outline_of, sources_of
from cfp.program.trace import host_calls
from cfp.race.programs import RaceOutcome, programs_of
from cfp.search.guided import prediction_of
from cfp.search.requests import constraints_of
from cfp.search.solver import Problem

_FUNCTION = re.compile(r"jit\((\w+)\)")
_WORTH_NAMING = 0.01  # Share of the bytes of all ops' results, or of the memory.

_Move = tuple[str, tuple[str, ...], int]  # A collective's kind, axes and bytes.


def plan_segments(
    analysis: Analysis, choice: Choice, problem: Problem | None
) -> tuple[PlanSegment, ...]:
    """Describes each segment's choice; `time_ms` is None unless `problem` has it."""
    frame = analysis.frame
    owned = [[frame.groups[g] for g in segment.groups] for segment in analysis.segments]
    return tuple(
        PlanSegment(
            kind=segment.kind,
            parameters=tuple(
                StoredParameter(
                    argument=group.args[0],
                    storage=frame.effective(choice.storage[group.index], groups),
                )
                for group in groups
            ),
            rematerialized=segment.index in choice.remat,
            kernels=choice.kernels_of(segment.index),
            time_ms=_segment_ms(analysis, problem, segment.index, choice),
        )
        for segment, groups in zip(analysis.segments, owned, strict=True)
    )


def block_arguments(frame: Frame) -> list[set[int]]:
    """Returns for each block positions of arguments that its ops read, or casts of."""
    program, flow = frame.program, Flow(frame.program)
    places = {value: position for position, value in enumerate(program.args)}
    found: list[set[int]] = [set() for _ in frame.blocks]
    for op in program.ops:
        if (block := frame.block_of[op.id]) >= 0:
            origins = (origin_of(flow, v) for v in op.operands)
            found[block].update(places[v] for v in origins if v in places)
    return found


def plan_rows(
    analysis: Analysis, choice: Choice, rates: Rates | None = None
) -> tuple[PlanRow, ...]:
    """Returns a row for each block: its strategy and collectives; see `block_moves`.

    Args:
        rates: rates of the devices; None leaves out times of collectives.
    """
    frame, program = analysis.frame, analysis.frame.program
    layout, arguments = lay_out(frame, choice), block_arguments(frame)
    moves: list[dict[tuple, list[int]]] = [defaultdict(list) for _ in frame.blocks]
    for block, kind, axes, size, turns in block_moves(analysis, layout):
        moves[block][kind, axes, turns].append(size)
    updating = update_blocks(frame)
    rows = []
    for segment in analysis.segments:
        for b in segment.blocks:
            block = frame.blocks[b]
            op = program.ops[block.anchor]
            rows.append(
                PlanRow(
                    block=b,
                    segment=segment.index,
                    name=block.name,
                    op=op_text(program, op),
                    strategy=axis_roles(frame, op, choice.blocks[b]),
                    source=op.source,
                    arguments=tuple(program.arg_names[i] for i in sorted(arguments[b])),
                    moves=_move_figures(moves[b], rates),
                    repeats=op.repeat,
                    updates=b in updating,
                )
            )
    return tuple(rows)


def _move_figures(
    moves: dict[tuple, list[int]], rates: Rates | None
) -> tuple[MoveFigure, ...]:
    figures = [
        MoveFigure(
            kind=kind,
            axes=axes,
            turns=turns,
            count=turns * len(sizes),
            total_bytes=turns * sum(sizes),
            time_ms=None
            if rates is None
            else turns * sum(rates.collective_ms(kind, axes, one) for one in sizes),
        )
        for (kind, axes, turns), sizes in moves.items()
    ]
    return tuple(sorted(figures, key=lambda move: -move.total_bytes))


def uneven_arguments(layout: Layout, samples: int, rows: int) -> tuple[str, ...]:
    """Lists arguments replicated since axes do not divide a dim: ``x (7 over x=4)``.

    Ops that read these arguments are sharded along these axes, or could be. XLA may pad
    values inside of a program, but not its arguments.

    Args:
        samples: samples of the batch.
        rows: result of `batch_rows`; if fewer, a microbatch's.
    """
    program, mesh = layout.frame.program, layout.frame.mesh
    batch, found = data_arguments(layout.frame), []
    for position, value in enumerate(program.args):
        shape = program.values[value].shape
        wanted, name = layout.read_spec(value) or (), program.arg_names[position]
        if any(layout.arg_spec(position)):
            continue
        kept = even_spec(wanted, shape[: len(wanted)], mesh)
        lost = [i for i, names in enumerate(wanted) if names != kept[i]]
        is_parted = position in batch and 0 < rows < samples
        if lost and not is_parted:
            over = [(a, n) for a, n in mesh if a in wanted[lost[0]]]
            found.append(f"{name} ({shape[lost[0]]} over {mesh_text(over)})")
        elif mesh and rows and batch.get(position) == 0:
            size = rows if is_parted or samples in shape[:2] else shape[0]
            size_text = f"{samples} in microbatches of {size}" if is_parted else size
            if all(size % ways for _, ways in mesh):
                found.append(f"{name} ({size_text} over {mesh_text(mesh)})")
    return tuple(found)


def split_batches(layout: Layout, peak_bytes: int = 0) -> tuple[str, ...]:
    """Lists whole batches that a reshape splits, with bytes to save: ``x (6.00 KiB)``.

    The plan shards the inner part of the first dim, which an argument cannot be sharded
    by. Batches with less to save than 1 % of `peak_bytes` are left out.
    """
    program, mesh, found = layout.frame.program, layout.frame.mesh, list[str]()
    for position in data_arguments(layout.frame):
        value, arg_spec = program.args[position], layout.arg_spec(position)
        batch, name = program.values[value], program.arg_names[position]
        for op in (program.ops[user] for user, _ in program.users[value]):
            spec = layout.spec(op.results[0]) if op.kind == "reshape" else None
            if spec and any(spec[1:2]) and not (spec[0] or any(arg_spec)):
                parts = program.values[op.results[0]].shape[:2]
                size = batch.size_bytes - batch.size_bytes // spec_ways(spec, mesh)
                if prod(parts) == batch.shape[0] and size >= _WORTH_NAMING * peak_bytes:
                    found.append(f"{name} ({format_bytes(size)})")
    return tuple(found)


def describe_uncounted(program: Program) -> tuple[str, ...]:
    """Lists loops of unknown length, and branches: ``case at model.py:12``.

    Left out are loops and branches without products or other long work. Predictions
    count one iteration of a loop, and all branches.
    """
    found = (*uncounted_loops(program), *long_branches(program))
    return tuple(dict.fromkeys(map(_site, found)))


def constraint_sites(program: Program, constraints: Constraints) -> tuple[Site, ...]:
    """Counts constrained values and operands by source line, type and sharding."""
    values, uses = constraints.values.items(), constraints.uses.items()
    placed = [(program.values[v].producer, v, spec) for v, spec in values]
    placed += [(op, program.ops[op].reads[i], spec) for (op, i), spec in uses]
    ops = sorted({op for op, _, _ in placed if op >= 0})
    sources = dict(zip(ops, sources_of(program, ops), strict=True))
    found = Counter(
        (sources.get(op, ""), type_text(aval(program, value)), spec)
        for op, value, spec in sorted(placed)
    )
    return tuple(
        Site(source=source, type=kind, spec=spec, count=count)
        for (source, kind, spec), count in found.items()
    )


def whole_ops(layout: Layout, rates: Rates | None = None) -> tuple[str, ...]:
    """Lists ops that every device runs in full: ``sort at model.py:12 (9% of ...)``.

    These are loops without sharding, ops without a sharding rule, ops that XLA does not
    partition, and unsharded custom_partitioning ops or ops that gather. Shares are of
    all ops' bytes and FLOPs. Lines of source below 1 % of both are left out.

    Args:
        rates: rates of the devices; with these, the texts have the ms lost, if any.
    """
    if not layout.frame.mesh:
        return ()
    program = layout.frame.program
    made = [0 if o.has_regions else _bytes(program, o, o.results) for o in program.ops]
    found, touched, computed, whole = Counter(), Counter(), Counter(), set[int]()
    lost_ms: dict[tuple[str, bool], float] = defaultdict(float)
    for op in reversed(program.ops):  # A loop follows the ops of its body.
        if op.id in whole or op.id in program.leaf_ops:
            continue
        site = _site(op)
        if op.kind == "while" and _is_whole(layout, op):
            whole.update(op.body)
            found[site] += sum(made[i] for i in op.body)
            inside = [program.ops[i] for i in op.body]
        elif _is_whole_op(layout, op):
            site += _why_whole(layout, op)
            found[site] += made[op.id]
            touched[site] += _bytes(program, op, op.operands) if made[op.id] else 0
            computed[site] += call_flops(op) * op.repeat
            inside = [op]
        else:
            continue
        for is_known, ms in _lost_ms(layout, op, inside, rates):
            lost_ms[site, is_known] += ms
    texts, every, products = [], sum(made), program_flops(program)
    for site, size in found.most_common():
        flops = computed[site]
        is_large = size + touched[site] >= _WORTH_NAMING * every > 0
        if is_large or flops >= _WORTH_NAMING * products > 0:
            kinds = [f"{size / every:.0%} of the bytes of all ops"] if is_large else []
            if flops and products:
                kinds.append(f"{flops / products:.0%} of all FLOPs")
            if cost := (beyond := lost_ms[site, False]) + lost_ms[site, True]:
                least = "" if flops or not touched[site] else "at least "
                time = f"{cost:.2f}" if cost >= 0.1 else f"{cost:.1g}"
                kinds.append(f"costs {least}{time} ms by estimate")
                if (share := f"{beyond / cost:.0%}") != "0%":
                    kinds.append(f"{share} of it beyond the step's estimate")
            texts.append(f"{site} ({', '.join(kinds)})")
    return tuple(texts)


def _is_whole_op(layout: Layout, op: Op) -> bool:
    """True if XLA cannot shard an op; or a kernel, or op that gathers, is unsharded."""
    if op.rule is None:
        return not (passes(op) or op.shardings)
    if op.rule.held and op.rule.is_whole:  # XLA does not partition it.
        return True
    may_split = op.rule.gathered or call_of(op.attributes) is not None
    return bool(may_split) and not any(layout.axes.get(op.id, ()))


def _why_whole(layout: Layout, op: Op) -> str:
    """``: reason`` why an op is unsharded; "" unless its rule could shard it."""
    rule, mesh = op.rule, layout.frame.mesh
    if rule is None or rule.is_whole:
        return ""
    able = [f for f, size in enumerate(rule.sizes) if size > 1 and f not in rule.fixed]
    if any(rule.splits(f, size) for f in able for _, size in mesh):
        return f": {NOT_CHOSEN}"
    parts = " or ".join(str(rule.sizes[f]) for f in able)
    return f": {mesh_text(mesh)} divides none of {parts}"


def sharded_kernels(layout: Layout) -> tuple[str, ...]:
    """Lists sharded custom_partitioning ops: ``2 times norm at net.py:12 over x``."""
    program, found = layout.frame.program, Counter()
    for op in program.ops:
        call, own = call_of(op.attributes), layout.axes.get(op.id, ())
        if call is None or not any(own):
            continue
        used = (n for n, _ in layout.frame.mesh if any(n in names for names in own))
        where = f" at {op.source}" if op.source else ""
        found[f"{call.label}{where} over {', '.join(used)}"] += 1
    return tuple(
        f"{count} times {text}" if count > 1 else text
        for text, count in found.most_common()
    )


def _lost_ms(
    layout: Layout, op: Op, inside: Sequence[Op], rates: Rates | None
) -> Iterator[tuple[bool, float]]:
    """Yields ms lost because every device runs an op (`inside`) in full.

    Lost is the time beyond one device's equal part, and the time to gather operands.
    Ops with a rule count as in the step's estimate: outside of blocks as 0. Other ops
    count by the slower of FLOPs and bytes. Without rates, nothing is yielded.

    Yields:
        (True if the step's estimate has this time, ms).
    """
    frame, program, mesh = layout.frame, layout.frame.program, layout.frame.mesh
    if rates is None:
        return
    terms, lost = Terms(frame, rates), 1 - 1 / prod(size for _, size in mesh)
    for one in inside:
        if one.has_regions or one.id in program.leaf_ops:
            continue
        if one.rule is not None:
            if frame.block_of[one.id] != NONE:
                whole = ((),) * len(one.rule.sizes)
                yield True, lost * sum(terms.compute_ms(one, whole))
            continue
        dtype = program.values[one.operands[0]].dtype if one.operands else "f32"
        computing = rates.matmul_ms(call_flops(one) * one.repeat, dtype)
        moved = _bytes(program, one, (*one.operands, *one.results))
        yield False, lost * max(computing, rates.memory_ms(moved))
    for v in dict.fromkeys(op.operands):
        spec = layout.spec(v)
        if spec and any(spec):
            whole = ((),) * len(spec)
            steps = transition(program.values[v].size_bytes, spec, (), whole, mesh)
            ms = op.repeat * sum(rates.collective_ms(*step) for step in steps)
            yield op.rule is not None, ms


def _bytes(program: Program, op: Op, values: Iterable[int]) -> int:
    """Returns the unsharded bytes of `values`, times the op's runs in one step."""
    return op.repeat * sum(program.values[v].size_bytes for v in values)


def _is_whole(layout: Layout, loop: Op) -> bool:
    """True if no value of a loop is sharded, in its body or carried."""
    program = layout.frame.program
    ops = [loop, *(program.ops[i] for i in loop.body)]
    specs = [layout.spec(v) for op in ops for v in op.results]
    specs += [layout.use_spec(op.id, i) for op in ops for i in range(len(op.operands))]
    return not any(spec and any(spec) for spec in specs)


def _site(op: Op) -> str:
    """Describes an op: ``while at model.py:12``; without a line ``sort in argsort``."""
    call, kind, refusal = call_of(op.attributes), op.kind, ""
    if call is not None:
        kind = f"custom_partitioning {call.label}"
        if op.rule is None and call.refusals:
            refusal = f": {call.refusals[0]}"
    if op.source:
        return f"{kind} at {op.source}{refusal}"
    return " in ".join([kind, *_FUNCTION.findall(op.scope)[-1:]]) + refusal


def _segment_ms(
    analysis: Analysis, problem: Problem | None, index: int, choice: Choice
) -> float | None:
    if problem is None:
        return None
    segment = analysis.segments[index]
    chosen = segment_candidate(analysis, index, choice)
    modes = [choice.storage[g] for g in segment.groups] or [*Storage]
    for option in problem.options[segment.kind]:
        one = option.candidate
        if one.storage in modes and replace(chosen, storage=one.storage) == one:
            return option.time_ms
    return None


def op_text(program: Program, op: Op) -> str:
    """Writes an op, 2 operands at most, a result: ``dot f32[8] x f32[8] -> f32[]``."""
    operands = " x ".join(str(program.values[v]) for v in op.operands[:2])
    return f"{op.kind} {operands} -> {program.values[op.results[0]]}"


def axis_roles(frame: Frame, op: Op, strategy: Strategy) -> tuple[AxisRole, ...]:
    """Returns a role for each mesh axis that shards an anchor (a block's main op)."""
    rule, roles = op.known_rule, []
    weight = frame.blocks[frame.block_of[op.id]].weight
    for (axis, size), choice in zip(frame.mesh, strategy, strict=True):
        if (factor := choice.inner) == NONE:
            continue
        scattered_dim = None if choice.exit == NONE else _result_dim(op, choice.exit)
        dim = _result_dim(op, factor)
        holders = [
            i for i, dims in enumerate(rule.operands) if any(factor in d for d in dims)
        ]
        if factor in rule.reduction:
            role = Role.CONTRACTED
        elif not is_product(op):
            role = Role.DIM
        elif len(op.operands) < 2 or len(holders) > 1:
            batch = axis_walk(frame, "data", size)[frame.block_of[op.id]].inner
            role = Role.BATCH if factor == batch else Role.DIM
        # Rows of a lookup's result are the dims of its indices. Rows of a product with
        # a parameter are the dims of the data.
        elif weight >= 0 and len(op.operands) == 2:
            role = Role.COLUMNS if holders == [weight] else Role.ROWS
        elif holders == [int(op.kind == "gather")] or dim == 0:
            role = Role.ROWS
        else:
            role = Role.COLUMNS
        roles.append(
            AxisRole(
                axis=axis,
                role=role,
                factor=factor,
                dim=dim,
                scattered_dim=scattered_dim,
                size=rule.sizes[factor],
            )
        )
    return tuple(roles)


def _result_dim(op: Op, factor: int) -> int:
    [dims, *_] = op.known_rule.results
    return next((d for d, dim in enumerate(dims) if factor in dim), -1)


def block_moves(
    analysis: Analysis, layout: Layout
) -> Iterator[tuple[int, str, tuple[str, ...], int, int]]:
    """Predicts the collectives of blocks' ops, and of their parameters' updates.

    Yields:
        (block's index, kind, axes, bytes, runs in one step) of each. The bytes are of
        the whole tensor of a group of devices. XLA may merge collectives.
    """
    frame = analysis.frame
    program = frame.program
    owner = dict(enumerate(frame.block_of))
    groups = []
    for segment in analysis.segments:
        for group in (frame.groups[g] for g in segment.groups):
            values = (program.args[position] for position in group.args)
            readers = (user for v in values for user, _ in program.users[v])
            blocks = (b for user in readers if (b := frame.block_of[user]) >= 0)
            block = next(blocks, segment.start)
            groups.append((group, block))
            for op_id in group.ops:
                if owner.get(op_id, -1) < 0:
                    owner[op_id] = block
            for gradient in group.gradients:
                # A looked-up table's gradient may come from ops between other blocks.
                maker = program.values[gradient].producer
                if maker >= 0 and frame.block_of[maker] not in segment.blocks:
                    owner[maker] = block
    done: set[tuple] = set()
    for op in program.ops:
        if (block := owner.get(op.id, -1)) >= 0:
            for move in _op_moves(layout, op, done):
                yield block, *move, op.repeat
    # Gathers of parameters that are updated in shards, and stored whole.
    specs = layout.output_specs()
    for group, block in groups:
        for position in group.args:
            if (output := frame.paired[position]) is not None:
                v = program.outputs[output]
                if (have := layout.spec(v)) is not None:
                    for move in _moves(frame, v, have, (), specs[output]):
                        yield block, *move, 1


def _op_moves(layout: Layout, op: Op, done: set[tuple]) -> Iterator[_Move]:
    """Lists an op's collectives; `done`, extended here, has (value, sharding) pairs."""
    frame = layout.frame
    partial = layout.unreduced(op)
    for index, v in enumerate(op.results):
        natural = layout.natural_spec(op, index)
        spec = layout.spec(v)
        if partial and natural is not None and spec is not None:
            yield from _moves(frame, v, natural, partial, spec)
    for index, v in enumerate(op.operands):
        want, have = layout.use_spec(op.id, index), layout.spec(v)
        if want is None or have is None or want == have:
            continue
        if (v, want) not in done:
            done.add((v, want))
            yield from _moves(frame, v, have, (), want)


def _moves(
    frame: Frame, v: int, have: Spec, partial: tuple[str, ...], want: Spec
) -> Iterator[_Move]:
    value = frame.program.values[v]
    if value.shape:
        steps = transition(value.size_bytes, have, partial, want, frame.mesh)
        for kind, axes, size in steps:
            yield kind, tuple(axes), int(size)


def compose_plan(
    analysis: Analysis,
    mesh: Mesh | DescribedMesh,
    environment: Mapping[str, str],
    outcome: RaceOutcome,
    tuned: BuildEnvironment | None = None,
) -> Plan:
    """Composes the plan of a race's winner, which must exist.

    Args:
        mesh: the devices, real or described.
        tuned: folder of the tuned kernels, for the plan's compiles.
    """
    frame, winner = analysis.frame, outcome.winner
    assert winner is not None, "something fits"
    problem, rates = outcome.solution.problem, outcome.solution.rates
    program = frame.program
    layout = lay_out(frame, winner.choice)
    search: dict[str, Any] = dict(outcome.counts)
    search |= {name: n for name, n in program.rewritten.counts.items() if n}
    search |= model_work(frame, data_arguments(frame))
    samples = round(search.get("batch_samples", 0))
    rows = batch_rows(frame, samples)
    search["batch_rows"] = float(rows)
    # State that is twice in memory, since it is returned and not donated.
    undonated = {
        p: program.values[program.args[p]].size_bytes
        // spec_ways(layout.arg_spec(p), frame.mesh)
        for p in sorted(frame.group_of_arg)
        if frame.paired[p] is not None and program.alias[p] is None
    }
    if undonated:
        search["undonated_bytes"] = sum(undonated.values())
    estimated = isinstance(mesh, DescribedMesh) or "strategies_estimated" in search
    size = prediction_of(analysis, problem, winner.choice).peak_bytes
    raced = None
    if outcome.built is not None and isinstance(mesh, Mesh):
        [one] = programs_of(analysis, [winner], ())
        job, types = one.job, signature(program, one.job.part)
        raced = ReusableExecutable(outcome.built, job, mesh, program.content, types)
    constraints = constraints_of(analysis, winner.choice, winner.level)
    return Plan(
        fingerprint=program.fingerprint,
        mesh_axes=frame.mesh,
        arg_names=program.arg_names,
        arg_types=tuple(type_text(aval(program, v)) for v in program.args),
        arg_specs=tuple(layout.arg_spec(i) for i in range(len(program.args))),
        output_specs=layout.output_specs(),
        constraints=constraints,
        sites=constraint_sites(program, constraints),
        donated=tuple(a is not None for a in program.alias),
        winner=winner.name,
        predicted_ms=winner.predicted_ms,
        measured_ms=outcome.time_ms,
        peak_bytes=outcome.peak_bytes,
        options=dict(winner.options),
        level=winner.level,
        segments=plan_segments(analysis, winner.choice, problem),
        rows=plan_rows(analysis, winner.choice, rates),
        uneven=uneven_arguments(layout, samples, rows),
        split=split_batches(layout, outcome.peak_bytes or size or 0),
        pinned=tuple(sorted(frame.pins)),
        undonated=tuple(undonated),
        uncounted=describe_uncounted(program),
        replicated_ops=whole_ops(layout, rates),
        host_callbacks_skipped=host_calls(program),
        race=tuple(outcome.rows),
        environment={**configuration(), **environment, **_explicit_axes(mesh)},
        outline=outline_of(program),
        search=search,
        products=program.rewritten.products,
        rung="estimated" if estimated and outcome.time_ms is None else "measured",
        predicted_bytes=size,
        mesh=mesh if isinstance(mesh, Mesh) else None,
        raced=raced,
        tuned=tuned,
    )


def _explicit_axes(mesh: Mesh | DescribedMesh) -> dict[str, str]:
    """Entry {"explicit_axes": "x,y"} of `Plan.environment`; {} without such axes."""
    if isinstance(mesh, DescribedMesh):
        return {}
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    found = [name for name, kind in pairs if kind is AxisType.Explicit]
    return {"explicit_axes": ",".join(found)} if found else {}

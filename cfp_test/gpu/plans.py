"""Plans as people use them: their time, their budget, and what is used again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from math import comb
from statistics import median
from typing import Any

import jax
import numpy as np

import cfp
from cfp.analysis.presets import PRESETS, presets
from cfp.context import DetailedSettings
from cfp.errors import MemoryBudgetError
from cfp.models import build
from cfp.plan.execute import CompiledStep
from cfp.plan.plan import Plan
from cfp.printable import format_bytes
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.record import ProfileKey, ProfileRecord
from cfp.profiling.store import ProfileStore, store_path
from cfp.race.programs import RaceRow
from cfp.settings import ConstraintLevel, defaults_of
from cfp_test.gpu.equal import compile_choice, subject_of
from cfp_test.gpu.place import Failed, NotRun, Place
from cfp_test.random_steps.check import Subject
from cfp_test.support.steps import compare, logged_puts, make_step, stored

# A plan is slower than a preset if it is by more than this, and that in so many turns
# that chance makes it so in fewer than one run of fifty.
SLOWER = 1.02
CHANCE = 0.02
RIVALS = 2
# What a budget leaves out of what the fastest plan takes: less than a gigabyte with the
# planner's own reserve, so that a planner that is off by one is caught.
LESS, LESS_BYTES = 0.1, 700 * 2**20
# A step that is planned by measuring, on virtual devices, too.
STEP = "mlp"
_STEPS = 3


def _planned(place: Place, budget: int | None = None, mesh: Any = None) -> Plan:
    model, options = place.sizes.planned
    step, args = build(model, **options)
    return cfp.plan(
        step,
        *args,
        donate_argnums=0,
        mesh=place.mesh if mesh is None else mesh,
        memory_budget=budget,
        settings=DetailedSettings(**place.sizes.planned_settings),
        cache_dir=place.store,
        quiet=True,
    )


# -- the plan is no slower than the best preset ----------------------------------------


def no_slower(place: Place) -> str:
    """Times a plan and the best presets of its race in turn.

    On virtual CPU devices all run, and times decide nothing.
    """
    plan = _planned(place)
    subject = subject_of(*place.sizes.planned, place)
    found = presets(subject.analysis.frame)
    steps = {plan.winner: plan.compile_bound()}
    for row in _best_presets(plan.race):
        if row.name not in steps:
            name, *how = parts_of(row.name)
            steps[row.name] = compile_choice(subject, found[name], *how)
    samples = _in_turn(steps, subject, place)
    own, *rivals = samples
    if not rivals:
        raise NotRun(f"no preset was raced with {own}, {median(samples[own]):.2f} ms")
    best = min(rivals, key=lambda name: median(samples[name]))
    ratio = median(a / b for a, b in zip(samples[own], samples[best], strict=True))
    said = (
        f"{own} {_quartiles(samples[own])}, best preset {best} "
        f"{_quartiles(samples[best])}, in {place.sizes.turns} turns: {ratio:.3f}"
    )
    if not place.is_gpu:
        return f"{said}; of virtual devices, and so not judged"
    if is_slower(samples[own], samples[best]):
        raise Failed(f"the plan is slower than a preset: {said}")
    return said


def parts_of(name: str) -> tuple[str, ConstraintLevel, Mapping[str, str] | None]:
    """A raced preset's name alone, its constraint level and compiler options.

    Options are None if the preset raced in another way, such as rematerialized.
    """
    preset, *rest = name.split(", ")
    levels = {f"{level} constrained": level for level in ConstraintLevel}
    found = [levels[one] for one in rest if one in levels]
    rules = defaults_of("gpu")
    names = {*levels, *rules.slow_to_tune}
    way = ", ".join(one for one in rest if one not in names)
    shared = {} if {*rest} & {*rules.slow_to_tune} else rules.shared_options
    sets = {"": {}, **rules.compiler_options}
    options = {one: {**shared, **chosen} for one, chosen in sets.items()}
    return preset, (*found, ConstraintLevel.EVERYTHING)[0], options.get(way)


def _best_presets(race: Sequence[RaceRow]) -> list[RaceRow]:
    """Picks the fastest presets that a race timed."""
    ran = [row for row in race if row.time_ms is not None and not row.note]
    parts = [parts_of(row.name) for row in ran]
    is_named = [name in PRESETS and how is not None for name, _, how in parts]
    named = compress(ran, is_named)
    return sorted(named, key=lambda row: row.time_ms or 0.0)[:RIVALS]


def _in_turn(
    steps: Mapping[str, CompiledStep], subject: Subject, place: Place
) -> dict[str, list[float]]:
    """Takes a time from each program in each turn, the next one first each turn."""
    names = list(steps)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, place.sizes.turns):  # The first warms up.
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            step = steps[name]
            state, batch = _placed(subject, step)
            state = step(state, batch)[0]
            jax.block_until_ready(state)
            began = time.perf_counter()
            for _ in range(place.sizes.calls):
                state, _ = step(state, batch)
            jax.block_until_ready(state)
            took = 1e3 * (time.perf_counter() - began) / place.sizes.calls
            if turn >= 0:
                samples[name].append(took)
            del state
    return samples


def _placed(subject: Subject, step: CompiledStep) -> tuple[Any, ...]:
    """Copies the first arguments of a step to where it has them."""
    leaves = [
        jax.device_put(np.asarray(leaf), sharding)
        for leaf, sharding in zip(subject.leaves, step.in_shardings, strict=True)
    ]
    return jax.tree.unflatten(subject.step.in_tree, leaves)[0]


def _quartiles(samples: Sequence[float]) -> str:
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return f"{middle:.2f} ms ({low:.2f} to {high:.2f})"


def is_slower(own: Sequence[float], best: Sequence[float]) -> bool:
    """Returns True if samples, taken in turn, are slower beyond noise: a sign test."""
    ratios = [a / b for a, b in zip(own, best, strict=True)]
    worse, turns = sum(ratio > 1 for ratio in ratios), len(ratios)
    chance = sum(comb(turns, k) for k in range(worse, turns + 1)) / 2**turns
    return median(ratios) > SLOWER and chance < CHANCE


# -- a budget, as the device counts it -------------------------------------------------


def budget(place: Place) -> str:
    """Plans within a budget, and reads what a process that runs the plan has used.

    The budget is a little less than what the fastest plan takes; if nothing fits in it,
    the smallest that would do.
    """
    place.again("plan within a budget")
    place.again("run within a budget")
    row = json.loads((place.folder / "budget.json").read_text())
    said = (
        f"{row['winner']}: {format_bytes(row['used'])} by {row['counted']}, of "
        f"{format_bytes(row['budget'])}; the fastest plan takes "
        f"{format_bytes(row['free'])}"
    )
    if row["used"] > row["budget"]:
        raise Failed(f"over the budget: {said}")
    return said


def plan_within_budget(place: Place) -> None:
    """Plans without a budget, and then with one, which plan and budget are kept."""
    free = _planned(place).peak_bytes
    assert free is not None, "it was compiled"
    plan, most = _within(free, lambda budget: _planned(place, budget))
    plan.save(place.folder / "within_budget.json")
    row = {"winner": plan.winner, "budget": most, "free": free}
    (place.folder / "budget.json").write_text(json.dumps(row))


def _within(free: int, plan: Callable[[int], Plan]) -> tuple[Plan, int]:
    """Plans within less than the fastest plan takes, or the least that something fits.

    Args:
        free: bytes that the fastest plan takes.
        plan: makes a plan within a budget.

    Returns:
        The plan and its budget.
    """
    most = free - min(int(LESS * free), LESS_BYTES)
    try:
        return plan(most), most
    except MemoryBudgetError as error:
        most = error.smallest_feasible_bytes or 0
        if not 0 < most < free:
            raise
        return plan(most), most


def run_within_budget(place: Place) -> None:
    """Runs the plan in a process that has planned nothing, and notes what it used."""
    model, options = place.sizes.planned
    step, args = build(model, **options)
    plan = Plan.load(place.folder / "within_budget.json", mesh=place.mesh)
    # With what the race tuned, as `cfp.parallelize` has it.
    tuned = BuildEnvironment.beside(store_path(place.store))
    compiled = replace(plan.bind(step, *args), tuned=tuned).compile_bound()
    memory = compiled.compiled.memory_analysis()
    zeros = [
        jax.device_put(np.zeros(aval.shape, aval.dtype), sharding)
        for aval, sharding in zip(
            compiled.step.avals, compiled.in_shardings, strict=True
        )
    ]
    state, batch = jax.tree.unflatten(compiled.step.in_tree, zeros)[0]
    del zeros
    for _ in range(_STEPS):
        state, _ = compiled(state, batch)
    jax.block_until_ready(state)
    used, counted = _peak(place)
    if used is None:
        used = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
        counted = "the compiler's count, as virtual devices have none"
    path = place.folder / "budget.json"
    row = json.loads(path.read_text()) | {"used": used, "counted": counted}
    path.write_text(json.dumps(row))


def _peak(place: Place) -> tuple[int | None, str]:
    stats = [device.memory_stats() or {} for device in place.devices]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return (max(peaks) if peaks else None), "the device's high-water mark"


# -- what was measured, and planned, is used again -------------------------------------


def measured_plan(place: Place, folder: str, **settings: Any) -> tuple[Plan, list[str]]:
    """Plans a new function by measuring; returns the keys of what was stored, too."""
    fn, args = make_step(STEP)
    given = {"measure": True, "per_kind": 3, "in_context": False, **settings}
    with logged_puts() as keys:
        plan = cfp.plan(
            fn,
            *args,
            mesh=place.mesh,
            cache_dir=place.folder / folder,
            settings=DetailedSettings(**given),
            quiet=True,
        )
    return plan, keys


def used_again(place: Place) -> str:
    """Plans twice with one store; then uses the plan's file, as a job would."""
    first, keys = measured_plan(place, "again")
    before = stored(place.folder / "again")
    second, more = measured_plan(place, "again")
    if not keys or not before:
        raise Failed("the first planning has stored nothing")
    if more or stored(place.folder / "again") != before:
        raise Failed(f"{len(more)} of {len(before)} records were measured again")
    if first.arg_specs != second.arg_specs or first.winner != second.winner:
        raise Failed(f"first {first.winner!r}, from the same store {second.winner!r}")
    path = place.folder / "plan.json"
    first.save(path)
    fn, args = make_step(STEP)
    expected = jax.jit(fn)(*args)
    runs: dict[str, Callable[..., Any]] = {
        "planned": first.compile_bound(),
        "loaded": Plan.load(path).apply(make_step(STEP)[0]),
        "reused": cfp.parallelize(
            make_step(STEP)[0], plan=path, mesh=place.mesh, quiet=True
        ),
    }
    with logged_puts() as more:
        worst = max(compare(k, run(*args), expected) for k, run in runs.items())
    if more:
        raise Failed("what uses a plan's file has measured")
    return f"{len(before)} records, none measured again; results off by {worst:.0e}"


def other_device(place: Place) -> str:
    """Plans with a store of records that another kind of device has made."""
    measured_plan(place, "first")
    folder = place.folder / "other"
    with ProfileStore(store_path(place.folder / "first")) as store:
        records = store.records()
    with ProfileStore(store_path(folder)) as store:
        store.put_all([_of_another(record) for record in records])
    _, found = measured_plan(place, "other")
    # Times differ from run to run, and with them what is worth being measured.
    if len({*found}) < len(records) / 4:
        raise Failed(
            f"{len(records)} records of another device were there, and {len({*found})} "
            "of this one's were measured: the others answered in their place"
        )
    return f"{len(records)} records of another device; {len(found)} measured here"


def _of_another(record: ProfileRecord) -> ProfileRecord:
    """The record as another device would have it, ten times as fast."""
    parts = tuple(
        (name, "another device" if name == "device_kind" else text)
        for name, text in record.parts
    )
    samples = tuple(sample / 10 for sample in record.samples_ms)
    key = ProfileKey(parts).digest
    return replace(record, key=key, parts=parts, samples_ms=samples)

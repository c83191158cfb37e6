"""The error where nothing fits: what takes the memory, and what would help."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.analyze import Analysis, analyze
from cfp.analysis.layout import Choice, Storage
from cfp.analysis.presets import preset
from cfp.cost.memory import can_rematerialize
from cfp.printable import format_bytes
from cfp.profiling.record import ProfileRecord
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.race.admission import RESERVE, RESULTS, no_winner
from cfp.race.programs import RaceResult
from cfp.search.guided import Candidate
from cfp.search.requests import whole_job
from cfp.settings import defaults_of
from cfp.targets import resolve
from cfp_test.program.stacks import stack_step
from cfp_test.race.results import result_of

MIB = 2**20
SMALL = "--layers 2 --hidden 512 --seq 512 --batch 32 --vocab 512".split()


def step(w, x):
    def loss_fn(w):
        return ((jnp.tanh(jnp.tanh(x @ w) @ w.T) - x) ** 2).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(w)
    return w - 0.1 * gradient, loss


def shapes(wide: int, rows: int):
    return (
        jax.ShapeDtypeStruct((16, wide), jnp.float32),
        jax.ShapeDtypeStruct((rows, 16), jnp.float32),
    )


@pytest.fixture
def refused(tmp_path) -> Callable[..., tuple[cfp.MemoryBudgetError, cfp.Plan]]:
    """The error for a preset that has to fit in nothing; and its plan otherwise."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])

    def make(args, **options):
        options |= {"mesh": mesh, "preset": "data_parallel", "cache_dir": tmp_path}
        options["settings"] = cfp.PlannerSettings(race=False)
        with pytest.raises(cfp.MemoryBudgetError) as caught:
            cfp.plan(step, *args, memory_budget="1000B", **options)
        return caught.value, cfp.plan(step, *args, **options)

    return make


@pytest.mark.smoke
def test_activations_are_named_where_they_take_most(refused):
    args = shapes(128, 512)
    error, plan = refused(args, donate_argnums=0)
    found = dict(error.contributors)
    sizes = plan.compile(step, *args).compiled.memory_analysis()
    assert found["temporaries"] == sizes.temp_size_in_bytes
    assert found["arguments"] == sizes.argument_size_in_bytes
    assert sum(found.values()) == error.smallest_feasible_bytes
    assert error.contributors[0][0] == "temporaries"
    assert "--microbatches" in str(error) and "--donate" not in str(error)


def test_arguments_are_named_where_they_take_most(refused):
    args = shapes(8192, 8)
    error, _ = refused(args)
    assert dict(error.contributors)[RESULTS] >= 512 * 1024
    assert "--donate 0" in str(error)
    donated, _ = refused(args, donate_argnums=0)
    assert "--donate 0" not in str(donated)
    assert dict(donated.contributors).get(RESULTS, 0) < 1024


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    fn, args = stack_step()
    program, _ = trace(flatten_step(fn, args, {}), planning_mesh(mesh))
    return analyze(program, (("x", 4),))


def result(analysis: Analysis, choice: Choice, **use: int) -> RaceResult:
    job = whole_job(analysis, choice, (), "plan")
    record = ProfileRecord(
        key=job.key.digest,
        parts=job.key.parts,
        status="out_of_memory",
        choice=job.choice,
        created="2026-11-30T12:34:56.000000+00:00",
        **use,
    )
    return result_of(Candidate("plan", choice), record, fits=False)


def test_messages_of_made_up_sizes(analysis, golden):
    """They name rematerialized segments, other failures, and what a record has."""
    frame = analysis.frame
    able = tuple(s.index for s in analysis.segments if can_rematerialize(frame, s))
    assert len(able) > 1
    plain = preset(frame, ("data",), Storage.USED)
    use = {"argument_bytes": MIB, "temp_bytes": 9 * MIB}
    large = result(analysis, plain, temp_bytes=9)
    why = {"status": "compile_error", "reason": "INTERNAL: no such sharding\nin detail"}
    failed = replace(large.record, temp_bytes=0, **why)
    broken = [
        result_of(Candidate(name, plain), failed) for name in ("zero1", "planned")
    ]
    cases = {
        "none is rematerialized": ([result(analysis, plain, **use)], MIB, 0),
        "all are": ([result(analysis, replace(plain, remat=able), **use)], MIB, 0),
        "others failed": ([large, *broken], 5, 0),
        "a reserve": ([large], 5, 2),
        "no program": ([], MIB, 0),
        "one that failed": ([result_of(Candidate("plan", plain), failed)], -1, 2),
    }
    golden(
        "shortage",
        {
            name: str(no_winner(analysis, results, budget_bytes, reserve_bytes=reserve))
            for name, (results, budget_bytes, reserve) in cases.items()
        },
    )
    error = no_winner(analysis, [large], 5, reserve_bytes=2)
    assert isinstance(error, cfp.MemoryBudgetError)
    assert error.contributors == [("temporaries", 9), (RESERVE, 2)]
    assert type(no_winner(analysis, [], MIB)) is cfp.CfpError


def test_the_smallest_program_is_named_by_its_shardings(analysis):
    """Not by its place in a search, where other budgets have other programs."""
    frame, segments = analysis.frame, analysis.segments
    plain = preset(frame, ("data",), Storage.USED)
    sharded = preset(frame, ("tensor",), Storage.USED)
    mixed = [*plain.blocks]
    for block in segments[0].blocks:
        mixed[block] = sharded.blocks[block]
    mixed = replace(plain, blocks=tuple(mixed))
    rest = len(segments) - 1

    def named(one):
        return str(no_winner(analysis, [one], 5)).splitlines()[1].strip()

    found = result(analysis, mixed, temp_bytes=9)
    parts = f"{rest} as data_parallel, 1 as tensor_parallel"
    assert named(found) == f"That program shards its segments: {parts}."
    other = result(analysis, preset(frame, ("tensor",), Storage.SHARDED), temp_bytes=9)
    assert named(other).endswith(f": {len(segments)} unlike any preset.")


def test_advice_is_not_what_the_step_does_already():
    """A step that scans microbatches, or that uses jax.checkpoint."""

    def advice(*words):
        target = resolve("gpt", [*SMALL, *words])
        described = {"mesh": cfp.described("4xh200"), "memory_budget": "129MiB"}
        with pytest.raises(cfp.MemoryBudgetError) as caught:
            cfp.plan(target.step, *target.args, **described, quiet=True)
        return str(caught.value).partition("Raise the budget")[2]

    split, checkpoint = (
        "--microbatches, cfp.plan_fastest",
        "jax.checkpoint in the model",
    )
    assert split in advice() and checkpoint in advice()
    said = advice("--microbatches", "2", "--remat")
    assert split not in said and checkpoint not in said
    assert "make the batch smaller, or its microbatches" in said
    assert "The state alone" not in said


def test_what_is_named_by_prediction_does(tmp_path):
    """Also where the allocator's reserve is taken off the budget."""
    reserve = defaults_of("gpu").reserve_bytes
    assert reserve > 0
    args, named = shapes(128, 512), {"cache_dir": tmp_path, "donate_argnums": 0}
    named["mesh"] = cfp.described("4xh200")
    with pytest.raises(cfp.MemoryBudgetError) as caught:
        cfp.plan(step, *args, memory_budget=reserve + 1000, **named)
    error = caught.value
    assert f"No plan fits in {format_bytes(reserve + 1000)} of memory" in str(error)
    assert "needs 2.00 KiB on each device if all shard it" in str(error)
    assert dict(error.contributors)[RESERVE] == reserve
    assert "\n  Raise the budget" in str(error)
    assert "more devices" not in str(error)
    needed = error.smallest_feasible_bytes
    assert sum(dict(error.contributors).values()) == needed
    made = cfp.plan(step, *args, memory_budget=needed, **named)
    assert made.predicted_bytes <= needed - reserve
    with pytest.raises(cfp.MemoryBudgetError):
        cfp.plan(step, *args, memory_budget=needed - 1, **named)

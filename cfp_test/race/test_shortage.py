"""The error where nothing fits: what takes the memory, and what would help."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.analyze import Analysis, analyze
from cfp.analysis.layout import Choice, Storage
from cfp.cost.memory import can_rematerialize
from cfp.presets.presets import preset
from cfp.profiling.record import ProfileRecord
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.race.compile import fits
from cfp.race.programs import RaceResult
from cfp.race.shortage import RESERVE, RESULTS, largest_text, no_winner
from cfp.search.jobs import whole_job
from cfp.settings import defaults_of
from cfp.solution import Candidate
from cfp.units import format_bytes
from cfp_test.program.stacks import stack_step
from cfp_test.race.results import result_of

MIB = 2**20


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
            cfp.plan(step, *args, memory_budget=1000, **options)
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
    text = str(error)
    assert "That memory is for: temporaries " in text
    # tanh(x @ w): 128 rows on each device, of 128 numbers.
    assert "keeps for the backward pass, the largest: " in text and "64.00 KiB" in text
    assert "largest arguments" not in text
    assert "--microbatches" in text and "--donate" not in text
    assert "a search does so where that saves memory" in text


def test_arguments_are_named_where_they_take_most(refused):
    args = shapes(8192, 8)
    error, _ = refused(args)
    assert dict(error.contributors)[RESULTS] >= 512 * 1024
    # As they are sharded: all of the weights, and two of eight rows.
    assert "on each device: w 512.00 KiB, x 128 B." in str(error)
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
        **use,
    )
    return result_of(Candidate("plan", choice), record, fits=False)


def test_the_message_says_what_is_rematerialized_already(analysis):
    frame = analysis.frame
    able = [s.index for s in analysis.segments if can_rematerialize(frame, s)]
    assert len(able) > 1
    plain = preset(frame, ("data",), Storage.USED)
    use = {"argument_bytes": MIB, "temp_bytes": 9 * MIB}
    none, some = (
        str(no_winner(analysis, [result(analysis, choice, **use)], MIB))
        for choice in (plain, replace(plain, remat=tuple(able)))
    )
    assert "No segment of this plan is rematerialized" in none
    assert f"{len(able)} could be: a search does so" in none
    assert f"{len(able)} of the {len(able)} segments that can be rematerialized" in some

    def kept(text: str) -> str:
        return text.partition("up to ")[2].partition(" are")[0]

    assert kept(none) and kept(some) and kept(none) != kept(some)


def test_what_failed_otherwise_is_not_taken_for_too_large(analysis):
    """With its reason, once for all that failed alike."""
    plain = preset(analysis.frame, ("data",), Storage.USED)
    large = result(analysis, plain, temp_bytes=9)
    broken = [
        result_of(
            Candidate(name, large.candidate.choice),
            replace(
                large.record,
                status="compile_error",
                reason="INTERNAL: no such sharding\nin detail",
                temp_bytes=0,
                argument_bytes=0,
            ),
        )
        for name in ("zero1", "planned")
    ]
    said = str(no_winner(analysis, [large, *broken], 5)).splitlines()
    assert (
        "  Not for want of memory failed 'zero1', 'planned': compile_error: INTERNAL: "
        "no such sharding"
    ) in said


def test_what_a_record_does_not_tell_is_left_out(analysis):
    """Records of earlier versions have no choice."""
    one = result(
        analysis, preset(analysis.frame, ("data",), Storage.USED), temp_bytes=9
    )
    one = replace(one, outcome=replace(one.record, choice=""))
    error = no_winner(analysis, [one], 5, reserve_bytes=2)
    assert isinstance(error, cfp.MemoryBudgetError)
    assert error.contributors == [("temporaries", 9), (RESERVE, 2)]
    first, second, *rest = str(error).splitlines()
    assert first == (
        "The plan 'plan', compiled, needs 11 B on each device, 4 B more than "
        "the budget of 7 B."
    )
    assert second == (
        f"  That memory is for: temporaries 9 B (82%), {RESERVE} 2 B (18%)."
    )
    assert len(rest) == 1


def test_alike_things_stand_together():
    layers = [(f"layer_{i}/up", 2 * MIB) for i in range(12)]
    others = [("head", 20 * MIB), *((f"small_{c}", 1) for c in "abcdef")]
    assert largest_text([*layers, *others]) == (
        "layer_0-11/up 12 x 2.00 MiB, head 20.00 MiB, small_a 1 B, small_b 1 B"
    )


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
    assert dict(error.contributors)[RESERVE] == reserve
    assert "\n  Raise the budget." in str(error)
    assert "more devices" not in str(error)
    needed = error.smallest_feasible_bytes
    assert sum(dict(error.contributors).values()) == needed
    made = cfp.plan(step, *args, memory_budget=needed, **named)
    assert made.predicted_bytes <= needed - reserve
    with pytest.raises(cfp.MemoryBudgetError):
        cfp.plan(step, *args, memory_budget=needed - 1, **named)


@pytest.mark.parametrize("budget_bytes", [MIB, -1])
def test_what_could_not_be_compiled_is_told_however_small_the_budget(
    analysis, budget_bytes
):
    """The reserve may leave nothing of a budget, in which not even a failure fits."""
    choice = preset(analysis.frame, ("data",), Storage.USED)
    one = result(analysis, choice, reason="no such op")
    one = replace(one, fits=fits(one.size, budget_bytes))
    assert one.fits == (budget_bytes >= 0)
    error = no_winner(analysis, [one], budget_bytes, reserve_bytes=2)
    assert isinstance(error, cfp.DeviceError)
    assert str(error) == "No plan ran on the devices. plan: no such op"
    nothing = no_winner(analysis, [], budget_bytes)
    assert str(nothing) == "No plan ran on the devices. None was compiled."

"""Figures that the full-model script makes of a race, of samples and of plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cfp.cli.session import analyse
from cfp.errors import PlanMismatch
from cfp.plan.compose import compose_plan
from cfp.presets.presets import presets
from cfp.profiling.builder import Built, build
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.race.programs import RaceOutcome, RaceRow
from cfp.search.jobs import whole_job
from cfp.solution import Candidate
from cfp.targets import model_target
from cfp_test.bench.full_figures import (
    best_presets,
    figures,
    loops_counted_once,
    table,
)
from cfp_test.bench.full_training import Training, spread, training_job
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

pytestmark = pytest.mark.usefixtures("compiled_once")

TINY = {
    "layers": 1,
    "hidden": 32,
    "heads": 4,
    "seq": 8,
    "vocab": 32,
    "batch": 4,
    "dtype": "float32",
}


def row(name, time_ms=None, note="", predicted_ms=None):
    samples = () if time_ms is None else (time_ms,)
    return RaceRow(
        name=name,
        predicted_ms=predicted_ms,
        samples_ms=samples,
        time_ms=time_ms,
        peak_bytes=0,
        note=note,
    )


def test_rivals_are_the_fastest_presets_with_default_options():
    race = [
        row("planned", 10.0),
        row("planned, large collectives", 9.0),
        row("planned 2", 8.0),
        row("zero1, large collectives", 7.0),
        row("zero1", 12.0),
        row("fully_sharded, rematerialized, arguments constrained", 11.0),
        row("x=data,y=tensor", 13.0),
        row("data_parallel", 5.0, note="over the memory budget"),
        row("expert_parallel", note="predicted too far behind", predicted_ms=1.0),
    ]
    found = [
        "fully_sharded, rematerialized, arguments constrained",
        "zero1",
        "x=data,y=tensor",
    ]
    assert best_presets(race, "planned", 9) == found
    assert best_presets(race, "planned", 2) == found[:2]
    assert best_presets(race, "zero1", 2) == [found[0], found[2]]


def test_without_a_rival_that_ran_the_prediction_says_which():
    far = "predicted too far behind to be raced"
    race = [
        row("planned", 10.0),
        row("zero1", note=far, predicted_ms=20.0),
        row("data_parallel", note=far, predicted_ms=15.0),
        row("fully_sharded", note="out_of_memory: no", predicted_ms=9.0),
    ]
    assert best_presets(race, "planned", 2) == ["data_parallel", "zero1"]


def test_figures_leave_out_the_first_step_and_count_all_devices():
    trained = {"samples_ms": [90.0, 10.0, 14.0, 12.0], "in_a_row_ms": 8.0}
    found = figures({**trained, "tokens": 400}, 6_000, 250.0, 4)
    assert found == {
        "step_ms": 12.0,
        "tokens_per_second": 50_000.0,
        "mfu": 0.75,
        "mfu_of_single_steps": 0.5,
    }
    assert figures({**trained, "tokens": None}, 1, 1.0, 1)["tokens_per_second"] is None


def test_the_table_says_what_failed_and_why():
    good = {
        **{"plan": "planned", "note": "", "in_a_row_ms": 8.0, "losses": [3.0, 2.5]},
        **{"step_ms": 12.0, "tokens_per_second": 50_000.0, "mfu": 0.75},
        **{"compiled_bytes": 3 << 30, "device_peak_bytes": None},
    }
    head, first, second = table(
        [good, {"plan": "zero1", "note": "its process ended with -9"}]
    ).splitlines()
    assert head.split()[:3] == ["plan", "step", "ms"]
    assert first.split() == (
        "planned 12.00 8.00 50,000 75.0% 3.0 GiB - 3.000 to 2.500".split()
    )
    assert second.split(maxsplit=1) == ["zero1", "its process ended with -9"]


def counted(fn, *args):
    mesh = planning_mesh(make_mesh((("x", 2),)))
    program, _ = trace(flatten_step(fn, args), mesh)
    return loops_counted_once(program)


def test_loops_of_unknown_length_are_named():
    x, count = jnp.ones((8, 8)), jnp.int32(3)

    def until(x, count):
        return jax.lax.fori_loop(0, count, lambda _, x: x @ x, x)

    assert counted(until, x, count) == 1
    assert counted(lambda x: jax.lax.fori_loop(0, 5, lambda _, x: x @ x, x), x) == 0

    def added(x, count):
        return jax.lax.fori_loop(0, count, lambda _, x: x + x, x)

    assert counted(added, x, count) == 0


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((4, 3), PartitionSpec(("x", "y"))),
        ((2, 8), PartitionSpec(None, ("x", "y"))),
        ((2, 3), PartitionSpec()),
        ((), PartitionSpec()),
    ],
)
def test_a_first_state_is_spread_over_all_devices(shape, spec):
    wanted = NamedSharding(make_mesh((("x", 2), ("y", 2))), PartitionSpec())
    found = spread(wanted, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert found.is_equivalent_to(NamedSharding(wanted.mesh, spec), len(shape))


@pytest.mark.parametrize("name", ["tensor_parallel", *at_night(["fully_sharded"])])
def test_what_was_raced_is_trained_on_new_data_every_step(name):
    target = model_target("gpt", TINY)
    session = analyse(target, make_mesh((("x", 2),)))
    frame = session.analysis.frame
    program = frame.program
    choice = presets(frame)[name]
    outcome = RaceOutcome(winner=Candidate(name, choice))
    plan = compose_plan(session.analysis, session.mesh, {}, outcome)
    plan = plan.bound_to(session.step, session.lowering.out_tree)

    job = training_job(program, plan, session.mesh)
    raced = whole_job(session.analysis, choice, (), name)
    for what in ("part", "constraints", "in_specs", "out_specs", "feedback", "options"):
        assert getattr(job, what) == getattr(raced, what), what

    built = build(program, session.mesh, job)
    assert isinstance(built, Built)
    training = Training(target, session.step, program, plan, job, built)
    names = [session.step.arg_names[i] for i in training.data]
    assert names == ["batch/labels", "batch/tokens"]
    assert training.tokens() == 4 * 8
    training.start()
    for number in range(3):
        training.run(training.data_of(number))

    everywhere = jax.tree.map(
        lambda s: NamedSharding(s.mesh, PartitionSpec()), plan.in_shardings
    )
    state, batch = target.make_args(everywhere, 0)
    step = jax.jit(target.step)
    expected = []
    for number in range(3):
        data = dict(zip(("labels", "tokens"), training.data_of(number), strict=True))
        assert np.array_equal(data["tokens"], batch["tokens"]) == (number == 0)
        state, metrics = step(state, jax.device_put(data, everywhere[1]))
        expected.append(metrics["loss"])
    np.testing.assert_allclose(training.losses, expected, rtol=1e-5)
    assert len({float(loss) for loss in expected}) == 3


def test_a_plan_for_another_program_is_not_trained():
    mesh = make_mesh((("x", 2),))
    session = analyse(model_target("gpt", TINY), mesh)
    choice = presets(session.analysis.frame)["data_parallel"]
    outcome = RaceOutcome(winner=Candidate("data_parallel", choice))
    plan = compose_plan(session.analysis, session.mesh, {}, outcome)
    other = analyse(model_target("gpt", {**TINY, "layers": 2}), mesh)
    with pytest.raises(PlanMismatch, match="another program"):
        training_job(other.analysis.frame.program, plan, other.mesh)

"""A time of a step with branches comes with the range of its samples."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.profiling.inputs import input_kinds, make_inputs
from cfp.profiling.runner import run
from cfp.race import turns
from cfp.view.remarks import remarks
from cfp_test.support.checking import make_mesh


def test_the_samples_of_a_step_with_branches_are_shown_by_their_range(tmp_path):
    def step(w, n, x):
        loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        g = jax.lax.cond(n % 2 == 0, lambda g: jnp.linalg.qr(g)[0], lambda g: g, g)
        return w - 0.1 * g, n + 1, loss

    args = jnp.eye(16), jnp.int32(0), jnp.ones((32, 16))
    mesh = make_mesh((("x", 2),))
    plan = cfp.plan(step, *args, mesh=mesh, cache_dir=tmp_path, quiet=True)
    rows = [
        replace(row, samples_ms=(100.0, 10000.0)) if row.name == plan.winner else row
        for row in plan.race
    ]
    assert not any(row.flag_ms for row in plan.race)  # A counter is no flag.
    [said] = [r for r in remarks(replace(plan, race=tuple(rows))) if "branch" in r]
    assert "100.000 to 10000.000 ms" in said


def as_computed(built, job, program, mesh, *, timing=None):
    """Records what the step computes as its time, but in the turns of the race."""
    if timing is not None:
        return run(built, job, program, mesh, timing=timing)
    inputs = make_inputs(input_kinds(program, job.part, job.in_specs), mesh)
    time_ms = float(built.compiled(*inputs)[1])
    return built.record("ok", samples_ms=(time_ms,))


@pytest.mark.parametrize(
    "flag, branches, times",
    [
        (jnp.bool_(False), (40.0, 10000.0), {"False": 40.0, "True": 10000.0}),
        (jnp.int32(2), (7.0, 30.0, 500.0), {"0": 7.0, "1": 30.0, "2": 500.0}),
    ],
    ids=["flag", "index"],
)
def test_both_branches_of_a_flag_are_timed(
    flag, branches, times, monkeypatch, tmp_path
):
    def step(w, refresh, x):
        def branch(ms):
            return lambda w: (w @ w.T @ x.T @ x, jnp.float32(ms))

        w, ms = jax.lax.switch(refresh.astype(int), [*map(branch, branches)], w)
        return w, ms

    monkeypatch.setattr(turns, "run", as_computed)
    args, mesh = (jnp.eye(16), flag, jnp.ones((32, 16))), make_mesh((("x", 2),))
    how = {"mesh": mesh, "cache_dir": tmp_path, "quiet": True}
    settings = cfp.PlannerSettings(measure=True)
    how |= {"preset": "data_parallel", "settings": settings}
    plan = cfp.plan(step, *args, **how)
    [winner] = [row for row in plan.race if row.name == plan.winner]
    assert dict(winner.flag_ms) == {f"refresh={n}": ms for n, ms in times.items()}
    [said] = [one for one in remarks(plan) if "branch" in one]
    for n, ms in times.items():
        assert f"{ms:.3f} ms with refresh={n}" in said
    # The store answers, and a file keeps them.
    monkeypatch.setattr(turns, "run", None)
    again = cfp.plan(step, *args, **how)
    assert again.race == plan.race
    assert type(plan).from_json(json.loads(plan.to_json())).race == plan.race

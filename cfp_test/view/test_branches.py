"""A time of a step with branches comes with the range of its samples."""

from dataclasses import replace

import jax
import jax.numpy as jnp

import cfp
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
    [said] = [r for r in remarks(replace(plan, race=tuple(rows))) if "branch" in r]
    assert "100.000 to 10000.000 ms" in said

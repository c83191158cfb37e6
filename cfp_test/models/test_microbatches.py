"""Parts of a batch one after another give what the whole batch gives."""

import functools

import jax
import numpy as np
import pytest

from cfp.models import build
from cfp_test.models.tiny import TINY, draw_start, quick_jit
from cfp_test.support.covering import at_night

ALONE = {
    **{name: {**options, "layers": 1} for name, options in TINY.items()},
    # Every other layer is one of experts. Tokens are routed within a sequence, so that
    # no part routes others together.
    "moe": {**TINY["moe"], "layers": 2, "expert_group_size": TINY["moe"]["seq"]},
}


start = functools.cache(lambda name: draw_start(name, **ALONE[name])[1])


@functools.cache
def first_step(name, parts):
    """Loss, entropy, and gradients as AdamW's first moments have them after a step."""
    train_step, _ = build(name, **ALONE[name], microbatches=parts)
    state, metrics = quick_jit(train_step)(*start(name))
    return metrics, state.opt_state[0].mu


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("bert", 2),  # Its loss is of some tokens alone.
        *at_night([("gpt", 2), ("gpt", 4), ("moe", 2), ("llama", 2)]),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole_batch(name, parts):
    expected, gradients = first_step(name, 1)
    found, accumulated = first_step(name, parts)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-6, err_msg=key)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(accumulated), jax.tree.leaves(gradients), strict=True
    ):
        # Some, such as those of gates, are hardly more than rounding.
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7, err_msg=str(path))


@pytest.mark.parametrize(("parts", "lengths"), [(1, []), (2, [2]), (4, [4])])
def test_the_loop_runs_once_for_each_part(parts, lengths):
    step, args = build("gpt", **TINY["gpt"], microbatches=parts)
    loops = [e for e in jax.make_jaxpr(step)(*args).eqns if e.primitive.name == "scan"]
    assert [loop.params["length"] for loop in loops] == lengths
    for loop in loops:
        read = [v.aval.str_short() for v in loop.invars]
        assert f"int32[{parts},{4 // parts},16]" in read


def test_a_sharded_batch_stays_where_it_is():
    """Each device has its share of every part: nothing but gradients is summed."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    step, (state, batch) = build("gpt", **TINY["gpt"], microbatches=2)
    rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    lowered = jax.jit(step, in_shardings=(whole, rows), out_shardings=whole).lower(
        state, batch
    )
    text = lowered.compile().as_text()
    assert " all-reduce(" in text or " all-reduce-start(" in text
    for moved in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {moved}(" not in text, moved

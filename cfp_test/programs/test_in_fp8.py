"""Example programs in bfloat16, planned with FP8 products: which are taken."""

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.checking.check import Check, both_sides
from cfp.program.fp8 import TAKEN
from cfp_test.programs.registry import PROGRAMS
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

# Numbers of products in FP8, of all 16-bit ones: the table of docs/fp8.md.
TAKEN_OF = {
    "attention": (6, 9),
    "cond": (2, 5),
    "cross_stack": (43, 64),
    "encoder_decoder": (18, 24),
    "ensemble": (2, 5),
    "low_precision": (2, 5),
    "mlp": (2, 5),
    "module_scan": (23, 34),
    "partly_manual": (2, 8),
    "shard_map": (2, 8),
    "tied_head": (3, 6),
    "tied_stack": (18, 21),
    "u_net": (68, 71),
}
NIGHTLY = at_night(sorted(TAKEN_OF.keys() - {"encoder_decoder", "tied_head"}))


def narrow(x):
    is_wide = isinstance(x, jax.Array) and x.dtype == jnp.float32
    return x.astype(jnp.bfloat16) if is_wide else x


@pytest.mark.parametrize("name", ["encoder_decoder", "tied_head", *NIGHTLY])
def test_planned_programs_compute_what_one_device_does(name, tmp_path):
    step, args, *_ = PROGRAMS[name]()
    args = jax.tree.map(narrow, args)
    plan = cfp.plan(
        step,
        *args,
        mesh=make_mesh((("x", 4),)),
        preset="fully_sharded",
        settings=cfp.PlannerSettings(precision="fp8:4", race=False),
        cache_dir=tmp_path,
        quiet=True,
    )
    counts = {why: sum(of.values()) for why, of in plan.products.items()}
    assert (counts[TAKEN], sum(counts.values())) == TAKEN_OF[name]
    planned, reference = both_sides(plan)
    check = Check(planned, reference, {})
    check.start(args)
    assert not check.step().failures

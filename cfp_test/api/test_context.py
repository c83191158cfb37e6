"""Rules of planning: the platform's defaults, and what takes their place."""

import jax
import pytest

import cfp
from cfp.context import DetailedSettings, _defaults
from cfp.settings import ConstraintLevel, defaults_of

EVERY = tuple(ConstraintLevel)
ALONE = (ConstraintLevel.EVERYTHING,)


@pytest.mark.parametrize(
    ("platform", "described", "levels"),
    [("gpu", False, EVERY), ("gpu", True, EVERY), ("cpu", False, ALONE)],
)
def test_presets_race_at_levels(platform, described, levels):
    here = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    mesh = cfp.described("4xh200") if described else here

    def found(**settings):
        return _defaults(
            defaults_of(platform), DetailedSettings(**settings), mesh
        ).levels

    assert {*found()} == {*levels}
    for one in EVERY:  # What is asked for holds.
        assert found(constraint_levels=(one,)) == (one,)


def test_segments_and_candidates_leave_out_what_is_slow_to_tune():
    here = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])

    def found(mesh=here, **settings):
        rules = _defaults(defaults_of("gpu"), DetailedSettings(**settings), mesh)
        return rules.shared_options

    assert found() == {"xla_gpu_enable_triton_gemm": "False"}
    assert not found(compiler_options={}) and not found(choose=("sharding",))
    assert not found(precision="fp8")  # It turns the same kernels off.
    assert not found(cfp.described("4xh200"))

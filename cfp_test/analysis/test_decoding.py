"""Decoding with a cache of keys and values that is sharded by heads."""

import re

import jax
import jax.numpy as jnp

import cfp
from cfp.presets.presets import presets
from cfp_test.checking import compile_choice, differences, prepare
from cfp_test.covering import cover_values
from cfp_test.programs.interface import decoding_step
from cfp_test.programs.registry import PROGRAMS

MESHES = {"x4": (("x", 4),), "x2y2": (("x", 2), ("y", 2))}


@cover_values(name=["decoding", "batched_decoding"], mesh=MESHES)
def test_heads_are_sharded_and_right(name, mesh):
    case = prepare(name, PROGRAMS[name], MESHES[mesh])
    run = compile_choice(case, presets(case.frame)["tensor_parallel"])
    text = run.compiled.as_text()
    rows = case.expected[0].shape[0]
    # A device has its heads of the cache, and no cache is gathered.
    local = r"f32\[\d+,8,(\d),4\]"
    assert {int(heads) for heads in re.findall(local, text)} <= {1, 2}, rows
    assert differences(case, run()) == {}


def test_a_budget_that_sharded_heads_fit_is_kept(tmp_path):
    serve, *_ = decoding_step(length=65536)

    def generate(params, cache, row, position):
        def one(carry, _):
            cache, row, position = carry
            cache, row = serve(params, cache, row, position)
            return (cache, row, position + 1), row

        return jax.lax.scan(one, (cache, row, position), None, length=16)

    row = jax.ShapeDtypeStruct((1, 1024), jnp.float32)
    weights = dict.fromkeys("qkv", jax.ShapeDtypeStruct((1024, 16, 64), jnp.float32))
    weights["o"] = jax.ShapeDtypeStruct((16, 64, 1024), jnp.float32)
    cache = jax.ShapeDtypeStruct((1, 65536, 16, 64), jnp.float32)
    position = jax.ShapeDtypeStruct((1,), jnp.int32)
    # Caches of 537 MB: no device may hold all, each holds a quarter. What the
    # allocator may add takes 134 MB.
    plan = cfp.plan(
        generate,
        *(weights, {"k": cache, "v": cache}, row, position),
        mesh=cfp.described("4xh200"),
        memory_budget="600MB",
        cache_dir=tmp_path,
        donate_argnums=1,
    )
    assert plan.predicted_bytes <= 600e6

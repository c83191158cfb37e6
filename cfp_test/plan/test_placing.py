"""Batches of the host's, where a plan wants them."""

import copy
import os
import pickle
import subprocess
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import cfp
from cfp.plan.execute import Arguments, mesh_here, placed
from cfp_test.cli.cli_runner import ROOT
from cfp_test.distributed.several import free_port
from cfp_test.support.checking import make_mesh
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import GUARD_SECONDS

MESH = make_mesh((("x", 4),))


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    def step(w, batch, scale):
        return (w * scale - 0.1 * (batch["x"] @ w - batch["y"]).mean()), batch["n"]

    batch = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 4)), "n": jnp.ones(8, int)}
    return cfp.plan(
        step,
        jnp.ones((4, 4)),
        batch,
        jnp.ones(()),
        mesh=make_mesh((("x", 4),)),
        preset="data_parallel",
        pins={"batch/*": PartitionSpec("x")},
        settings=cfp.PlannerSettings(race=False),
        cache_dir=tmp_path_factory.mktemp("cache"),
    )


def host_batch():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(8, 4)).astype(np.float32),
        "y": rng.normal(size=(8, 4)),  # in 64 bits, as NumPy has it
        "n": np.arange(8),
    }


def test_a_batch_goes_where_the_plan_has_it(plan):
    batch = host_batch()
    found = plan.place(batch)
    assert {name: a.sharding for name, a in found.items()} == plan.in_shardings[1]
    assert not found["x"].sharding.is_fully_replicated
    assert found["y"].dtype == jnp.float32
    assert found["n"].dtype == jnp.int32
    for name, array in found.items():
        np.testing.assert_array_equal(array, batch[name].astype(array.dtype))
    again = plan.place(found)
    assert all(again[name].sharding == a.sharding for name, a in found.items())


def test_an_argument_is_known_by_its_shape_or_name(plan):
    assert plan.place(np.float32(2)).shape == ()
    assert plan.place(np.ones((4, 4), np.float32)).sharding == plan.in_shardings[0]
    placed = plan.place(np.float32(2), argument="scale")
    assert placed.sharding == plan.in_shardings[2]


@pytest.mark.parametrize(
    ("batch", "argument", "reason"),
    [
        ({"x": np.ones((8, 4))}, None, r"The batch, x float32\[8,4\], has the struct"),
        (np.ones(3), "batch", r"The batch, float32\[3\], has the structure of none"),
        ({}, "batch", "The batch, no leaves, has the structure of none"),
        (np.ones(3), "labels", "no argument 'labels' with arrays"),
        (
            np.ones(3, np.float32),
            None,
            r"\[4,4\] for w, not float32\[3\]; float32\[\] for scale, not float32\[3\]",
        ),
        (np.ones((4, 4), int), "w", r"w, not int32\[4,4\]. Pass the planned dtype"),
        (jnp.ones(3), None, r"not float32\[3\]"),
        (jnp.ones((4, 4), int), "w", r"w, not int32\[4,4\]. Pass the planned dtype"),
        (
            {**host_batch(), "x": np.ones((6, 4))},
            None,
            r"float32\[8,4\] for batch/x, not float32\[6,4\]\. Pass the",
        ),
    ],
)
def test_what_does_not_fit_is_refused(plan, batch, argument, reason):
    with pytest.raises(cfp.PlanMismatch, match=reason):
        plan.place(batch, argument)


def test_a_wrong_argument_is_told_what_to_name():
    known = Arguments(("w", "batch/x"), ("float32[4]",) * 2, ((), ()), ("", ""), MESH)
    for name, hint in (("batches", "Did you mean 'batch'? "), ("zzz", "")):
        with pytest.raises(cfp.PlanMismatch) as caught:
            placed(known, np.ones(4), name)
        assert f"{hint}There are: w, batch. Without argument=" in str(caught.value)


def test_a_plan_is_saved_into_a_folder_that_is_missing(plan, tmp_path):
    plan.save(tmp_path / "missing" / "folder" / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "missing" / "folder" / "plan.json")
    assert loaded.to_json() == plan.to_json()
    plan.report(tmp_path / "pages" / "plan.html")
    assert "<html" in (tmp_path / "pages" / "plan.html").read_text()


@pytest.mark.parametrize("options", [{}, {"xla_dump_to": "/nowhere"}])
def test_a_plan_is_pickled_as_it_is_saved(plan, options):
    """Whoever reads a pickle trusts it, and so its compiler options."""
    chosen = replace(plan, options=options)
    found = pickle.loads(pickle.dumps(chosen))
    assert found.to_json() == chosen.to_json()
    assert found.step is None and found.mesh is None
    assert copy.copy(plan).step is plan.step and plan.step is not None


PROCESS = """
import sys
import jax, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[1]))
from dataclasses import replace
from cfp import PlanMismatch
from cfp.plan.execute import Arguments, placed
mesh = jax.make_mesh((4,), ("x",))
types, specs = ("float32[8]", "float32[3]"), ((("x",),), ((),))
known = Arguments(("batch", "w"), types, specs, ("", ""), mesh)
me = jax.process_index()
batch = placed(known, np.arange(4, dtype=np.float32) + 4 * me, "batch")
w = placed(known, np.ones(3, np.float32), "w")
mine = sorted(float(n) for shard in batch.addressable_shards for n in shard.data)
print(batch.shape, mine, w.shape, float(jax.jit(lambda b: (b * b).sum())(batch)))
for one, rows in ((known, 5), (replace(known, specs=(((),), ((),))), 4)):
    for argument in (None, "batch"):
        try:
            placed(one, np.ones(rows, np.float32), argument)
        except PlanMismatch as error:
            print(error)
"""


TYPE = "Pass the planned dtype and shape, or plan again."
ROWS = "The plan leaves batch whole: pass all rows, or set pins={'batch': 'x'}."
REFUSED = [
    f"The plan expects {expected}{other}. {remedy}"
    for expected, last, remedy in (
        ("float32[4] for batch in this process, not float32[5]", 5, TYPE),
        ("float32[8] for batch in this process, not float32[4]", 4, ROWS),
    )
    for other in (f"; float32[3] for w in this process, not float32[{last}]", "")
]


def test_each_process_passes_its_part():
    port = free_port()
    flags = "--xla_force_host_platform_device_count=2"
    where = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    where["PYTHONPATH"] = str(ROOT)
    address = f"127.0.0.1:{port}"
    started = [
        subprocess.Popen(
            [quick_python(), "-c", PROCESS, str(me), address],
            env=where,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in range(2)
    ]
    ended = [one.communicate(timeout=GUARD_SECONDS) for one in started]
    parts = ["[0.0, 1.0, 2.0, 3.0]", "[4.0, 5.0, 6.0, 7.0]"]
    for (out, err), part in zip(ended, parts, strict=True):
        first, *refused = out.splitlines()[-5:]
        assert first == f"(8,) {part} (3,) 140.0", err
        assert refused == REFUSED


def test_too_few_virtual_devices_say_how_to_have_more():
    with pytest.raises(cfp.PlanMismatch, match="host_platform_device_count=4096"):
        mesh_here((("x", 4096),), {"platform": "cpu"})
    with pytest.raises(cfp.PlanMismatch) as caught:
        mesh_here((("x", 2),), {"platform": "cuda"})
    with pytest.raises(cfp.PlanMismatch, match="is for 1 device of cuda, and"):
        mesh_here((), {"platform": "cuda"})
    assert "XLA_FLAGS" not in str(caught.value) and "plan.on(mesh, " in str(
        caught.value
    )


@pytest.mark.parametrize("draws", [False, True])
def test_other_platforms_are_offered_only_if_a_step_draws_no_random_numbers(draws):
    def step(w, key):
        return w + jax.random.normal(key, w.shape) if draws else w * 2

    given = jnp.ones((4, 4)), jax.random.key(0)
    plan = cfp.plan(step, *given, mesh=cfp.described("4xh100"), preset="replicated")
    with pytest.raises(cfp.PlanMismatch, match="these are 4 of cpu") as caught:
        plan.on(MESH)
    assert ("other_devices" in str(caught.value)) != draws


def test_of_arguments_with_one_shape_the_type_decides():
    def step(w, x, labels):
        return w - (x * labels).sum()

    x, labels = jnp.ones(8), np.arange(8, dtype=np.int32)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    plan = cfp.plan(step, jnp.ones(()), x, labels, mesh=mesh)
    for one in (labels, jnp.asarray(labels)):
        assert plan.place(one).dtype == jnp.int32
    assert plan.place(x).dtype == jnp.float32

"""A step that a plan does not fit: the message says in what, and where it begins."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

import cfp
from cfp.program import shardy
from cfp.program.read import (
    first_difference,
    outline_of,
)
from cfp.program.step import flatten_step
from cfp.program.trace import Lowering, planning_mesh, read_lowering, trace
from cfp_test.support.covering import at_night

W, X = jnp.ones((8, 16)), jnp.ones((4, 8))


def make_step(activation=jnp.tanh, sign=1.0, more=None, swapped=False):
    def step(w, x):
        h = activation(x @ w)
        pair = w.sum(), h.sum()
        pair = pair[::-1] if swapped else pair
        loss = sign * (pair[0] - pair[1])
        return w - 0.1, more(loss) if more else loss

    return step


@pytest.fixture(scope="module")
def plan(mesh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("misfit")
    made = cfp.plan(
        make_step(),
        W,
        X,
        mesh=mesh,
        preset="data_parallel",
        cache_dir=folder,
        settings=cfp.PlannerSettings(race=False),
    )
    made.save(folder / "plan.json")
    return cfp.Plan.load(folder / "plan.json", mesh=mesh)


CHANGES = {
    "another op": {"activation": jnp.sin},
    "other wiring": {"swapped": True},
    "one more op": {"more": jnp.exp},
    "more ops": {"more": lambda x: x * 3.0},
}


def test_the_first_operation_that_differs_is_shown(plan, golden):
    texts = {}
    for name, change in CHANGES.items():
        with pytest.raises(cfp.PlanMismatch) as refused:
            plan.compile(make_step(**change), W, X)
        texts[name] = str(refused.value)
    with jax.default_matmul_precision("highest"):
        with pytest.raises(cfp.PlanMismatch) as refused:
            plan.compile(make_step(), W, X)
    texts["another configuration"] = str(refused.value)
    for part in ("jax_version", "device_kind", "platform"):
        elsewhere = replace(plan, environment={**plan.environment, part: "another"})
        with pytest.raises(cfp.PlanMismatch) as refused:
            elsewhere.compile(make_step(jnp.sin), W, X)
        texts[part] = str(refused.value).replace(jax.__version__, "0.1")
    golden("misfit", texts)


def test_other_constants_are_no_difference(plan):
    plan.compile(make_step(sign=-3.0), W, X)


def scaled(w, rate):
    return w * (1 - rate)


def loaded_plan(mesh, tmp_path, w, rate):
    options = {"mesh": mesh, "preset": "replicated", "cache_dir": tmp_path}
    cfp.plan(scaled, w, rate, **options).save(tmp_path / "plan.json")
    return cfp.Plan.load(tmp_path / "plan.json", mesh=mesh)


@pytest.mark.parametrize("planned", [0.25, jnp.float32(0.25)])
def test_a_number_takes_the_place_of_an_array_where_both_compute_the_same(
    mesh, tmp_path, planned
):
    plan = loaded_plan(mesh, tmp_path, W + 1, planned)
    for rate in (0.5, jnp.asarray(0.5), jnp.float32(0.5), np.float32(0.5)):
        found = plan.compile(scaled, W + 1, rate)(W + 1, rate)
        np.testing.assert_array_equal(found, (W + 1) / 2)


def test_a_number_in_place_of_an_array_is_named_where_it_makes_other_types(
    mesh, tmp_path
):
    w = jnp.ones((8, 16), jnp.bfloat16)
    plan = loaded_plan(mesh, tmp_path, w, 0.25)
    with pytest.raises(cfp.PlanMismatch, match="A Python number has a weak type"):
        plan.compile(scaled, w, jnp.float32(0.25))


def test_bind_compares_results_and_compiling_the_program(plan):
    with pytest.raises(cfp.PlanMismatch, match="has 1 results, and the planned step"):
        plan.bind(lambda w, x: w - 0.1, W, X)
    bound = plan.bind(make_step(jnp.sin), W, X)
    with pytest.raises(cfp.PlanMismatch, match="is not the one that was planned"):
        bound.compile_bound()


def test_a_plan_has_shardings_once_it_is_bound(plan):
    assert not hasattr(plan, "in_shardings") and not hasattr(plan, "out_shardings")
    with pytest.raises(cfp.PlanMismatch, match=r"plan.bind\(step, \*args\) first"):
        _ = plan.in_shardings
    bound = plan.bind(make_step(), W, X)
    assert len(bound.in_shardings) == len(bound.out_shardings) == 2


def test_another_number_of_devices_is_named(plan):
    two = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with pytest.raises(cfp.PlanMismatch, match=r"plan's mesh is .* or plan again"):
        plan.on(two)


def program_of(step, mesh):
    return trace(flatten_step(step, (W, X)), mesh)[0]


def test_outlines_survive_json(mesh, plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    outline = cfp.Plan.load(tmp_path / "plan.json").outline
    program = program_of(make_step(), planning_mesh(mesh))
    assert outline == outline_of(program)
    assert len(outline.pairs()) == len(program.ops)


def test_a_constant_that_is_returned_is_of_no_line_of_cfp(plan):
    """JAX keeps no line of it: what surrounds the step is not it."""

    def constant(w, x):
        return w, jnp.float32(0)

    with pytest.raises(cfp.PlanMismatch) as caught:
        plan.apply(constant)(W, X)
    assert "operation 1 of 1: constant -> f32[], planned was" in str(caught.value)


def test_what_is_shorter_says_what_is_missing(mesh):
    where = planning_mesh(mesh)
    longer = outline_of(program_of(make_step(), where))
    longer = replace(longer, ops=f"{longer.ops} {longer.ops.split()[-1]}")
    assert "planned was" in first_difference(program_of(make_step(), where), longer)


@pytest.mark.parametrize(
    "damage",
    [
        {"ops": "@@@@"},
        {"kinds": ()},
        {"ops": "-1.0"},
        {"ops": "0.3f 0.xy"},
        {"ops": "0.3f0.a0.1"},
    ],
)
def test_damaged_outlines_are_refused(mesh, damage):
    sound = outline_of(program_of(make_step(), planning_mesh(mesh)))
    with pytest.raises(ValueError, match=r"^operations as KIND.DIGEST, KIND "):
        replace(sound, **damage)


# ------------------------------------------------------- made elsewhere, for GPUs


def dropped(w, key, x):
    """Random numbers of three kinds, forward and backward."""

    def loss_fn(w):
        h = jnp.tanh(x @ w)
        h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0.0)
        h = h + jax.random.normal(jax.random.fold_in(key, 1), h.shape)
        return (h * jax.random.uniform(jax.random.split(key)[0], h.shape)).mean()

    loss, grad = jax.value_and_grad(loss_fn)(w)
    return w - grad, loss


KEYS = {
    "typed": lambda: jax.random.key(0),
    "raw": lambda: jax.random.PRNGKey(0),
    "rbg": lambda: jax.random.key(0, impl="rbg"),
}


@pytest.mark.parametrize(
    "kind",
    # Keys of all kinds are drawn from alike.
    ["typed", *at_night(["raw", "rbg"])],
)
def test_a_described_plan_is_of_the_program_that_gpus_run(mesh, tmp_path, kind):
    """Lowered for CUDA, as JAX does on GPUs, for devices that are there.

    On CPUs it is another program, where random numbers are drawn in a loop, and the
    message says so.
    """
    args = W, KEYS[kind](), X
    ahead = cfp.plan(dropped, *args, mesh=cfp.described("4xh200"), cache_dir=tmp_path)
    step = flatten_step(dropped, args)
    replicated = NamedSharding(planning_mesh(mesh), PartitionSpec())
    run = jaxpr_as_fun(step.traced.jaxpr)
    traced = jax.jit(
        lambda *leaves: run(*leaves),
        in_shardings=(replicated,) * len(step.avals),
        out_shardings=replicated,
        keep_unused=True,
    ).trace(*step.avals)
    found = {}
    for platform in ("cpu", "cuda"):
        lowered = traced.lower(lowering_platforms=(platform,))
        module = lowered.compiler_ir("stablehlo")
        erased = shardy.normalise(module)
        tree = jax.tree.structure(step.traced.out_info)
        lowering = Lowering(lowered, module, tree, erased)
        found[platform] = read_lowering(step, lowering).fingerprint
    assert ahead.fingerprint == found["cuda"]
    if found["cpu"] != found["cuda"]:
        with pytest.raises(cfp.PlanMismatch, match="platform: planned for gpu, here"):
            ahead.on(mesh, other_devices=True).compile(dropped, *args)
    else:
        assert kind == "rbg", "threefry is a loop on CPUs"

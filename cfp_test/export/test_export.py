"""Plans as Python modules: the same program, and numbers, without cfp."""

import ast
import base64
import json
import sys
import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cfp
from cfp.errors import PlanFileError, PlanMismatch
from cfp.export import runtime
from cfp.export.module import python_module, ranges, spec_code
from cfp.export.runtime import numbers
from cfp.models.registry import build
from cfp.plan.parts import Site, Sites
from cfp.plan.plan import Plan
from cfp.profiling.hlo import collectives_in
from cfp.program.rematerialize import Rematerialization
from cfp.program.trace import trace
from cfp_test.cli.cli_runner import run_exported
from cfp_test.support.checking import make_mesh
from cfp_test.view.reported import HOSTILE

WIDTH = 16
SETTINGS = cfp.PlannerSettings(race=False)

# A step in a file of its own: a process without cfp imports it, too.
STEP = f"""
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

WIDTH = {WIDTH}


@jax.jit
def hidden(x):
    return jnp.where(x > 0, x, 0.1 * x)


def loss(params, x, power):
    for layer in params["layers"]:
        with jax.named_scope("layer"):
            x = hidden(x @ layer["up"]) @ layer["down"]
    def body(h, w):
        return jnp.tanh(h @ w), h.mean()
    x, means = jax.lax.scan(body, x, params["stack"])
    return (x**power).mean() + means.sum()


def step(params, x, power):
    value, grads = jax.value_and_grad(loss)(params, x, power)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(make):
    layer = {{"up": make(WIDTH, 4 * WIDTH), "down": make(4 * WIDTH, WIDTH)}}
    params = {{"layers": [layer] * 2, "stack": make(3, WIDTH, WIDTH)}}
    return params, make(32, WIDTH), 2
"""

SITE = Site(
    primitive="dot'); import os; os._exit(3) #",
    type="f32",
    value="out 0",
    which="0",
    spec=((),),
    source='a.py:1\nimport os; os._exit(3)\n"""',
)

RUN = """
import sys
sys.modules["cfp"] = None  # an import of it fails
import jax, numpy as np
import exported, my_step
rng = np.random.default_rng(0)
args = my_step.arguments(lambda *s: rng.standard_normal(s).astype("float32"))
sharded = exported.shard(my_step.step, *args)
params, loss = sharded(*args)
wanted, wanted_loss = jax.jit(my_step.step, static_argnums=2)(*args)
for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
spread = [not p.sharding.is_fully_replicated for p in jax.tree.leaves(params)]
print("SHARDED", sum(spread))
print("HLO", sharded.compiled.as_text())
"""


def load(text: str, name: str = "exported"):
    found: dict = {"__name__": name}
    exec(compile(text, name, "exec"), found)
    return found


@pytest.fixture(scope="module")
def my_step():
    return load(STEP, "my_step")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((("x", 4),))


@pytest.fixture(scope="module")
def plan(my_step, mesh, tmp_path_factory):
    """As it comes back from its file, with the step that it was made for."""
    shapes = my_step["arguments"](lambda *s: jax.ShapeDtypeStruct(s, jnp.float32))
    folder = tmp_path_factory.mktemp("plan")
    made = cfp.plan(
        my_step["step"],
        *shapes,
        mesh=mesh,
        static_argnums=2,
        donate_argnums=0,
        preset="fully_sharded",
        cache_dir=folder,
        settings=SETTINGS,
    )
    made.save(folder / "plan.json")
    return Plan.load(folder / "plan.json", mesh=mesh), made, shapes


def test_a_module_runs_where_cfp_cannot_be_imported(plan, my_step, mesh, tmp_path):
    loaded, _, shapes = plan
    loaded.export_python(tmp_path / "exported.py")
    (tmp_path / "my_step.py").write_text(STEP)
    printed = run_exported(RUN, tmp_path)
    head, _, hlo = printed.partition("HLO ")
    assert head.split() == ["SHARDED", "5"]
    compiled = loaded.compile(my_step["step"], *shapes)
    assert collectives_in(hlo) == collectives_in(compiled.as_text())
    assert collectives_in(hlo)


def test_a_module_for_one_device_has_no_constraints(my_step, tmp_path):
    """Also with a program of its own."""
    rng = np.random.default_rng(0)
    args = my_step["arguments"](lambda *s: rng.standard_normal(s).astype("float32"))
    made = cfp.plan(
        my_step["step"],
        *args,
        mesh=make_mesh((("x", 1),)),
        static_argnums=2,
        cache_dir=tmp_path,
        settings=SETTINGS,
    )
    assert not made.constraints.values
    again = Plan.from_json(json.loads(made.to_json()))
    assert again.sites is not None and not again.sites.sites
    for plan in (made, again, with_a_product_rematerialized(made)):
        plan.export_python(tmp_path / "exported.py")
        text = (tmp_path / "exported.py").read_text()
        exported = load(text)
        assert "MESH = {}" in text and exported["SITES"] == []
        if program := exported["PROGRAM"]:
            bytecode = zlib.decompress(base64.b85decode(program["bytecode"]))
            assert b"optimization_barrier" in bytecode
            assert b"sharding_constraint" not in bytecode
        found = exported["shard"](my_step["step"], *args)(*args)
        expected = jax.jit(my_step["step"], static_argnums=2)(*args)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
            found,
            expected,
        )
    assert exported["PROGRAM"]


def with_a_product_rematerialized(plan):
    program, _ = trace(plan.step, plan.mesh)
    product = next(op for op in program.ops if op.kind == "dot_general")
    reads = [op.id for op in program.ops if product.results[0] in op.operands]
    again = (Rematerialization((product.id,), (max(reads),)),)
    return replace(plan, constraints=replace(plan.constraints, rematerialized=again))


def test_a_model_of_the_zoo_has_the_same_collectives_exported(mesh, tmp_path):
    step, args = build("gpt", layers=1, hidden=16, vocab=32, seq=8, heads=4, batch=8)
    made = cfp.plan(
        step,
        *args,
        mesh=mesh,
        preset="tensor_parallel",
        cache_dir=tmp_path,
        settings=SETTINGS,
    )
    again = Plan.from_json(json.loads(made.to_json()), mesh=mesh)
    exported = load(python_module(again, again.sites))
    ours = again.compile(step, *args)
    theirs = exported["shard"](step, *args, mesh=mesh)
    assert collectives_in(theirs.compiled.as_text()) == collectives_in(ours.as_text())
    assert len(collectives_in(ours.as_text())) > 1
    assert theirs.shardings == ours.in_shardings
    assert again.sites is not None
    files = {site.source.partition(":")[0] for site in again.sites.sites}
    assert {"models/gpt.py", "models/layers.py", "models/train.py"} <= files


def test_sites_come_back_from_the_file(plan):
    loaded, made, _ = plan
    assert loaded.sites is not None
    assert loaded.sites == made.found_sites
    # A step that was never in a file has no lines; those of the models have.
    kinds = {(site.primitive, site.value[:3]) for site in loaded.sites.sites}
    assert {("dot_general", "out"), ("dot_general", "in ")} <= kinds


def test_a_module_is_readable(plan):
    loaded, _, _ = plan
    text = python_module(loaded, loaded.sites)
    assert "('params/layers/0/up', 'float32[16,64]', P('x'), True)," in text
    assert "MESH = {'x': 4}" in text and "STATIC = (2,)" in text
    assert len(text.splitlines()) < 700
    assert "import cfp" not in text and "from cfp" not in text


def test_another_step_is_refused(plan, my_step, mesh):
    loaded, _, shapes = plan
    shard = load(python_module(loaded, loaded.sites))["shard"]

    def other(params, x, power):
        return my_step["step"](params, x + 1, power)

    with pytest.raises(ValueError, match="is not the one that was planned"):
        shard(other, *shapes, mesh=mesh)
    wrong = jax.ShapeDtypeStruct((8, WIDTH), jnp.int32)
    params, x, power = shapes
    for args, lines in (
        ((params, wrong, power), "  x: planned for float32[32,16], got int32[8,16]"),
        (
            ({**params, "bias": x}, x, power),
            "  params/bias: planned for nothing, got float32[32,16]",
        ),
        (
            ({"layers": params["layers"]}, x, power),
            "  params/stack: planned for float32[3,16,16], got nothing",
        ),
        ((params, "x", power), "  x: planned for float32[32,16], got a str"),
    ):
        with pytest.raises(ValueError) as refused:
            shard(my_step["step"], *args, mesh=mesh)
        assert str(refused.value).splitlines() == [
            "The arguments are not those of the plan:",
            lines,
            "  try: the arguments that were planned for; or plan again, and export "
            "that plan",
        ]
    with pytest.raises(
        ValueError, match=r"  params/layers/0/down: .*(\n.*)*and 1 more"
    ):
        shard(lambda p, x, n: p, jax.tree.map(lambda _: wrong, params), wrong, power)


def test_what_has_a_type_describes_an_argument(plan, my_step, mesh):
    loaded, _, (params, x, power) = plan
    shard = load(python_module(loaded, loaded.sites))["shard"]
    typed = jax.core.ShapedArray(x.shape, x.dtype)  # pyright: ignore
    assert shard(my_step["step"], params, typed, power, mesh=mesh).static == {2: 2}


def test_arguments_behind_those_with_names_are_told_by_position(monkeypatch):
    def step(w, x, *rest, scale=None):
        return w

    three = [(name, "float32[2]", P(), False) for name in ("w", "x", "arg2")]
    monkeypatch.setattr(runtime, "ARGUMENTS", three)
    with pytest.raises(ValueError) as refused:
        runtime.shard(step, *[np.zeros(2, np.float32)] * 4, mesh=make_mesh((("x", 1),)))
    lines = str(refused.value).splitlines()
    assert lines[1:-1] == ["  arg3: planned for nothing, got float32[2]"]


def test_meshes_of_other_axes_are_refused_and_explicit_ones_are_not(plan, my_step):
    loaded, _, shapes = plan
    shard = load(python_module(loaded, loaded.sites))["shard"]
    explicit = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    assert shard(my_step["step"], *shapes, mesh=explicit).compiled is not None
    with pytest.raises(ValueError, match=r"for a mesh .'x': 4., got .'y': 4."):
        shard(my_step["step"], *shapes, mesh=make_mesh((("y", 4),)))


def test_a_module_refuses_arguments_that_it_was_not_compiled_for(plan, my_step, mesh):
    loaded, _, shapes = plan
    sharded = load(python_module(loaded, loaded.sites))["shard"](
        my_step["step"], *shapes, mesh=mesh
    )
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes[:2])
    with pytest.raises(ValueError, match=r"static arguments: {2: 2}, got {2: 3}"):
        sharded(*zeros, 3)
    params, x = zeros
    up = params["layers"][0]["up"][:, :3]  # Four devices cannot share it.
    layers = [{**params["layers"][0], "up": up}, params["layers"][1]]
    for args, said in (
        ((params, x[:8]), "  x: planned for float32.32,16., got float32.8,16.$"),
        (({**params, "layers": layers}, x), "  params/layers/0/up: .* float32.16,3.$"),
        (({**params, "stack": 0}, x), "  params/stack: .*, got int32.."),
        (({"stack": x}, x), "  params/layers/0/down: .* got nothing"),
        (({**params, "layers": (*params["layers"],)}, x), "  the arrays are the same"),
    ):
        with pytest.raises(ValueError, match=f"(?m)^{said}"):
            sharded(*args, 2)


def test_what_a_module_cannot_say_is_refused(plan):
    loaded, _, _ = plan
    with pytest.raises(PlanMismatch, match="does not say where in the step"):
        python_module(loaded, None)
    again = replace(loaded.constraints, rematerialized=(Rematerialization((0,), (1,)),))
    with pytest.raises(PlanMismatch, match="made from the step"):
        python_module(replace(loaded, constraints=again), loaded.sites)


def test_names_that_mean_harm_stay_names():
    sites = Sites(sites=(SITE,), equations=1, digest="'", inner=0)
    harmful = replace(HOSTILE, winner='"""\nimport os; os._exit(3)\n"""\\')
    found = load(python_module(harmful, sites))
    assert [row[0] for row in found["ARGUMENTS"]] == list(HOSTILE.arg_names)
    assert found["SITES"][0][0] == SITE.primitive


@pytest.mark.parametrize(
    "damage",
    [
        {"which": "0-99999999"},
        {"which": "0-"},
        {"value": "out"},
        {"value": "out 0; import os"},
        {"spec": None},
        {"primitive": 7},
    ],
    ids=str,
)
def test_damaged_sites_are_refused(plan, damage):
    _, made, _ = plan
    data = json.loads(made.to_json())
    data["sites"]["sites"][0] |= damage
    with pytest.raises(PlanFileError, match="damaged plan, in sites"):
        Plan.from_json(data)


@pytest.mark.parametrize("some", [[0], [0, 1, 2], [0, 2, 3, 9], []])
def test_ranges_come_back(some):
    assert (numbers(ranges(some)) if some else []) == some


@pytest.mark.parametrize(
    ("spec", "kind", "code"),
    [
        (((), ()), None, "P()"),
        (((), ("x",)), None, "P(None, 'x')"),
        ((("x", "y"), ()), None, "P(('x', 'y'))"),
        ((("x",), ("y",)), "key<fry>[4]", "P('x')"),
    ],
)
def test_shardings_as_python(spec, kind, code):
    assert spec_code(spec, kind) == code


def test_a_module_needs_jax_alone(plan):
    """And NumPy, which JAX needs."""
    loaded, _, _ = plan
    tree = ast.parse(python_module(loaded, loaded.sites))
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [
        name.split(".")[0]
        for node in imports
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    ]
    assert set(names) <= {*sys.stdlib_module_names, "jax", "numpy"}

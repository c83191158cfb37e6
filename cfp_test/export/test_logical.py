"""Plans as rules for logical names, applied by Flax itself."""

import ast
from types import SimpleNamespace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import meta
from flax.linen import spmd
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten_with_path

import cfp
from cfp.cli.reading import boxed_names, flax_text, maxtext_text, names_of
from cfp.export.module import applied, logical_rules, names_by_path
from cfp.models import logical_names
from cfp.profiling.hlo import collectives_in
from cfp.program.constrain import partition_spec
from cfp.targets import Target, resolve
from cfp_test.cli.cli_runner import run_batch
from cfp_test.support.checking import make_mesh

SETTINGS = cfp.PlannerSettings(race=False)
WORDS = "--layers 1 --hidden 32 --heads 4 --seq 16 --vocab 64 --batch 8".split()


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((("x", 4),))


@pytest.fixture(scope="module")
def target():
    return resolve("gpt", WORDS)


@pytest.fixture(scope="module")
def plans(target, mesh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")

    def planned(preset):
        return cfp.plan(
            target.step,
            *target.args,
            mesh=mesh,
            donate_argnums=0,
            preset=preset,
            settings=SETTINGS,
            cache_dir=folder,
        )

    return {name: planned(name) for name in ("tensor_parallel", "zero1")}


def tables(text):
    """Returns the names that a written module assigns."""
    return {
        node.targets[0].id: ast.literal_eval(node.value)  # pyright: ignore
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
    }


def test_flax_makes_the_plans_shardings_of_the_rules(plans, target, mesh):
    plan = plans["tensor_parallel"]
    rules = logical_rules(plan, names_of(plan, target, WORDS))
    found = tables(flax_text(plan, rules))
    assert found["MESH_AXES"] == {"x": 4}
    state, batch = logical_names("gpt", layers=1, hidden=32, heads=4)
    shardings = nn.logical_to_mesh_sharding(state, mesh, found["RULES"])  # pyright: ignore
    specs = dict(zip(plan.arg_names, plan.arg_specs, strict=True))
    leaves = tree_flatten_with_path(shardings)[0]
    seen = 0
    for path, sharding in leaves:
        name = f"state/{jax.tree_util.keystr(path, simple=True, separator='/')}"
        wanted = NamedSharding(mesh, partition_spec(specs[name]))
        assert sharding.is_equivalent_to(wanted, len(specs[name])), name
        seen += any(specs[name])
    assert seen > 10

    given = (shardings, nn.logical_to_mesh_sharding(batch, mesh, found["RULES"]))  # pyright: ignore
    text = (
        jax.jit(target.step, in_shardings=given, donate_argnums=0)
        .lower(*target.args)
        .compile()
        .as_text()
    )
    by_hand = (
        jax.jit(target.step, in_shardings=plan.in_shardings, donate_argnums=0)
        .lower(*target.args)
        .compile()
        .as_text()
    )
    assert collectives_in(text) == collectives_in(by_hand) != ()


def test_the_rules_as_yaml(plans, target):
    plan = plans["tensor_parallel"]
    rules = logical_rules(plan, names_of(plan, target, WORDS))
    text = maxtext_text(plan, rules)
    assert "mesh_axes: ['x']" in text
    assert "\n  ['mlp', ['x']],\n" in text
    assert "\n  ['embed', []],\n" in text


def test_a_name_that_needs_two_shardings_is_refused(plans, target):
    """ZeRO-1 keeps the moments otherwise than the parameters of the same names."""
    plan = plans["zero1"]
    with pytest.raises(cfp.PlanMismatch, match="cannot say how state/") as caught:
        logical_rules(plan, names_of(plan, target, WORDS))
    assert "--python" in str(caught.value)


def test_a_plan_without_names_is_refused(plans):
    with pytest.raises(cfp.PlanMismatch, match="have no logical names"):
        logical_rules(plans["zero1"], {})


class _Plan:
    """As much of a plan as rules need."""

    def __init__(self, **specs):
        self.arg_names = tuple(specs)
        self.arg_specs = tuple(
            tuple(tuple(axes.split()) for axes in spec) for spec in specs.values()
        )


def test_precedence_where_two_names_share_an_axis():
    plan = _Plan(a=("x", ""), b=("", "x"), c=("x", ""))
    names = {"a": ("embed", "mlp"), "b": ("norm", "mlp"), "c": ("embed", None)}
    rules = logical_rules(plan, names)
    assert [name for name, axes in rules if axes] == ["embed", "mlp"]
    assert applied(rules, ("embed", "mlp")) == (("x",), ())
    written = [(name, axes[0] if axes else None) for name, axes in rules]
    found = spmd.logical_to_mesh_axes(("embed", "mlp"), written)
    assert found == PartitionSpec("x", None)


def test_no_order_fits():
    plan = _Plan(a=("x", ""), b=("", "x"))
    with pytest.raises(cfp.PlanMismatch, match="No order of the logical names"):
        logical_rules(plan, {"a": ("embed", "mlp"), "b": ("embed", "mlp")})


@pytest.mark.parametrize(
    ("specs", "names", "reason"),
    [
        ({"a": ("x",), "b": ("y",)}, {"a": ("n",), "b": ("n",)}, "got: y"),
        ({"a": ("x",), "b": ("",)}, {"a": ("n",), "b": ("n",)}, "stays whole"),
        ({"a": ("x",)}, {"a": (None,)}, "have no logical names"),
        ({"a": ("x", "")}, {"a": (None, "n")}, "a name for each dim"),
        ({"a": ("x", "")}, {"a": ("n",)}, "2 names of dims"),
        ({"a": ("x",)}, {"b": ("n",)}, "1 names for other paths"),
    ],
)
def test_what_rules_cannot_say(specs, names, reason):
    with pytest.raises(cfp.PlanMismatch, match=reason):
        logical_rules(_Plan(**specs), names)


def test_two_axes_for_one_name():
    rules = logical_rules(_Plan(a=("x y", "")), {"a": ("n", "m")})
    assert rules == (("n", ("x", "y")), ("m", ()))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name, dims, width in (("up", ("embed", "mlp"), 64),):
            init = nn.with_logical_partitioning(nn.initializers.ones, dims)
            x = nn.Dense(width, name=name, kernel_init=init, use_bias=False)(x)
        init = nn.with_logical_partitioning(nn.initializers.ones, ("mlp", "embed"))
        return nn.Dense(16, name="down", kernel_init=init, use_bias=False)(x)


def test_names_in_boxes(mesh, tmp_path):
    net, x = Net(), jax.ShapeDtypeStruct((8, 16), np.float32)
    params = jax.eval_shape(net.init, jax.random.key(0), x)

    def step(params, x):
        grads = jax.grad(lambda p: (net.apply(p, x) ** 2).mean())(params)
        return optax.apply_updates(params, jax.tree.map(lambda g: -g, grads))

    plan = cfp.plan(
        step,
        params,
        x,
        mesh=mesh,
        preset="tensor_parallel",
        settings=SETTINGS,
        cache_dir=tmp_path,
    )
    target = Target(name="net", step=step, args=(params, x), make_args=None)
    names = boxed_names(plan, target)
    assert names["params/params/up/kernel/value"] == ("embed", "mlp")
    rules = tables(flax_text(plan, logical_rules(plan, names)))["RULES"]
    assert dict(rules) == {"embed": None, "mlp": "x"}
    made = nn.logical_to_mesh_sharding(nn.get_partition_spec(params), mesh, rules)  # pyright: ignore
    assert made["params"]["up"]["kernel"].spec == PartitionSpec(None, "x")
    assert made["params"]["down"]["kernel"].spec == PartitionSpec("x", None)


def test_names_by_path_leave_out_what_has_none():
    plan = _Plan(**{"state/w": ("x",), "state/n": (), "batch": ("",)})
    names = ({"w": PartitionSpec("embed"), "n": PartitionSpec()}, None)
    assert names_by_path(plan, names) == {"state/w": ("embed",)}


def test_the_command_line(plans, tmp_path):
    plans["tensor_parallel"].save(tmp_path / "plan.json")
    line = ["export", "plan.json", "gpt", *WORDS]
    written, bare, nothing = run_batch(
        [
            [*line, "--flax-logical", "rules.py", "--maxtext-rules", "rules.yml"],
            ["export", "plan.json", "--flax-logical", "rules.py"],
            ["export", "plan.json"],
        ],
        tmp_path,
    )
    assert written.code == 0, written.err
    assert ("mlp", "x") in tables((tmp_path / "rules.py").read_text())["RULES"]
    assert "logical_axis_rules" in (tmp_path / "rules.yml").read_text()
    assert "no logical names of dims" in bare.err
    assert "Name a file to write" in nothing.err


BOXED = """
import jax
import jax.numpy as jnp
from flax.core import meta


def boxed():
    def step(depth, params, x):
        def loss(params):
            up, down = (params[name].value for name in ("up", "down"))
            for _ in range(depth):
                h = jnp.tanh(x @ up) @ down
            return (h**2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {
        "up": meta.Partitioned(jnp.ones((16, 64)), names=("embed", "mlp")),
        "down": meta.Partitioned(jnp.ones((64, 16)), names=("mlp", "embed")),
    }
    return step, (2, params, jnp.ones((8, 16)))
"""


def test_static_arguments_are_the_plans_for_rules_too(mesh, tmp_path):
    (tmp_path / "boxed.py").write_text(BOXED)
    known = resolve(f"{tmp_path / 'boxed.py'}:boxed", static=(0,))
    plan = cfp.plan(
        known.step,
        *known.args,
        static_argnums=0,
        donate_argnums=1,
        mesh=mesh,
        preset="tensor_parallel",
        settings=SETTINGS,
        cache_dir=tmp_path,
    )
    plan.save(tmp_path / "plan.json")
    line = ["export", "plan.json", "boxed.py:boxed", "--flax-logical"]
    found, asked, wrong = run_batch(
        [
            [*line, "rules.py"],
            [*line, "asked.py", "--static", "0"],
            ["export", "plan.json", "gpt", *WORDS, "--maxtext-rules", "gpt.yml"],
        ],
        tmp_path,
    )
    assert (found.code, found.err) == (asked.code, asked.err) == (0, "")
    rules = tables((tmp_path / "rules.py").read_text())["RULES"]
    assert dict(rules) == {"embed": None, "mlp": "x"}
    assert tables((tmp_path / "asked.py").read_text())["RULES"] == rules
    assert wrong.code == 2 and "got: gpt, which has none" in wrong.err
    assert "static arguments at 0, as it was planned" in wrong.err
    assert "--donate" not in wrong.err and not (tmp_path / "gpt.yml").exists()


@flax.struct.dataclass
class Checked:
    """A state that looks at its fields when it is made."""

    w: Any

    def __post_init__(self):
        assert self.w.value.ndim == 2


def test_names_are_read_without_making_containers_again():
    boxed = meta.Partitioned(jnp.ones((2, 3)), names=("embed", "mlp"))
    plan = SimpleNamespace(arg_names=("state/w/value",))
    target = SimpleNamespace(args=(Checked(boxed),), static=())
    assert boxed_names(plan, target) == {"state/w/value": ("embed", "mlp")}

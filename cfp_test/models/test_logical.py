"""Logical names of dims: all have them, and without rules they leave no trace."""

import jax
import pytest
from jax.sharding import PartitionSpec

from cfp.models import MODELS, build, logical_names
from cfp.models.layers import constrain, mesh_spec, sharded_by
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp_test.models.tiny import TINY
from cfp_test.support.covering import at_night, cover_values


@cover_values(name=MODELS, scan=[False, True])
def test_every_dim_of_the_state_has_a_name(name, scan):
    options = {**TINY[name], "scan": scan}
    _, args = build(name, **options)
    names = logical_names(name, **options)
    assert jax.tree.structure(names) == jax.tree.structure(args)
    for leaf, spec in zip(jax.tree.leaves(args), jax.tree.leaves(names), strict=True):
        assert len(spec) == leaf.ndim
        assert all(isinstance(dim, str) for dim in spec)
        assert len(set(spec)) == len(spec)
    stacked = {"layers"} if scan else set()
    kernels = [s for s in jax.tree.leaves(names[0].params) if "embed" in s]
    assert len(kernels) > 8
    for spec in kernels:
        known = {"vocab", "position", "embed", "heads", "kv_heads", "head_dim", "mlp"}
        known |= {"experts", "type", "head_embed", "gate_experts", *stacked}
        assert set(spec) <= known


def mesh():
    return planning_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]))


# The mixture has GPT's layers.
@pytest.mark.parametrize(
    "name",
    ["bert", "llama", *at_night(["moe", "gpt"])],
)
def test_names_constrain_under_rules_only_and_the_planner_takes_them_out(name):
    # Every other layer is one of experts.
    options = {**TINY[name], "layers": 2 if name == "moe" else 1}
    step, args = build(name, **options)
    assert "sharding_constraint" not in jax.jit(step).lower(*args).as_text()
    plain, _ = trace(flatten_step(step, args), mesh())
    assert plain.rewritten.counts["constraints_left_out"] == 0

    # Another function: JAX knows what the first one traces to.
    step, args = build(name, **options)
    with sharded_by(mesh(), {"act_batch": "x"}):
        assert "sharding_constraint" in jax.jit(step).lower(*args).as_text()
        step, args = build(name, **options)
        ruled, lowering = trace(flatten_step(step, args), mesh())
    assert ruled.rewritten.counts["constraints_left_out"] > 0
    assert "sharding_constraint" not in lowering.text
    assert [(op.name, op.attributes) for op in ruled.ops] == [
        (op.name, op.attributes) for op in plain.ops
    ]


def test_an_axis_goes_to_the_first_dim_that_asks_for_it():
    rules = {"a": "x", "b": "x", "c": ("y", "x"), "d": "y"}
    assert mesh_spec(PartitionSpec("a", "b"), rules) == PartitionSpec("x", None)
    assert mesh_spec(PartitionSpec("b", "d", "c"), rules) == PartitionSpec(
        "x", "y", None
    )
    assert mesh_spec(PartitionSpec("c", "other", None), rules) == PartitionSpec(
        ("y", "x"), None, None
    )


def test_constraint_is_that_of_the_rules():
    def double(x):
        return 2 * constrain(x, ("rows", "columns"))

    x = jax.ShapeDtypeStruct((8, 4), "float32")
    with sharded_by(mesh(), {"columns": "x"}):
        text = jax.jit(double).lower(x).as_text()
    (line,) = (line for line in text.splitlines() if "sharding_constraint" in line)
    assert '[{}, {"x"}]' in line

import re
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cfp.errors import CfpError, OptionError, PlanMismatch, StepNotTraceable
from cfp.program import shardy
from cfp.program.constrain import Constraints, constrain
from cfp.program.jaxprs import equations
from cfp.program.step import flatten_step
from cfp.program.trace import lower_step, planning_mesh, trace
from cfp_test.support.checking import make_mesh

MESH = make_mesh((("x", 4),))
X = jnp.ones((8, 16))


class Pair(NamedTuple):
    first: object
    second: object


def replicated(step):
    spec = NamedSharding(MESH, PartitionSpec())
    return lower_step(step, [spec] * len(step.avals), spec)


def test_names_are_paths():
    def train_step(state, batch, *rest, rate):
        return state

    args = ({"a": {"w": X}, "b": [X, X]}, Pair(X, None), X)
    step = flatten_step(train_step, args, {"rate": {"x": 1.0}})
    assert step.arg_names == (
        "state/a/w",
        "state/b/0",
        "state/b/1",
        "batch/first",
        "arg2",
        "rate/x",
    )


def test_static_and_donated_arguments():
    def train_step(a, size, b):
        return a.reshape(size) + b.reshape(size)

    step = flatten_step(
        train_step,
        (X, (16, 8), X),
        static_argnums=(1,),
        donate_argnums=(-1,),
    )
    assert step.arg_names == ("a", "b")
    assert step.donated == (False, True)
    assert step.static == ((1, (16, 8)),)
    assert step.flatten((X, (16, 8), X), {})[1] is X
    assert step.flat_fn(X, X).shape == (16, 8)
    assert step.flat_fn.__name__ == "train_step"


def test_a_function_without_names():
    assert flatten_step(max, (X, X)).arg_names == ("arg0", "arg1")


def test_leaves_keep_type_and_weakness():
    args = (2.0, np.float64(1), np.ones(3, np.int64), True, X.astype(jnp.bfloat16))
    avals = flatten_step(
        lambda *a: a, (*args, jax.ShapeDtypeStruct((2,), "int8"))
    ).avals
    assert [str(a.dtype) for a in avals] == [
        "float32",
        "float32",
        "int32",
        "bool",
        "bfloat16",
        "int8",
    ]
    assert [a.weak_type for a in avals] == [True, False, False, False, False, False]


def test_keys_keep_their_type():
    step = flatten_step(lambda key: jax.random.split(key, 3), (jax.random.key(0),))
    program, _ = trace(step, MESH)
    assert step.avals[0].shape == ()
    assert program.values[program.args[0]].shape == (2,)
    assert program.output_avals[0].shape == (3,)


def test_refuses_what_is_no_array():
    with pytest.raises(StepNotTraceable, match="'name' is a str"):
        flatten_step(lambda name, x: x, ("adam", X))


@pytest.mark.parametrize(
    ("leaf", "kind"), [(jnp.tanh, "PjitFunction"), (np.array(["adam"]), "<U4")]
)
def test_what_is_no_array_among_arrays_is_added_inside(leaf, kind):
    """A static argument would make the arrays beside it static, too."""
    message = f"'model/way' is a {kind}.* pass only the arrays in 'model'"
    with pytest.raises(StepNotTraceable, match=message):
        flatten_step(lambda model: model["w"], ({"w": X, "way": leaf},))


@dataclass
class Unregistered:
    w: jax.Array


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s}])
def test_a_class_that_jax_does_not_know_is_to_be_registered(wrap):
    with pytest.raises(StepNotTraceable, match="register_dataclass"):
        flatten_step(lambda state: state, (wrap(Unregistered(X)),))


def test_refuses_another_structure():
    step = flatten_step(lambda s: s, ({"a": X},))
    with pytest.raises(PlanMismatch, match="structure changed"):
        step.flatten(({"b": X},), {})


@pytest.mark.explained("JAX could not trace the step")
def test_says_what_the_step_raised():
    def train_step(x):
        return x @ jnp.ones((3, 3))

    with pytest.raises(
        StepNotTraceable, match=r"(?s)'train_step':.*TypeError: dot_general"
    ):
        trace(flatten_step(train_step, (X,)), MESH)


class Branching:
    def __call__(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, partial, jax.jit, jax.checkpoint],
    ids=["plain", "partial", "jit", "checkpoint"],
)
@pytest.mark.parametrize("is_class", [False, True])
def test_jax_names_the_line_of_the_users_function(wrap, is_class):
    """Not one of what calls it."""

    def branching(x):
        return x if x.sum() > 0 else -x

    fn = Branching() if is_class else branching
    with pytest.raises(StepNotTraceable, match="TracerBool") as caught:
        trace(flatten_step(wrap(fn), (X,)), MESH)
    assert {*re.findall(r"\w+\.py\b", str(caught.value))} == {Path(__file__).name}
    assert "depends on the value of the argument x." in str(caught.value)


def test_the_step_is_traced_once():
    calls = []

    def train_step(x):
        calls.append(1)
        return jnp.tanh(x)

    step = flatten_step(train_step, (X,))
    trace(step, MESH)
    replicated(step)
    replicated(step)
    assert len(calls) == 1


def test_every_lowering_is_new():
    """An op that is put into one module must not show up in the next."""
    step = flatten_step(lambda x: jnp.tanh(x @ x.T), (X,))
    program, _ = trace(step, MESH)
    first, second = replicated(step), replicated(step)
    rows = Constraints({op.results[0]: (("x",), ()) for op in program.ops[-2:]}, {})
    constrain(first.module, program, MESH, rows)
    assert "sharding_constraint" in str(first.module)
    assert "sharding_constraint" not in str(second.module)
    one, other = first.lowered.compile(), second.lowered.compile()
    assert one.as_text() != other.as_text()


def test_outputs_keep_their_structure():
    step = flatten_step(lambda x: {"a": Pair(x, None), "b": (x, 3.0)}, (X,))
    spec = NamedSharding(MESH, PartitionSpec())
    lowering = lower_step(step, [spec], [spec, spec, spec])
    leaves = lowering.lowered.compile()(X)
    found = jax.tree.unflatten(lowering.out_tree, leaves)
    assert isinstance(found["a"], Pair)
    assert found["b"][1] == 3.0


def test_output_names():
    program, _ = trace(flatten_step(lambda x: {"a": Pair(x, None), "b": x}, (X,)), MESH)
    assert program.output_names == ("a/first", "b")


def test_user_constraints_are_erased_and_counted():
    rows = NamedSharding(MESH, PartitionSpec("x"))

    def train_step(x):
        return jax.lax.with_sharding_constraint(x * 2, rows).sum()

    program, lowering = trace(flatten_step(train_step, (X,)), MESH)
    assert program.rewritten.counts["constraints_left_out"] == 1
    names = {op.name for op in shardy.walk(shardy.main_function(lowering.module))}
    assert "sdy.sharding_constraint" not in names


def test_what_a_composite_stands_for_may_call_others():
    @jax.jit
    def doubled(x):
        return 2 * jax.jit(jnp.sin)(x)

    def step(x):
        return jax.lax.composite(lambda x: doubled(x) + 1, "a.kernel")(x)

    lowering = replicated(flatten_step(step, [jnp.ones((8, 4))]))
    assert "stablehlo.composite" in lowering.text
    assert "named_computation" not in lowering.text
    assert "data_flow_edge" not in lowering.text
    [found] = lowering.lowered.compile()(jnp.ones((8, 4)))
    np.testing.assert_allclose(found, 2 * np.sin(np.ones((8, 4))) + 1, rtol=1e-6)


def test_aliases_of_donated_arguments():
    step = flatten_step(lambda s, x: (s + x, x), (X, X), donate_argnums=(0,))
    program, _ = trace(step, MESH)
    assert program.alias == (0, None)


def test_planning_mesh():
    explicit = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    mesh = planning_mesh(explicit)
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 2
    with pytest.raises(CfpError, match="make_mesh"):
        planning_mesh((2, 2))


def test_tracing_allocates_nothing():
    huge = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program, _ = trace(flatten_step(lambda x: x @ x, (huge,)), MESH)
    assert [op.kind for op in program.ops] == ["dot_general"]


def test_positions_that_a_step_has_no_argument_for_are_refused():
    def step(s, x, scale=1.0):
        return s + scale * x

    for option in ("static_argnums", "donate_argnums"):
        with pytest.raises(OptionError, match=rf"{option} names positions \[5\]"):
            flatten_step(step, (X, X), **{option: 5})
    assert flatten_step(step, (X, X), static_argnums=2).static == ((2, 1.0),)


def test_integers_of_four_bits_are_refused_in_words_where_jax_passes_none():
    args = ({"codes": jnp.zeros(8, jnp.int4)},)
    if jax.__version_info__ >= (0, 11):
        [aval] = flatten_step(lambda codes: codes, args).avals
        assert aval.dtype == jnp.int4
        return
    with pytest.raises(StepNotTraceable, match=r"'codes/codes' of type int4.*8 bits"):
        flatten_step(lambda codes: codes, args)


def test_programs_inside_named_tuples_are_entered():
    def solved(w, x):
        return jax.scipy.sparse.linalg.cg(lambda v: w @ v, x)[0]

    traced = jax.make_jaxpr(solved)(jnp.eye(4), jnp.ones(4))
    solve = next(e for e in equations(traced.jaxpr) if "solve" in e.primitive.name)
    assert isinstance(solve.params["jaxprs"], tuple)
    inside = [e.primitive.name for e in equations(traced.jaxpr)]
    assert inside.count("dot_general") >= 2

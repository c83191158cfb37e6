"""Exported plans of steps whose modules hold functions and settings."""

from collections.abc import Hashable
from dataclasses import dataclass

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.tree_util import all_leaves, tree_leaves

import cfp
from cfp.program.fixed import Fixed, fixed, released
from cfp_test.checks.module_steps import Net, training, updating
from cfp_test.cli.cli_runner import ROOT, run_exported
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

# In a process where cfp cannot be imported: three steps of both, and what they return.
RUN = """
import sys

sys.modules["cfp"] = None
import equinox as eqx
import jax
import numpy as np
from exported import shard
from module_steps import {name} as target

step, args = target()
sharded, plain = shard(step, *args), eqx.filter_jit(step)
state = len(args) - 2 if len(args) > 2 else 1
mine, theirs = args[:state], args[:state]
for _ in range(3):
    made, wanted = sharded(*mine, *args[state:]), plain(*theirs, *args[state:])
    mine, theirs = (made[:state], wanted[:state]) if state > 1 else ([made], [wanted])
    assert jax.tree.structure(made) == jax.tree.structure(wanted)
    for found, one in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        if eqx.is_array(one):
            np.testing.assert_allclose(found, one, rtol=1e-4, atol=1e-5)
        else:
            assert found == one
print("SAME")
"""


@pytest.mark.parametrize(
    "target", [training, *at_night([updating])], ids=lambda f: f.__name__
)
def test_modules_run_where_cfp_cannot_be_imported(target, tmp_path):
    step, args = target()
    made = cfp.plan(
        step,
        *args,
        mesh=make_mesh((("x", 4),)),
        preset="data_parallel",
        cache_dir=tmp_path,
        settings=cfp.PlannerSettings(race=False),
    )
    made.save(tmp_path / "plan.json")
    cfp.Plan.load(tmp_path / "plan.json").export_python(tmp_path / "exported.py")
    text = (ROOT / "cfp_test" / "checks" / "module_steps.py").read_text()
    (tmp_path / "module_steps.py").write_text(text)
    printed = run_exported(RUN.format(name=target.__name__), tmp_path)
    assert printed.split() == ["SAME"]


class Numbers(eqx.Module):
    scale: float
    inner: object


@flax.struct.dataclass
class State:
    step: int
    done: bool
    params: object


@dataclass(frozen=True)
class Like:
    """A setting that says what arrays look like, and is none."""

    shape: tuple[int, ...] = (2, 3)
    dtype: object = np.float32


X = np.ones((2, 3))
NET = Net(jax.random.key(0))
DROP = eqx.nn.Dropout(0.25)
CASES = [
    X,
    3.0,
    {"a": (X, [1, True, None]), "b": "text"},
    NET,
    (NET, {"net": NET, "rate": 0.1}),
    eqx.filter(NET, eqx.is_array),
    DROP,
    Numbers(0.5, X),
    Numbers(0.5, True),
    Numbers(0.5, (X, DROP)),
    Numbers(0.5, {"x": [X, Numbers(1.0, DROP)], "y": Numbers(2.0, X)}),
    Numbers(0.5, [jnp.tanh, X, Numbers(1, 2)]),
    Numbers(0.5, {"dtype": np.float32, "w": X}),
    Numbers(0.5, {"dtype": np.int32, "w": X}),
    Numbers(0.5, {"like": Like(), "w": X}),
    State(step=1, done=True, params={"w": X}),
    State(step=1, done=True, params=DROP),
    TrainState.create(apply_fn=None, params={"w": X}, tx=optax.adam(1e-3)),
    optax.adam(1e-3).init({"w": X}),
    jax.eval_shape(lambda: {"x": jnp.ones(3)}),
]


def in_program(tree):
    """For each leaf whether it is part of the program, as it was when planned.

    All that is no array in a module in which something is no number either, and in a
    module inside of one that has a bool and no arrays. Modules are nodes of a pytree
    that are no containers of plain Python.
    """
    if not any(isinstance(x, bool) or not _may_be_array(x) for x in tree_leaves(tree)):
        return [False] * len(tree_leaves(tree))
    parts = tree_leaves(tree, is_leaf=_is_module)
    return [found for part in parts for found in _in_module(part)]


def _in_module(module):
    if not _is_module(module):
        return [False]
    leaves = tree_leaves(module)
    has_bool = any(isinstance(x, bool) for x in leaves)
    if not all(map(_may_be_array, leaves)) or (
        has_bool and not any(map(_is_array, leaves))
    ):
        return [not _is_array(x) and isinstance(x, Hashable) for x in leaves]
    if not has_bool:
        return [False] * len(leaves)
    parts = tree_leaves(module, is_leaf=lambda x: x is not module and _is_module(x))
    return [found for part in parts for found in _in_module(part)]


def _is_module(node):
    plain = (dict, list, tuple, type(None), bool, int, float, complex, str)
    return not isinstance(node, plain) and not all_leaves([node])


def _is_array(leaf):
    is_type = isinstance(leaf, type)  # A type of NumPy's has its arrays' attributes.
    has_numbers = hasattr(leaf, "__array__") and not is_type
    return has_numbers or isinstance(leaf, jax.ShapeDtypeStruct)


def _may_be_array(leaf):
    return _is_array(leaf) or isinstance(leaf, bool | int | float | complex)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_pytrees_are_split_by_one_rule_and_joined(case):
    """Arrays are arguments; what else a module holds is part of the program."""
    tree = CASES[case]
    kept = jax.tree.leaves(fixed(tree), is_leaf=lambda x: isinstance(x, Fixed))
    assert in_program(tree) == [isinstance(leaf, Fixed) for leaf in kept]
    arrays, structure = jax.tree.flatten(fixed(tree))
    assert len(arrays) == in_program(tree).count(False)
    again = released(jax.tree.unflatten(structure, arrays))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    pairs = zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True)
    assert all(mine is given for mine, given in pairs)

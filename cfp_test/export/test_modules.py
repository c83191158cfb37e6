"""Exported plans of steps whose modules hold functions and settings."""

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import cfp
from cfp.export.runtime import in_program, joined, split
from cfp.program.fixed import Fixed, fixed
from cfp_test.checking import make_mesh
from cfp_test.cli_runner import ROOT, run_exported
from cfp_test.module_steps import Net, training, updating

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


@pytest.mark.parametrize("target", [training, updating], ids=lambda f: f.__name__)
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
    text = (ROOT / "cfp_test" / "module_steps.py").read_text()
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
    State(step=1, done=True, params={"w": X}),
    State(step=1, done=True, params=DROP),
    TrainState.create(apply_fn=None, params={"w": X}, tx=optax.adam(1e-3)),
    optax.adam(1e-3).init({"w": X}),
    jax.eval_shape(lambda: {"x": jnp.ones(3)}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_module_splits_pytrees_as_cfp_does(case):
    """A plan and its exported module go by one rule."""
    tree = CASES[case]
    kept = jax.tree.leaves(fixed(tree), is_leaf=lambda x: isinstance(x, Fixed))
    assert in_program(tree) == [isinstance(leaf, Fixed) for leaf in kept]
    arrays, structure = split(tree)
    assert len(arrays) == len(jax.tree.leaves(fixed(tree)))
    again = joined(structure, arrays)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    pairs = zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True)
    assert all(mine is given for mine, given in pairs)

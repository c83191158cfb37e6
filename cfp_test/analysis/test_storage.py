"""State, its updates, and which output renews which argument."""

import jax
import jax.numpy as jnp
import optax
import pytest

from cfp.analysis.flow import Flow
from cfp.analysis.storage import extend_spec, find_storage, pair_outputs
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.programs.common import normal
from cfp_test.programs.registry import PROGRAMS
from cfp_test.support.checking import make_mesh

MESH = make_mesh((("x", 4),))


def storage(fn, args, **options):
    program, _ = trace(flatten_step(fn, args, **options), MESH)
    flow = Flow(program)
    paired = pair_outputs(flow)
    return program, paired, find_storage(flow, paired)


def of_example(name):
    fn, args, *rest = PROGRAMS[name]()
    options = {
        k: v for k, v in (rest[0] if rest else {}).items() if k == "donate_argnums"
    }
    return storage(fn, args, **options)


def names(program, groups):
    return [[program.arg_names[a] for a in g.args] for g in groups]


def test_a_parameter_with_its_moments():
    program, paired, groups = of_example("mlp")
    assert names(program, groups)[0] == [
        "state/params/a/b",
        "state/opt/0/mu/a/b",
        "state/opt/0/nu/a/b",
    ]
    assert len(groups) == 4
    for group in groups:
        assert None not in {paired[a] for a in group.args}
        assert group.read_args == {group.args[0]}
        (gradient,) = group.gradients
        assert program.values[program.values[gradient].producer].shape is not None
        assert group.inner_ops == ()
    x = program.arg_names.index("batch/x")
    assert paired[x] is None


def test_update_ops_lead_to_no_contraction():
    program, _, groups = of_example("transformer")
    inside = {op for g in groups for op in g.ops}
    assert all(program.ops[i].kind != "dot_general" for i in inside)
    kinds = {program.ops[i].kind for i in groups[0].ops}
    assert {"multiply", "add", "sqrt", "divide"} <= kinds


@pytest.mark.parametrize("name", ["scan_mlp", "scan_transformer", "module_scan"])
def test_stacked_parameters(name):
    """Gradients that a loop stacks, and slices that it takes, belong to the group."""
    program, _, groups = of_example(name)
    stacked = [g for g in groups if g.shape[0] == 3]
    assert stacked
    for group in stacked:
        kinds = [program.ops[i].kind for i in group.inner_ops]
        assert "dynamic_update_slice" in kinds
        slices = [i for i in group.reads if program.ops[i].kind == "dynamic_slice"]
        assert slices
        assert group.whole_dims == {0}
        # The gradient enters where one layer's is made.
        for v in group.gradients:
            assert 3 not in program.values[v].shape[:1]


def test_accumulated_gradients():
    program, _, groups = of_example("microbatch")
    for group in groups:
        kinds = {program.ops[i].kind for i in group.inner_ops}
        assert "add" in kinds
        assert group.whole_dims == frozenset()


def test_updates_every_second_step():
    """Optax computes the update in each step, and selects by the counter."""
    program, _, groups = of_example("multi_steps")
    assert len(groups) == 2
    for group in groups:
        assert len(group.args) == 4  # parameter, two moments, gathered gradients
        kinds = {program.ops[i].kind for i in group.ops}
        assert {"sqrt", "select"} <= kinds


def test_updates_in_branches():
    tx = optax.adam(1e-2)

    def step(state, x, finite):
        grads = jax.grad(lambda w: jnp.sin(x @ w).sum())(state["w"])

        def update(state):
            updates, opt = tx.update(grads, state["opt"])
            return {"w": optax.apply_updates(state["w"], updates), "opt": opt}

        return jax.lax.cond(finite, update, lambda state: state, state)

    w = normal(0, 16, 4)
    state = {"w": w, "opt": tx.init(w)}
    program, paired, groups = storage(step, (state, normal(1, 8, 16), True))
    (group,) = (g for g in groups if g.shape)
    assert [program.arg_names[a] for a in group.args] == [
        "state/w",
        "state/opt/0/mu",
        "state/opt/0/nu",
    ]
    assert None not in {paired[a] for a in group.args}
    assert {"sqrt", "divide"} <= {program.ops[i].kind for i in group.inner_ops}
    (gradient,) = group.gradients
    assert program.ops[program.values[gradient].producer].kind == "dot_general"


def test_norms_are_taken_of_what_is_stored():
    program, _, groups = of_example("momentum")
    for group in groups:
        kinds = [program.ops[i].kind for i in group.ops]
        assert "reduce" in kinds


def test_statistics_of_a_batch():
    program, _, groups = of_example("conv_net")
    found = names(program, groups)
    assert ["state/batch_stats/BatchNorm_0/mean"] in found
    assert all(len(g.args) == 3 for g in groups if "params" in _first(program, g))


def _first(program, group):
    return program.arg_names[group.args[0]]


def test_modules_with_their_optimizer():
    _, _, groups = of_example("nnx")
    sizes = sorted(len(g.args) for g in groups)
    assert sizes == [1, 1, 3, 3, 3, 3, 3, 3]


def test_two_updates_in_one_step():
    """That new weights are used at once does not keep them from being sharded."""
    program, _, groups = of_example("two_updates")
    critic = [g for g in groups if "critic" in _first(program, g)]
    assert [len(g.args) for g in critic] == [3, 3]
    assert all(g.ops for g in critic)


def test_a_loop_of_updates():
    def train(w, xs):
        def body(w, x):
            return w - 0.1 * jax.grad(lambda w: jnp.sin(x @ w).sum())(w), None

        return jax.lax.scan(body, w, xs)[0]

    program, paired, groups = storage(train, (normal(0, 16, 4), normal(1, 5, 8, 16)))
    assert paired == (0, None)
    (group,) = groups
    assert {program.ops[i].kind for i in group.inner_ops} >= {"subtract", "multiply"}


def test_caches_are_state_without_updates():
    program, _, groups = of_example("serving")
    assert names(program, groups) == [["cache/k"], ["cache/v"]]
    assert all(g.ops == () for g in groups)


def test_pairs_by_path_before_donation():
    def step(state, x):
        return {"b": state["b"] + x, "a": state["a"] * x}

    x = normal(0, 8, 8)
    program, paired, _ = storage(step, ({"a": x, "b": x}, x), donate_argnums=(0,))
    assert program.output_names == ("a", "b")
    assert paired == (0, 1, None)


def test_pairs_by_donation_where_paths_differ():
    def step(old, x):
        return {"new": old["old"] + x}

    x = normal(0, 8, 8)
    assert storage(step, ({"old": x}, x), donate_argnums=(0,))[1] == (0, None)
    assert storage(step, ({"old": x}, x))[1] == (None, None)


def test_bare_arrays_pair_with_what_renews_them():
    w, x = normal(0, 8, 8), normal(1, 8, 8)

    def train(w, x):
        return w - 0.1 * x.T @ jnp.sin(x @ w), x @ w

    def serve(w, x):
        return jnp.sin(x) @ w

    def hand_on(w, x):
        return x @ w, w

    assert storage(train, (w, x))[1] == (0, None)
    assert storage(serve, (w, x))[1] == (None, None)
    assert storage(hand_on, (w, x))[1] == (1, None)


@pytest.mark.parametrize("arguments", ["params, moments", "state", "arrays"])
@pytest.mark.parametrize("wrap", [lambda flag, out: (flag, out), lambda *x: {"a": [x]}])
def test_state_that_lies_deeper_in_results_is_state(arguments, wrap):
    def update(params, moments, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        params = jax.tree.map(lambda p, m: p - m, params, moments)
        return wrap(jnp.isnan(loss), ((params, moments), loss))

    def of_state(state, x):
        return update(*state, x)

    def of_arrays(w, m, x):
        return update({"w": w}, {"w": m}, x)

    w, x = normal(0, 16, 16), normal(1, 16, 16)
    step, args = {
        "params, moments": (update, ({"w": w}, {"w": w}, x)),
        "state": (of_state, (({"w": w}, {"w": w}), x)),
        "arrays": (of_arrays, (w, w, x)),
    }[arguments]
    _, paired, groups = storage(step, args)
    assert paired[2] is None
    assert paired[1] == paired[0] + 1
    assert [sorted(group.args) for group in groups] == [[0, 1]]


def test_a_result_of_the_same_type_deeper_is_no_new_state():
    """Data that the step only reads has the path of what it returns."""

    def step(state, batch):
        out = jnp.tanh(batch["w"]) @ state["w"]
        return True, ({"w": state["w"] + out}, {"seen": {"w": jnp.sin(out)}})

    w = normal(0, 16, 16)
    assert storage(step, ({"w": w}, {"w": w}))[1] == (1, None)


def test_one_argument_for_one_output():
    def step(a, b):
        return a + (a @ b) * 0.1

    x = normal(0, 8, 8)
    paired = storage(step, (x, x))[1]
    assert sorted(p for p in paired if p is not None) == [0]


def test_arrays_of_one_element():
    """Numbers must not tie the states of all parameters together."""
    params = {"a": normal(0, 16, 16), "b": normal(1, 1), "c": normal(2, 1, 1)}
    tx = optax.adam(1e-2)

    def step(state, x):
        def loss(p):
            return jnp.sin(x @ p["a"] * p["b"] + p["c"]).sum()

        updates, opt = tx.update(jax.grad(loss)(state["params"]), state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    state = {"params": params, "opt": tx.init(params)}
    _, _, groups = storage(step, (state, normal(3, 8, 16)))
    assert sorted(len(g.args) for g in groups) == [1, 1, 1, 1, 1, 1, 3]


@pytest.mark.parametrize("names_of_state", ["ab", "ba"])
def test_a_vector_whose_values_are_columns_of_a_table_is_stored_by_itself(
    names_of_state,
):
    vector, table = names_of_state

    def step(state, w):
        def body(state, i):
            x = jnp.tanh(state["x"] @ w)
            best = jnp.minimum(state[vector], x.mean(-1))
            rows = jax.lax.dynamic_update_slice(state[table], best[:, None], (0, i))
            return {"x": x, vector: best, table: rows}, None

        return jax.lax.scan(body, state, jnp.arange(8))[0]

    state = {"x": normal(0, 32, 16), vector: jnp.ones(32), table: jnp.zeros((32, 8))}
    program, _, groups = storage(step, (state, normal(1, 16, 16)))
    shapes = [
        {program.values[program.args[position]].shape for position in group.args}
        for group in groups
    ]
    assert {(32,)} in shapes and {(32, 8)} in shapes
    assert all(len(found) == 1 for found in shapes)


@pytest.mark.parametrize("before", ["nothing", "where", "times two"])
def test_what_is_done_with_state_before_a_loop_that_returns_it_is_no_update(before):
    """Hidden state that is reset, and goes through a recurrent net."""

    def step(w, hidden, x, reset):
        if before == "where":
            hidden = jnp.where(reset[:, None], 0.0, hidden)
        elif before == "times two":
            hidden = hidden * 2.0

        def cell(hidden, x):
            return jnp.tanh(x + hidden @ w), None

        return jax.lax.scan(cell, hidden, x)[0]

    args = normal(0, 16, 16), normal(1, 32, 16), normal(2, 8, 32, 16), jnp.zeros(32) > 0
    _, _, [group] = storage(step, args)
    assert (group.args, group.ops) == ((1,), ())


@pytest.mark.parametrize("loop", [False, True])
def test_state_that_is_read_as_soon_as_it_is_made_is_no_update(loop):
    """Sums of products that a linear attention keeps: no gradient is part of them."""

    def one(sums, x, w):
        q, k, v = (x @ w[name] for name in "qkv")
        sums = 0.9 * sums + k[:, :, None] * v[:, None, :]
        return sums, jnp.einsum("bd,bde->be", q, sums)

    def step(sums, x, w):
        if not loop:
            return one(sums, x, w)
        return jax.lax.scan(lambda s, _: one(s, x, w), sums, None, length=3)

    args = normal(0, 8, 4, 4), normal(1, 8, 4), {n: normal(2, 4, 4) for n in "qkv"}
    _, _, [group] = storage(step, args)
    assert (group.args, group.ops, group.inner_ops) == ((0,), (), ())
    assert not group.has_update


def test_moments_that_products_read_are_an_update():
    """The update is made orthogonal: products read the moment that a gradient made."""

    def step(w, m, x):
        m = 0.9 * m + jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
        return w - 0.1 * (1.5 * m - 0.5 * m @ m.T @ m), m

    args = normal(0, 16, 16), normal(1, 16, 16), normal(2, 8, 16)
    program, _, groups = storage(step, args)
    kinds = {program.ops[i].kind for group in groups for i in group.ops}
    assert "add" in kinds and all(group.has_update for group in groups)
    assert {position for group in groups for position in group.args} == {0, 1}


@pytest.mark.parametrize("read", [False, True])
def test_what_a_loop_fills_is_an_update_unless_it_is_read_there(read):
    def step(seen, x, w):
        def body(carry, i):
            seen, x = carry
            x = jnp.tanh(x @ w)
            seen = jax.lax.dynamic_update_slice(seen, x[None], (i, 0, 0))
            return (seen, x + seen.mean(0) @ w if read else x), None

        return jax.lax.scan(body, (seen, x), jnp.arange(4))[0][0]

    args = normal(0, 4, 8, 16), normal(1, 8, 16), normal(2, 16, 16)
    program, _, [group] = storage(step, args)
    kinds = {program.ops[i].kind for i in group.inner_ops}
    assert ("dynamic_update_slice" in kinds) != read
    assert not group.has_update


@pytest.mark.parametrize("handed_on_by", ["branch", "barrier"])
def test_new_state_that_is_read_behind_a_branch_or_barrier_is_an_update(handed_on_by):
    def step(w, m, x):
        gradient = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
        m = 0.9 * m + gradient
        new = w - 0.1 * m
        if handed_on_by == "barrier":
            new = jax.lax.optimization_barrier(new)
            return new, m, jnp.tanh(x @ new).sum()
        right = jnp.isfinite(jnp.tanh(x @ new).sum())
        return jax.lax.cond(right, lambda: (new, m), lambda: (w, m))

    _, _, groups = storage(
        step, (normal(0, 16, 16), normal(1, 16, 16), normal(2, 8, 16))
    )
    [group] = groups
    assert set(group.args) == {0, 1}
    assert group.ops


@pytest.mark.parametrize(
    ("shape", "mesh", "largest"),
    [
        ((4096, 16384), {"x": 2}, 1),
        ((16384, 4096), {"x": 2}, 0),
        ((4096, 4096), {"x": 2}, 0),
        ((4096, 32, 128), {"x": 2}, 0),
        # Heads and what is in them are as large as the hidden dim.
        ((32, 128, 4096), {"x": 2}, 0),
        ((32, 128, 4096), {"x": 2, "y": 16}, 0),
        # Eight devices do not divide twelve heads; nor is it square.
        ((12, 64, 768), {"x": 2, "y": 4}, 2),
        ((8, 128, 4096), {"x": 2}, 2),
        ((32, 1280, 5120), {"x": 2}, 2),
        ((7, 2, 14), {"x": 2}, 2),
    ],
)
def test_by_hand_a_matrix_is_sharded_along_its_first_or_largest_dim(
    shape, mesh, largest
):
    whole = ((),) * len(shape)
    axes = tuple(mesh.items())
    wanted = [()] * len(shape)
    wanted[largest] = tuple(mesh)
    assert extend_spec(whole, shape, axes, largest=True) == tuple(wanted)
    first = next(d for d, size in enumerate(shape) if size % mesh["x"] == 0)
    assert "x" in extend_spec(whole, shape, axes)[first]
    # Stacked for a loop, that dim stays whole and does not count.
    for layers in (4, 16):
        stacked = extend_spec(((), *whole), (layers, *shape), axes, {0}, largest=True)
        assert stacked == ((), *wanted)

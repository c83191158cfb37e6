"""One device's computation of a partitioned program, as a program of its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfp.program.local import dump_options, lower_local, partitioned_program
from cfp.program.signature import Signature

_COLLECTIVE = re.compile(
    r" (all-[a-z-]+?|reduce-scatter|collective-[a-z-]+?|partition-id|replica-id)"
    r"(?:-start)?\("
)


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:4]), ("x",))


def local_of(folder, mesh, step, args, ins, outs, donated=()):
    """(program for all devices, program of one), compiled."""

    def sharded(specs):
        return tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)

    shardings = sharded(ins), sharded(outs)
    jitted = jax.jit(
        step,
        in_shardings=shardings[0],
        out_shardings=shardings[1],
        donate_argnums=donated,
    )
    whole = jitted.lower(*args).compile(compiler_options=dict(dump_options(folder)))
    types = Signature(tuple(args), tuple(jax.eval_shape(step, *args)))
    one = Mesh(np.array(jax.devices()[:1]), ("one",))
    lowered = lower_local(partitioned_program(folder), types, shardings, one, donated)
    return whole, lowered.compile()


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.smoke
def test_a_data_parallel_step_is_that_of_its_rows(tmp_path, mesh):
    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).sum())(w)
        return w - 0.1 * gradient, loss

    whole, local = local_of(
        *(tmp_path, mesh, step, (floats(8, 16), floats(32, 8))),
        *(((), ("x",)), ((), ()), (0,)),
    )
    assert _COLLECTIVE.search(whole.as_text())
    assert not _COLLECTIVE.search(local.as_text())
    assert "input_output_alias={ {0}: (0, {}" in local.as_text()
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s, np.float32) for s in ((8, 16), (8, 8)))
    weights, loss = jax.tree.map(np.asarray, step(w, x))
    expected = weights, 4 * loss  # A sum of one number is that of all devices.
    found = local(w, x)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_gathers_are_copies_of_the_part(tmp_path, mesh):
    def step(w, x):
        return (jnp.tanh(x @ w),)

    whole, local = local_of(
        *(tmp_path, mesh, step, (floats(8, 16), floats(32, 8))),
        *((("x",), ("x",)), (("x",),)),
    )
    assert "all-gather" in _COLLECTIVE.findall(whole.as_text())[0]
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s, np.float32) for s in ((2, 16), (8, 8)))
    expected = np.tanh(x @ np.concatenate([w] * 4))
    np.testing.assert_allclose(local(w, x)[0], expected, rtol=1e-4, atol=1e-4)


def test_of_a_scattered_sum_the_first_piece_is_kept(tmp_path, mesh):
    def step(w, x):
        return (x @ w,)

    _, local = local_of(
        *(tmp_path, mesh, step, (floats(16, 8), floats(32, 16))),
        *((("x",), (None, "x")), (("x",),)),
    )
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s, np.float32) for s in ((4, 8), (32, 4)))
    np.testing.assert_allclose(local(w, x)[0], (x @ w)[:8], rtol=1e-4, atol=1e-4)


def test_exchanged_parts_keep_their_numbers(tmp_path, mesh):
    def step(x):
        return (2.0 * x, jnp.roll(x, 8, axis=0))

    whole, local = local_of(
        *(tmp_path, mesh, step, (floats(32, 8),)), *((("x",),), ((None, "x"), ("x",)))
    )
    sent = set(_COLLECTIVE.findall(whole.as_text()))
    assert {"all-to-all", "collective-permute"} <= sent
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    exchanged, rolled = (np.asarray(one) for one in local(x))
    assert exchanged.shape == (32, 2)
    assert sorted(exchanged.ravel()) == sorted(2 * x.ravel())
    np.testing.assert_array_equal(np.sort(rolled.ravel()), x.ravel())


def test_loops_keys_and_integers_have_results_that_are_finite(tmp_path, mesh):
    def step(key, table, ids):
        def body(x, _):
            return jnp.tanh(x @ x.T @ x), x.sum()

        rows = jax.lax.with_sharding_constraint(
            table[ids], NamedSharding(mesh, PartitionSpec(None, "x"))
        )
        rows, sums = jax.lax.scan(body, rows, None, length=3)
        noise = jax.random.normal(key, rows.shape)
        return rows + noise, sums, jnp.argmax(rows, 1), jnp.bincount(ids, length=16)

    whole, local = local_of(
        tmp_path,
        mesh,
        step,
        (
            jax.eval_shape(lambda: jax.random.key(0)),
            floats(16, 8),
            jax.ShapeDtypeStruct((32,), jnp.int32),
        ),
        ((), ("x",), ("x",)),
        (("x",), (), ("x",), ("x",)),
    )
    assert _COLLECTIVE.search(whole.as_text())
    assert not _COLLECTIVE.search(local.as_text())
    table = jnp.linspace(-0.02, 0.02, 32).reshape(4, 8)
    found = local(jax.random.key(1), table, jnp.arange(8, dtype=jnp.int32) % 4)
    assert [one.shape for one in found] == [(8, 8), (3,), (8,), (4,)]
    assert all(np.isfinite(np.asarray(one)).all() for one in found)
    assert 0 <= np.min(found[2]) and np.max(found[2]) < 8


def test_a_loop_that_ends_by_a_sum_of_all_ends(tmp_path, mesh):
    """As decoding does, until all sequences are finished."""

    def step(left):
        def count(state):
            return (state[0] <= 0).sum()

        def body(state):
            return state[0] - 1, state[1] + 1

        return jax.lax.while_loop(lambda s: count(s) < 32, body, (left, 0))

    whole, local = local_of(
        tmp_path,
        mesh,
        step,
        (jax.ShapeDtypeStruct((32,), jnp.int32),),
        *((("x",),), (("x",), ())),
    )
    assert "all-reduce" in _COLLECTIVE.findall(whole.as_text())
    _, turns = local(jnp.arange(8, dtype=jnp.int32))
    assert turns == 7


def test_state_in_the_memory_of_the_host_stays_there(tmp_path, mesh):
    kinds = {one.kind for one in jax.devices()[0].addressable_memories()}
    kind = "pinned_host" if "pinned_host" in kinds else "unpinned_host"
    rows = NamedSharding(mesh, PartitionSpec("x"))
    host = rows.with_memory_kind(kind)

    def step(w, x):
        w = jax.device_put(w, rows) - (x.T @ x).sum()
        return (jax.device_put(w, host),)

    args = floats(64, 32), floats(128, 64)
    shardings = (host, rows), (host,)
    jitted = jax.jit(step, in_shardings=shardings[0], out_shardings=shardings[1])
    jitted.lower(*args).compile(compiler_options=dict(dump_options(tmp_path)))
    types = Signature(args, (args[0],), ((kind, ""), (kind,)))
    one = Mesh(np.array(jax.devices()[:1]), ("one",))
    partitioned = partitioned_program(tmp_path)
    local = lower_local(partitioned, types, shardings, one).compile()
    assert [s.memory_kind == kind for s in local.input_shardings[0]] == [True, False]
    assert local.output_shardings[0].memory_kind == kind


def test_a_program_that_was_not_partitioned_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a dump after spmd-partitioning"):
        partitioned_program(tmp_path)

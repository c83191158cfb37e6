from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from cfp.analysis.contractions import find_members, number_values, squeeze
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.support.checking import make_mesh

MESH = make_mesh((("x", 4),))
X = jnp.ones((8, 16))


def numbers(fn, *args):
    """The numbers of a function's outputs, and all of them."""
    program, _ = trace(flatten_step(fn, args), MESH)
    found = number_values(program)
    return [found[v] for v in program.outputs], found, program


def test_equal_computations():
    def step(x):
        barred = jax.lax.optimization_barrier(x)
        return jnp.sin(x), jnp.sin(barred), jnp.cos(x)

    (plain, barred, other), _, _ = numbers(step, X)
    assert plain == barred != other


def test_casts_and_unit_dims_do_not_count():
    def step(x):
        return x * 2, (x.astype(jnp.bfloat16)), x[:, None], x.reshape(8, 1, 16)

    (_, *same), found, program = numbers(step, X)
    assert set(same) == {found[program.args[0]]}


def test_reductions_differ_by_what_they_compute():
    (high, low, total), *_ = numbers(
        lambda x: (x.max(0), (x * 1).min(0), x.sum(0)), jnp.arange(8)[:, None]
    )
    assert len({high, low, total}) == 3


def test_reductions_differ_by_what_their_bodies_read():
    def reduced(body):
        return lambda x: jax.lax.reduce(x, jnp.float32(0), body, (0,))

    bodies = [
        lambda a, b: a - b,
        lambda a, b: b - a,
        lambda a, b: a - 2 * b,
        lambda a, b: 2 * a - b,
        # The same ops once more.
        lambda a, b: a - b,
    ]
    found, *_ = numbers(lambda x: [reduced(body)(x) for body in bodies], X)
    assert len(set(found[:4])) == 4
    assert found[4] == found[0]


def test_orders_of_sorting_differ():
    def sorts(x):
        rising = jax.lax.sort(x)
        return rising, jnp.sort(x), jax.lax.sort((x, x), num_keys=2)[0]

    (one, same, other), *_ = numbers(sorts, X)
    assert one == same != other


def test_constants_are_told_apart():
    (one, two, again), *_ = numbers(
        lambda x: (x + 1.0, x + 2.0, jax.lax.optimization_barrier(x) + 1.0), X
    )
    assert one == again != two


def test_transposes_and_reverses_are_views():
    def step(x):
        return x.T, x.T.T + 0, jnp.flip(x, 0), jnp.flip(x, 0).T, x[:, None].T

    (turned, _, flipped, both, units), found, program = numbers(step, X)
    x = found[program.args[0]]
    assert found.views[turned] == (x, (1, 0))
    assert found.views[flipped] == (x, (0, 1))
    assert found.views[both] == (x, (1, 0))
    assert units == turned  # the dim of size 1 does not count
    assert len({x, turned, flipped, both}) == 4


def test_there_and_back():
    def step(x):
        return (
            jax.lax.optimization_barrier(x.T).T,
            x.reshape(4, 32).reshape(8, 16),
            jnp.concatenate([x, jnp.sin(x)])[:8],
            jnp.concatenate([x, jnp.sin(x)])[4:12],
            jnp.concatenate([x, jnp.sin(x)])[:8:2],
        )

    (turned, shaped, cut, across, strided), found, program = numbers(step, X)
    assert turned == shaped == cut == found[program.args[0]]
    assert across != cut != strided


def test_a_backward_loop_reads_what_the_forward_loop_stacked():
    def step(w, x):
        def loss(w):
            def body(x, _):
                return jnp.tanh(x @ w), None

            return jax.lax.scan(body, x, None, length=3)[0].sum()

        return jax.grad(loss)(w)

    program, _ = trace(flatten_step(step, (jnp.ones((16, 16)), X)), MESH)
    found = number_values(program)
    forward, *backward = (op for op in program.ops if op.kind == "dot_general")
    (weight,) = (
        op
        for op in backward
        if any(found[v] == found[forward.operands[0]] for v in op.operands)
    )
    assert weight.parent != forward.parent
    assert program.values[weight.results[0]].shape == (16, 16)


def test_slices_of_a_stack_differ_by_their_index_in_a_loop():
    def loss(w, x):
        @jax.checkpoint
        def body(x, i):
            a, b, again = (x @ w[i] for i in (2 * i, 2 * i + 1, 2 * i))
            return jnp.tanh(a) + jnp.sin(b) * jnp.cos(again), None

        return jax.lax.scan(body, x, jnp.arange(3))[0].sum()

    step = flatten_step(jax.grad(loss), (jnp.ones((6, 16, 16)), X))
    program, _ = trace(step, MESH)
    blocks = find_members(program, number_values(program))
    # Each runs forward, and again in the backward pass. The first does twice as often.
    runs = [sum(not one.derived for one in block) for block in blocks]
    assert runs == [4, 2]
    assert all(any(one.derived for one in block) for block in blocks)


def test_rematerialised_values():
    @jax.checkpoint
    def body(w, x):
        return jnp.sin(jnp.tanh(x @ w))

    def step(w, x):
        return jax.value_and_grad(lambda w: body(w, x).sum())(w)

    program, _ = trace(flatten_step(step, (jnp.ones((16, 16)), X)), MESH)
    found = number_values(program)
    tanh = [op for op in program.ops if op.kind == "tanh"]
    assert len(tanh) == 2
    assert found[tanh[0].results[0]] == found[tanh[1].results[0]]


def looped(x, times=3, scale=2.0):
    return jax.lax.fori_loop(0, times, lambda _, x: jnp.sin(x * scale), x)


def test_loops_that_do_the_same():
    def step(x, y):
        barred = jax.lax.optimization_barrier(x)
        others = looped(y), looped(x, times=4), looped(x, scale=3.0), looped(x[:4])
        return looped(x), looped(barred), *others

    (first, again, *others), found, program = numbers(step, X, 2 * X)
    assert first == again
    assert len({first, *others}) == 1 + len(others)
    inside = [found[op.results[0]] for op in program.ops if op.kind == "sine"]
    assert len(inside) == 6
    assert len({*inside}) == 5


def test_branches_that_do_the_same():
    def step(x, flag):
        def either(x, flag):
            return jax.lax.cond(flag, jnp.sin, jnp.cos, x)

        barred = jax.lax.optimization_barrier(x)
        return either(x, flag), either(barred, flag), either(x, ~flag)

    (first, again, other), *_ = numbers(step, X, jnp.bool_(True))
    assert first == again != other


def test_loops_that_end_on_different_values():
    def flagged(place, state):
        def body(state):
            one, other, x = state
            return other, one, x + 1

        return jax.lax.while_loop(lambda state: state[place], body, state)[2]

    def counted(place):
        def goes_on(state):
            return [state[0] < 3, state[1] < 5][place]

        def body(state):
            return state[0] + 1, state[1] + 2

        return jax.lax.while_loop(goes_on, body, (0, 0))[1]

    def step(*state):
        return *(flagged(place, state) for place in (0, 1)), counted(0), counted(1)

    found, *_ = numbers(step, jnp.bool_(True), jnp.bool_(False), X)
    assert len({*found}) == 4


def test_loops_that_call_the_host_are_told_apart():
    def step(x):
        def body(_, x):
            return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        return tuple(jax.lax.fori_loop(0, 3, body, x) for _ in range(2))

    (first, again), *_ = numbers(step, X)
    assert first != again


def test_a_branch_hands_on_its_only_value():
    def step(x, flag):
        return jax.lax.cond(flag, lambda x: x, lambda x: jnp.zeros_like(x), x)

    (found,), every, program = numbers(step, X, jnp.bool_(True))
    assert found == every[program.args[0]]


def test_squeeze():
    assert squeeze((1, 8, 1, 16)) == (8, 16)
    assert squeeze((1,)) == ()


def test_integers_of_an_attribute():
    _, _, program = numbers(lambda x: x + 1, X)
    text = "dimension=0 : i64, permutation=array<i64: 1, 0>, sizes=array<i64>"
    text += ", numbers=#stablehlo.gather<map = [2, 3], my_map = [4], last = 5>"
    op = replace(program.ops[-1], attributes=text)
    found = {"dimension": (0,), "permutation": (1, 0), "sizes": (), "strides": ()}
    found |= {"map": (2, 3), "last": (5,)}
    assert {name: op.integers(name) for name in found} == found

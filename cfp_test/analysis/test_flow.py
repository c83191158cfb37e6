import jax
import jax.numpy as jnp

from cfp.analysis.analyze import build_frame
from cfp.analysis.flow import NEVER, Flow, first_downstream, passes
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.support.checking import make_mesh

MESH = make_mesh((("x", 4),))
X = jnp.ones((8, 16))


def flow_of(fn, *args):
    program, _ = trace(flatten_step(fn, args), MESH)
    return program, Flow(program)


def find(program, kind):
    return [op for op in program.ops if op.kind == kind]


def looped(x, w):
    """cos, then a loop of tanh (x @ w), then sin."""
    x = jnp.cos(x)
    x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c) @ w, None), x, None, length=3)
    return jnp.sin(x)


def test_loops_are_seen_through():
    program, flow = flow_of(looped, X, jnp.ones((16, 16)))
    (cos,), (tanh,) = find(program, "cosine"), find(program, "tanh")
    (dot,), (sin,) = find(program, "dot_general"), find(program, "sine")
    assert {op.id for op in flow.makers(sin.operands[0])} == {dot.id, cos.id}
    assert {op.id for op in flow.makers(tanh.operands[0])} == {dot.id, cos.id}
    assert {op.id for op, _ in flow.readers(cos.results[0])} == {tanh.id}
    assert {op.id for op, _ in flow.readers(dot.results[0])} == {sin.id, tanh.id}
    assert {op.id for op, _ in flow.readers(program.args[1])} == {dot.id}


def test_what_a_loop_carries_is_one_tensor():
    program, flow = flow_of(looped, X, jnp.ones((16, 16)))
    (loop,) = find(program, "while")
    (cos,), (dot,) = find(program, "cosine"), find(program, "dot_general")
    (tanh,), (sin,) = find(program, "tanh"), find(program, "sine")
    same = [cos.results[0], dot.results[0], tanh.operands[0], sin.operands[0]]
    assert len({flow.canonical.get(v, v) for v in same}) == 1
    weight = [program.args[1], dot.operands[1]]
    assert len({flow.canonical.get(v, v) for v in weight}) == 1
    assert flow.inside(loop.id, dot.id)
    assert not flow.inside(loop.id, sin.id)


def test_shared_zeros_join_nothing():
    def step(x):
        def body(carry, _):
            a, b = carry
            return (jnp.sin(a + x), jnp.cos(b + x)), None

        zeros = jnp.zeros((8, 16))
        return jax.lax.scan(body, (zeros, zeros), None, length=3)[0]

    program, flow = flow_of(step, X)
    (sine,), (cosine,) = find(program, "sine"), find(program, "cosine")
    first, second = (flow.canonical.get(v, v) for v in program.outputs)
    assert first != second
    assert flow.canonical.get(sine.results[0], sine.results[0]) == first
    assert flow.canonical.get(cosine.results[0], cosine.results[0]) == second


def test_branches_are_seen_through():
    def step(x, flag):
        return jnp.sin(jax.lax.cond(flag, jnp.tanh, jnp.cos, x))

    program, flow = flow_of(step, X, jnp.bool_(True))
    (sin,) = find(program, "sine")
    assert {op.kind for op in flow.makers(sin.operands[0])} == {"tanh", "cosine"}
    (tanh,) = find(program, "tanh")
    assert {op.id for op, _ in flow.readers(tanh.results[0])} == {sin.id}


def test_barriers_hand_on_each_value_by_itself():
    def step(x, y):
        x, y = jax.lax.optimization_barrier((jnp.sin(x), jnp.cos(y)))
        return jnp.tanh(x), jnp.exp(y)

    program, flow = flow_of(step, X, X)
    (tanh,), (exp,) = find(program, "tanh"), find(program, "exponential")
    assert [op.kind for op in flow.makers(tanh.operands[0])] == ["sine"]
    assert [op.kind for op in flow.makers(exp.operands[0])] == ["cosine"]
    (barrier,) = find(program, "optimization_barrier")
    assert passes(barrier)
    assert not passes(tanh)


def test_downstream():
    program, flow = flow_of(looped, X, jnp.ones((16, 16)))
    (cos,), (tanh,) = find(program, "cosine"), find(program, "tanh")
    (dot,), (sin,) = find(program, "dot_general"), find(program, "sine")
    of_op, of_value = first_downstream(flow, {dot.id})
    assert of_op[cos.id] == of_op[tanh.id] == of_op[dot.id] == (dot.id, dot.id)
    assert of_op[sin.id] == NEVER
    # Its own result comes around to it in the next iteration.
    (loop,) = find(program, "while")
    assert of_value[dot.results[0]] == (loop.id, dot.id)


def test_this_iteration_comes_before_the_next_and_that_before_what_is_behind():
    program, flow = flow_of(looped, X, jnp.ones((16, 16)))
    (loop,), (tanh,) = find(program, "while"), find(program, "tanh")
    (dot,), (sin,) = find(program, "dot_general"), find(program, "sine")
    of_op, of_value = first_downstream(flow, {tanh.id, dot.id, sin.id})
    assert of_value[dot.results[0]] == (loop.id, tanh.id)
    assert of_value[tanh.results[0]] == (dot.id, dot.id)
    assert of_op[loop.id] == (sin.id, sin.id)


def test_ends_are_not_read_further():
    program, flow = flow_of(lambda x: jnp.sin(jnp.cos(jnp.tanh(x))), X)
    tanh, cos, sin = program.ops
    of_op, _ = first_downstream(flow, {sin.id}, frozenset(cos.results))
    assert of_op[cos.id] == of_op[tanh.id] == NEVER


def test_inner_loops_that_swap_what_they_carry():
    """A value that goes around there never comes to rest; the analysis must."""

    def step(x, w, v, other):
        def outer(_, e):
            def inner(_, c):
                a, b, total = c
                return b, a, total + x @ w

            a, b, total = jax.lax.fori_loop(0, 3, inner, (e, other, jnp.zeros_like(e)))
            return jnp.tanh((e + a + b + total) @ v)

        return jax.lax.fori_loop(0, 2, outer, x @ w)

    sizes = (("x", 4),)
    x = jnp.ones((8, 8))
    program, _ = trace(flatten_step(step, (x, x, x, x), {}), make_mesh(sizes))
    assert len(build_frame(program, sizes).blocks) >= 2

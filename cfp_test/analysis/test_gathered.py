"""Gathers from tables that contractions made: edges of a graph, rows of few labels."""

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.analyze import build_frame
from cfp.profiling.hlo import collectives_in
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.support.checking import make_mesh

MESH = (("x", 4),)
NODES, EDGES, WIDTH = 1024, 8192, 128
FLOATS, INTEGERS = jnp.float32, jnp.int32


def of(*shape, dtype=FLOATS):
    return jax.ShapeDtypeStruct(shape, dtype)


def training(loss):
    def step(params, *data):
        value, grads = jax.value_and_grad(loss)(params, *data)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def messages(params, nodes, senders, receivers):
    hidden = jax.nn.relu(nodes @ params["nodes"])
    sent = jax.nn.relu(hidden[senders] @ params["edges"])
    return (jax.ops.segment_sum(sent, receivers, NODES) ** 2).mean()


def convolved(params, nodes, senders, receivers):
    sent = jnp.tanh((nodes @ params["nodes"])[senders])
    return (jax.ops.segment_sum(sent, receivers, NODES) @ params["edges"]).sum()


PARAMS = {"nodes": of(WIDTH, WIDTH), "edges": of(WIDTH, WIDTH)}
PLACES = of(EDGES, dtype=INTEGERS)
GRAPH = (PARAMS, of(NODES, WIDTH), PLACES, PLACES)


def frame_of(loss, args):
    step = flatten_step(training(loss), args, donate_argnums=0)
    return build_frame(trace(step, make_mesh(MESH))[0], MESH)


def kinds(frame, ops):
    return [frame.program.ops[op].kind for op in ops]


def indexed(frame):
    """For each block of a gather: gathers and scatters in it."""
    return [
        [kind for kind in kinds(frame, block.ops) if kind in ("gather", "scatter")]
        for block in frame.blocks
        if kinds(frame, [block.anchor]) == ["gather"]
    ]


@pytest.mark.parametrize("remat", [False, True])
def test_edges_have_a_block_with_their_sums_at_the_nodes(remat):
    """Rematerialized they are there twice; derivatives begin no block."""
    frame = frame_of(jax.checkpoint(convolved) if remat else convolved, GRAPH)
    anchors = kinds(frame, (block.anchor for block in frame.blocks))
    assert anchors == ["dot_general", "gather", "dot_general"]
    [found] = indexed(frame)
    # Messages and their sums, what receivers hand back, its sums at the senders.
    assert sorted(found) == ["gather"] * (2 + remat) + ["scatter"] * (2 + remat)


def picked_rows(params, x, labels):
    scores = jax.nn.log_softmax(jnp.tanh(x @ params["up"]) @ params["out"])
    return -scores[jnp.arange(len(labels)), labels].mean()


def aligned(params, x, labels):
    scores = jax.nn.log_softmax(jnp.tanh(x @ params["up"]) @ params["out"])
    return -jnp.take_along_axis(scores, labels[:, None], -1).mean()


@pytest.mark.parametrize("loss", [picked_rows, aligned])
def test_what_a_loss_picks_follows_the_scores(loss):
    params = {"up": of(16, 32), "out": of(32, 64)}
    frame = frame_of(loss, (params, of(128, 16), of(128, dtype=INTEGERS)))
    assert kinds(frame, (b.anchor for b in frame.blocks)) == ["dot_general"] * 2
    [picked] = [op.id for op in frame.program.ops if op.kind == "gather"]
    assert frame.block_of[picked] == 1


def test_a_gathered_bias_is_broadcast_where_the_batch_is():
    def loss(params, x, near, places):
        bias = (jnp.tanh(near @ params["a"]) @ params["b"])[places]
        scores = jnp.einsum("bqhk,bshk->bhqs", x, x @ params["keys"])
        weights = jax.nn.softmax(scores + bias.transpose(2, 0, 1))
        return (jnp.einsum("bhqs,bshk->bqhk", weights, x) ** 2).mean()

    params = {"a": of(2, 16), "b": of(16, 4), "keys": of(8, 8)}
    places = of(16, 16, dtype=INTEGERS)
    frame = frame_of(loss, (params, of(32, 16, 4, 8), of(31, 2), places))
    program = frame.program
    wide = [
        op.id
        for op in program.ops
        if op.kind == "broadcast_in_dim"
        and program.values[op.results[0]].shape == (32, 4, 16, 16)
        and program.values[op.operands[0]].shape == (1, 4, 16, 16)
    ]
    [place] = {frame.block_of[op] for op in wide}
    anchor = program.ops[frame.blocks[place].anchor]
    assert program.values[anchor.results[0]].shape == (32, 4, 16, 16)


def sent(loss, preset=None, args=GRAPH):
    plan = cfp.plan(
        training(loss),
        *args,
        mesh=jax.make_mesh((4,), ("x",)),
        donate_argnums=0,
        preset=preset,
        settings=cfp.PlannerSettings(race=False),
        quiet=True,
    )
    return collectives_in(plan.compile(training(loss), *args).as_text())


@pytest.mark.parametrize("loss", [messages, convolved])
@pytest.mark.parametrize("preset", [None, "data_parallel"])
def test_graphs_send_nodes_and_no_edges(loss, preset):
    nodes, width = NODES * WIDTH * 4, WIDTH * WIDTH * 4
    found = sent(loss, preset)
    # At most what two sums at the nodes and the gradients are, in one all-reduce.
    assert max(one.bytes for one in found) <= 2 * (nodes + width) + 4
    assert 0 < sum(one.bytes * one.count for one in found) <= 4 * nodes + 2 * width + 8


TOKENS, EXPERTS, CHOSEN = 512, 4, 2
SLOTS = TOKENS * CHOSEN // EXPERTS


def routed(params, x):
    """Two experts for each token, in slots that are filled one after another."""
    gates, index = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), CHOSEN)
    chosen = jax.nn.one_hot(index.reshape(-1), EXPERTS, dtype=INTEGERS)
    place = ((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1)
    slot = index.reshape(-1) * SLOTS + place
    rows = jnp.zeros((EXPERTS * SLOTS, WIDTH)).at[slot].set(jnp.repeat(x, CHOSEN, 0))
    hidden = rows.reshape(EXPERTS, SLOTS, WIDTH)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", hidden, params["up"]))
    made = jnp.einsum("ecf,efd->ecd", hidden, params["down"]).reshape(-1, WIDTH)
    picked = made[slot].reshape(TOKENS, CHOSEN, WIDTH)
    return ((x + (picked * gates[..., None]).sum(1)) ** 2).mean()


def test_what_all_devices_compute_is_picked_from_without_sums():
    """Data parallelism computes all experts everywhere, and reduces no gradient."""
    weights = of(EXPERTS, WIDTH, WIDTH)
    params = {"router": of(WIDTH, EXPERTS), "up": weights, "down": weights}
    found = sent(routed, "data_parallel", (params, of(TOKENS, WIDTH)))
    tokens = TOKENS * WIDTH * 4
    assert 0 < sum(one.bytes * one.count for one in found) < 3.5 * tokens

"""Graphs, experts, and programs that move data by index."""

import jax
import jax.numpy as jnp

from cfp_test.programs.common import cross_entropy, integers, normal, squares, training


def graph_net_step():
    """Messages along edges, summed at the nodes."""
    params = {"edge": normal(0, 16, 16), "node": normal(1, 32, 16)}

    def loss(p, g):
        x = g["nodes"]
        for _ in range(2):
            messages = jnp.tanh((x[g["from"]] - x[g["to"]]) @ p["edge"])
            total = jax.ops.segment_sum(messages, g["to"], num_segments=12)
            x = x + jnp.concatenate([x, total], axis=1) @ p["node"]
        return squares(x)

    graph = {
        "nodes": normal(2, 12, 16),
        "from": integers(3, 12, 24),
        "to": integers(4, 12, 24),
    }
    return training(loss, params, graph)


def moe_einsum_step():
    """Top-2 experts with dispatch and combine as contractions."""
    params = {
        "router": normal(0, 16, 4),
        "up": normal(1, 4, 16, 32),
        "down": normal(2, 4, 32, 16),
    }

    def loss(p, x):
        gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, p["router"]))
        value, index = jax.lax.top_k(gates, 2)
        chosen = jax.nn.one_hot(index, 4)  # [g, s, 2, e]
        place = jnp.cumsum(chosen.reshape(4, 16, 4), axis=1).reshape(4, 8, 2, 4) - 1
        slot = jax.nn.one_hot((place * chosen).sum(-1).astype(int), 6)  # [g, s, 2, c]
        combine = jnp.einsum("gsk,gske,gskc->gsec", value, chosen, slot)
        dispatch = (combine > 0).astype(x.dtype)
        inputs = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        h = jax.nn.gelu(jnp.einsum("egcm,emf->egcf", inputs, p["up"]))
        outputs = jnp.einsum("egcf,efm->egcm", h, p["down"])
        y = jnp.einsum("gsec,egcm->gsm", combine, outputs)
        balance = (gates.mean((0, 1)) * chosen.sum(2).mean((0, 1))).sum()
        return squares(x + y, 1.0) + 0.01 * balance

    return training(loss, params, normal(3, 4, 8, 16, scale=1.0))


def moe_sort_step():
    """Tokens sorted by expert, one group of rows for each, gathered back."""
    params = {"router": normal(0, 16, 4), "up": normal(1, 4, 16, 16)}

    def loss(p, x):
        logits = x @ p["router"]
        expert = jnp.argmax(logits, axis=-1)
        order = jnp.argsort(expert, stable=True)
        rows = x[order].reshape(4, 8, 16)
        y = jax.nn.gelu(jnp.einsum("esm,emf->esf", rows, p["up"])).reshape(32, 16)
        y = jnp.zeros_like(y).at[order].set(y)
        gate = jnp.take_along_axis(jax.nn.softmax(logits), expert[:, None], axis=1)
        return squares(y * gate, 1.0)

    return training(loss, params, normal(2, 32, 16))


def moe_ragged_step():
    """Experts by ragged contraction."""
    params = {"router": normal(0, 16, 4), "up": normal(1, 4, 16, 16)}

    def loss(p, x):
        expert = jnp.argmax(x @ p["router"], axis=-1)
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.bincount(expert, length=4).astype(jnp.int32)
        return squares(jax.lax.ragged_dot(x[order], p["up"], sizes))

    return training(loss, params, normal(2, 32, 16))


def sorting_step():
    """sort, top_k, argmax, and cumulative sums, on weights and activations."""
    params = {"w": normal(0, 16, 16), "g": normal(1, 16)}

    def loss(p, x):
        y = x @ p["w"]
        top, _ = jax.lax.top_k(y, 4)
        low = jnp.sort(y, axis=0)[:2]
        total = jnp.cumsum(y, axis=1) * p["g"] + jax.lax.cumlogsumexp(y, axis=0)
        peak = jnp.argmax(y, axis=1)
        picked = jnp.take_along_axis(y, peak[:, None], axis=1)
        return squares(top) + squares(low) + squares(total) + squares(picked)

    return training(loss, params, normal(2, 8, 16))


def segments_step():
    """Segment reductions, scatters with every combination, and searches."""
    params = {"w": normal(0, 16, 8)}

    def loss(p, batch):
        y = batch["x"] @ p["w"]
        ids = batch["ids"]
        frozen = jax.lax.stop_gradient(y)  # this scatter has no derivative
        parts = [
            jax.ops.segment_sum(y, ids, 4),
            jax.ops.segment_max(y, ids, 4),
            jnp.zeros((4, 8)).at[ids].min(y),
            jnp.ones((4, 8)).at[ids[:, None], jnp.arange(8)].multiply(1 + 0.1 * frozen),
        ]
        return sum(squares(jnp.nan_to_num(part, posinf=0, neginf=0)) for part in parts)

    batch = {"x": normal(1, 16, 16), "ids": integers(2, 4, 16)}

    def with_unique_rows(p, batch):
        ids = jnp.searchsorted(jnp.arange(4.0), batch["ids"].astype(jnp.float32))
        return loss(p, {"x": batch["x"], "ids": ids})

    return training(with_unique_rows, params, batch)


def outside_step():
    """Slices and updates that begin outside: the nearest place counts."""

    def loss(p, batch):
        y = jnp.sin(batch["x"] @ p["w"])
        y = jax.lax.dynamic_update_slice(y, p["row"], (batch["behind"], 0))
        y = jax.lax.dynamic_update_slice(y, p["column"], (0, batch["before"]))
        piece = jax.lax.dynamic_slice(y, (batch["behind"], batch["before"]), (1, 8))
        return squares(y) + squares(piece, 0.1)

    params = {
        "w": normal(0, 16, 16),
        "row": normal(1, 1, 16),
        "column": normal(2, 8, 1),
    }
    batch = {"x": normal(3, 8, 16), "behind": jnp.int32(9), "before": jnp.int32(-99)}
    return training(loss, params, batch)


def classifier_step():
    """Integers in, accuracy out beside the loss."""
    params = {"w": normal(0, 16, 8)}

    def train_step(p, batch):
        def loss(p):
            logits = batch["x"] @ p["w"]
            hits = logits.argmax(-1) == batch["label"]
            return cross_entropy(logits, batch["label"]), hits.mean()

        (value, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(p)
        p = jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)
        return p, {"loss": value, "accuracy": accuracy}

    return train_step, (params, {"x": normal(1, 8, 16), "label": integers(2, 8, 8)})

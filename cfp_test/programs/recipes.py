"""Training steps as people put them together from parts that others test alone."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from cfp_test.programs.common import (
    adam,
    cross_entropy,
    integers,
    normal,
    squares,
    training,
)


def skipped_update_step():
    """Gradients over slices of the batch; an update only where they are finite."""
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 9), eps=1e-2),
    )
    params = {"a": normal(0, 16, 32), "b": normal(1, 32, 16)}

    def train_step(state, batch):
        def loss(p, batch):
            return squares(jnp.tanh(batch["x"] @ p["a"]) @ p["b"], batch["y"])

        def add(i, total):
            part = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, 8 * i, 8), batch
            )
            return jax.tree.map(jnp.add, total, jax.grad(loss)(state["params"], part))

        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        grads = jax.lax.fori_loop(0, 4, add, zeros)
        finite = jnp.isfinite(optax.tree.norm(grads))

        def apply(params, opt):
            updates, opt = tx.update(grads, opt, params)
            return optax.apply_updates(params, updates), opt

        params, opt = jax.lax.cond(
            finite, apply, lambda *same: same, state["params"], state["opt"]
        )
        average = optax.incremental_update(params, state["average"], 0.1)
        skipped = state["skipped"] + ~finite
        metrics = {"gradient": {"norm": optax.tree.norm(grads)}, "rate": None}
        state = {"params": params, "opt": opt, "average": average, "skipped": skipped}
        return state, metrics

    state = {"params": params, "opt": tx.init(params), "average": params}
    state["skipped"] = jnp.int32(0)
    batch = {"x": normal(2, 32, 16), "y": normal(3, 32, 16)}
    return train_step, (state, batch), {"donate_argnums": 0}


def rollout_step():
    """Environments that a policy acts in, in a loop, and epochs of what was seen."""
    actors, width, actions, time = 64, 8, 4, 5
    params = {
        "body": normal(0, width, 16),
        "policy": normal(1, 16, actions),
        "value": normal(2, 16, 1),
    }
    tx = adam()
    moves, pushes = normal(3, width, width), normal(4, actions, width)

    def both(p, x):
        hidden = jnp.tanh(x @ p["body"])
        return jax.nn.log_softmax(hidden @ p["policy"]), (hidden @ p["value"])[..., 0]

    def loss(p, seen):
        logits, value = both(p, seen["x"])
        taken = jnp.take_along_axis(logits, seen["action"][:, None], 1)[:, 0]
        gain = jnp.exp(taken - seen["before"]) * (seen["return"] - value)
        return squares(value, seen["return"]) - gain.mean()

    def train_step(params, opt, worlds, key):
        def act(worlds, key):
            logits, _ = both(params, worlds)
            action = jax.random.categorical(key, logits)
            taken = logits[jnp.arange(actors), action]
            after = jnp.tanh(worlds @ moves + pushes[action])
            seen = {"x": worlds, "action": action, "before": taken}
            return after, {**seen, "reward": -(after**2).mean(-1)}

        def backwards(following, reward):
            return (total := reward + 0.9 * following), total

        worlds, seen = jax.lax.scan(act, worlds, jax.random.split(key, time))
        last = both(params, worlds)[1]
        seen["return"] = jax.lax.scan(backwards, last, seen["reward"], reverse=True)[1]
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)

        def epoch(state, _):
            grads = jax.grad(loss)(state[0], flat)
            updates, opt = tx.update(grads, state[1])
            return (optax.apply_updates(state[0], updates), opt), None

        (params, opt), _ = jax.lax.scan(epoch, (params, opt), None, length=3)
        return params, opt, worlds, seen["reward"].mean()

    worlds = normal(5, actors, width)
    return train_step, (params, tx.init(params), worlds, jax.random.key(0))


def conditioned_layers_step():
    """Layers with shifts and gains made of the time; keys are drawn in the step."""
    layers = [
        {
            "condition": normal(3 * i, 16, 32),
            "up": normal(3 * i + 1, 16, 32),
            "down": normal(3 * i + 2, 32, 16),
        }
        for i in range(3)
    ]
    params = {"time": normal(10, 8, 16), "label": normal(11, 11, 16), "layers": layers}
    tx = adam()

    def train_step(state, batch, key):
        key, *keys = jax.random.split(key, 4)
        x = batch["x"]
        time = jax.random.uniform(keys[0], (len(x), 1))
        noise = jax.random.normal(keys[1], x.shape)
        hidden = jax.random.bernoulli(keys[2], 0.1, (len(x),))
        label = jnp.where(hidden, 10, batch["label"])

        def loss(p):
            waves = jnp.sin(time * jnp.arange(1.0, 9.0))
            condition = jax.nn.silu(waves @ p["time"] + p["label"][label])
            y = x + time[:, None] * noise
            for w in p["layers"]:
                made = (condition @ w["condition"])[:, None]
                shift, gain = jnp.split(made, 2, axis=-1)
                h = y * (1 + gain) + shift
                y = y + jax.nn.gelu(h @ w["up"]) @ w["down"]
            return squares(y, noise)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, key, value

    batch = {"x": normal(12, 8, 4, 16), "label": integers(13, 10, 8)}
    state = {"params": params, "opt": tx.init(params)}
    return train_step, (state, batch, jax.random.key(0))


def truncated_time_step():
    """Two recurrent layers, time first; what they remember goes to the next step."""
    time, batch, size = 6, 8, 16
    params = {
        "embed": normal(0, 32, size),
        "cells": [normal(i, 2 * size, 4 * size) for i in (1, 2)],
        "head": normal(3, size, 32),
    }
    tx = adam()

    def cell(w, memory, x):
        i, f, g, o = jnp.split(jnp.concatenate([x, memory[1]], axis=-1) @ w, 4, axis=-1)
        c = jax.nn.sigmoid(f + 1) * memory[0] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return c, jax.nn.sigmoid(o) * jnp.tanh(c)

    def train_step(state, memory, batch):
        def loss(p):
            def tick(memory, now):
                x, running = now
                following = []
                for w, before in zip(p["cells"], memory, strict=True):
                    after = cell(w, before, x)
                    keep = functools.partial(jnp.where, running)
                    following.append(jax.tree.map(keep, after, before))
                    x = following[-1][1]
                return following, x

            running = (jnp.arange(time)[:, None] < batch["length"])[..., None]
            x = p["embed"][batch["token"]]
            last, x = jax.lax.scan(tick, memory, (x, running))
            return cross_entropy(x @ p["head"], batch["next"]), last

        (value, last), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, last, value

    memory = [(jnp.zeros((batch, size)),) * 2] * 2
    tokens = {
        "token": integers(4, 32, time, batch),
        "next": integers(5, 32, time, batch),
        "length": 1 + integers(6, time, batch),
    }
    return train_step, ({"params": params, "opt": tx.init(params)}, memory, tokens)


def codebook_step():
    """Nearest codes with straight-through gradients; what is near moves them."""
    params = {"encoder": normal(0, 16, 8), "decoder": normal(1, 8, 16)}
    tx = adam()

    def train_step(state, x):
        codes = state["sums"] / (state["counts"][:, None] + 1e-2)

        def loss(p):
            z = x @ p["encoder"]
            distance = (codes**2).sum(1) - 2 * z @ codes.T
            nearest = distance.argmin(1)
            apart = jax.lax.stop_gradient(codes[nearest] - z)
            return squares((z + apart) @ p["decoder"], x), (z, nearest)

        found = jax.value_and_grad(loss, has_aux=True)(state["params"])
        (value, (z, nearest)), grads = found
        updates, opt = tx.update(grads, state["opt"])
        chosen = jax.nn.one_hot(nearest, 32)
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt": opt,
            "counts": 0.9 * state["counts"] + 0.1 * chosen.sum(0),
            "sums": 0.9 * state["sums"] + 0.1 * chosen.T @ z,
        }, {"loss": value, "used": (chosen.sum(0) > 0).sum()}

    state = {"params": params, "opt": tx.init(params)}
    state |= {"counts": jnp.ones(32), "sums": normal(2, 32, 8)}
    return train_step, (state, normal(3, 64, 16, scale=1.0))


def haiku_stack_step():
    """A library's scan over layers, batch statistics beside the parameters."""

    def net(x, key):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(16)(x), is_training=True)
        x = hk.layer_stack(3)(lambda x: x + hk.Linear(16)(jax.nn.relu(x)))(x)
        return hk.Linear(8)(hk.dropout(key, 0.1, x))

    made = hk.transform_with_state(net)
    x, key = normal(0, 8, 16), jax.random.PRNGKey(0)
    params, statistics = jax.jit(made.init)(key, x, key)
    tx = adam()

    def train_step(params, statistics, opt, key, batch):
        key, use = jax.random.split(key)

        def loss(p):
            logits, new = made.apply(p, statistics, use, batch["x"], use)
            return cross_entropy(logits, batch["y"]), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = tx.update(grads, opt)
        return optax.apply_updates(params, updates), new, opt, key, value

    batch = {"x": x, "y": integers(1, 8, 8)}
    args = params, statistics, tx.init(params), key, batch
    return train_step, args, {"donate_argnums": (0, 1, 2)}


class _Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(nnx.gelu(self.linear(self.norm(x))))


def nnx_stack_step():
    """Layers made by vmap and run by scan, each with random numbers of its own."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs):
        return _Block(rngs)

    blocks = stack(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(blocks, adam(), wrt=nnx.Param)
    graph, state = nnx.split((blocks, optimizer))

    def train_step(state, x):
        blocks, optimizer = nnx.merge(graph, state)

        def loss(blocks):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x, block):
                return block(x)

            return squares(run(x, blocks), x[::-1])

        value, grads = nnx.value_and_grad(loss)(blocks)
        optimizer.update(blocks, grads)
        return nnx.state((blocks, optimizer)), value

    return train_step, (state, normal(1, 8, 16))


def vmapped_experts_step():
    """One expert's function mapped over all; a switch drops what is over capacity."""
    experts = {
        "up": normal(0, 4, 16, 32),
        "bias": jnp.zeros((4, 32)),
        "down": normal(1, 4, 32, 16),
    }

    def expert(w, x):
        return jax.nn.gelu(x @ w["up"] + w["bias"]) @ w["down"]

    def loss(p, x):
        gates = jax.nn.softmax(x @ p["router"])
        gate, index = jax.lax.top_k(gates, 1)
        chosen = jax.nn.one_hot(index[:, 0], 4)
        place = ((jnp.cumsum(chosen, axis=0) - 1) * chosen).sum(-1).astype(jnp.int32)
        slot = chosen[:, :, None] * jax.nn.one_hot(place, 6)[:, None]
        rows = jax.vmap(expert)(p["experts"], jnp.einsum("tec,td->ecd", slot, x))
        y = jnp.einsum("tec,ecd->td", slot * gate[:, :, None], rows)
        return squares(x + y, 1.0) + 0.1 * (gates.mean(0) * chosen.mean(0)).sum()

    params = {"router": normal(2, 16, 4), "experts": experts}
    return training(loss, params, normal(3, 32, 16, scale=1.0))

"""Values that pass over other layers: tied weights, an encoder's memory, skips."""

import jax
import jax.numpy as jnp

from cfp_test.programs.common import cross_entropy, integers, normal, squares, training


def _block_params(seed, width):
    return {
        "up": normal(seed, width, 2 * width),
        "down": normal(seed + 1, 2 * width, width),
    }


def _block(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def tied_stack_step():
    """The embedding is the head, too, with layers in between."""
    params = {
        "embed": normal(0, 32, 16),
        "layers": [_block_params(10 * i, 16) for i in range(1, 4)],
    }

    def loss(p, batch):
        x = p["embed"][batch["tokens"]]
        for w in p["layers"]:
            x = _block(w, x)
        return cross_entropy(x @ p["embed"].T, batch["labels"])

    batch = {"tokens": integers(2, 32, 8, 4), "labels": integers(3, 32, 8, 4)}
    return training(loss, params, batch)


def _cross_params(seed):
    names = ("query", "key", "value", "out")
    return {name: normal(seed + i, 16, 16) for i, name in enumerate(names)}


def _cross(p, x, memory):
    scores = jnp.einsum("bqd,bkd->bqk", x @ p["query"], memory @ p["key"])
    return x + jax.nn.softmax(scores) @ (memory @ p["value"]) @ p["out"]


def cross_stack_step():
    """All layers of a decoder read what the last one of an encoder makes."""
    params = {
        "encoder": [_block_params(10 * i, 16) for i in range(2)],
        "decoder": [_cross_params(100 + 10 * i) for i in range(3)],
    }

    def loss(p, batch):
        memory, x = batch["source"], batch["target"]
        for w in p["encoder"]:
            memory = _block(w, memory)
        for w in p["decoder"]:
            x = _cross(w, x, memory)
        return squares(x, batch["labels"])

    batch = {
        "source": normal(300, 8, 4, 16),
        "target": normal(301, 8, 4, 16),
        "labels": normal(302, 8, 4, 16),
    }
    return training(loss, params, batch)


def u_net_step():
    """Two skips, one inside the other."""
    params = {
        name: [_block_params(100 * i + 10 * j, width) for j in range(2)]
        for i, (name, width) in enumerate(
            {"in": 16, "lower": 32, "deep": 64, "upper": 32, "out": 16}.items()
        )
    }
    params |= {
        "down": [normal(600, 16, 32), normal(601, 32, 64)],
        "up": [normal(602, 64, 32), normal(603, 32, 16)],
    }

    def loss(p, batch):
        def stage(name, x):
            for w in p[name]:
                x = _block(w, x)
            return x

        first = stage("in", batch["x"])
        second = stage("lower", first @ p["down"][0])
        x = stage("deep", second @ p["down"][1])
        x = stage("upper", x @ p["up"][0] + second)
        x = stage("out", x @ p["up"][1] + first)
        return squares(x, batch["y"])

    return training(loss, params, {"x": normal(610, 16, 16), "y": normal(611, 16, 16)})

"""Networks: parameters by the names of their dims, and layers in a row or a loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from cfp.models.layers import Params, inside
from cfp.models.options import Config
from cfp.models.train import Batch, random_text

INIT_STDDEV = 0.02
# From a layer's parameters and its input to its output, and a penalty or None.
Layer = Callable[[Params, jax.Array], tuple[jax.Array, jax.Array | None]]


def ffn_of(config: Config) -> int:
    """The width inside the MLPs."""
    return config.ffn or 4 * config.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A model: its parameters, and the function of them.

    Attributes:
      ends: the logical names of the dims of the parameters outside of layers, as text
        with spaces, in a tree like theirs.
      layers: the same of a round of layers, which is repeated, by the layers' names in
        a loop.
      apply: (configuration, parameters, batch) -> logits [batch, seq, vocab], and a
        penalty [] that the loss adds to their cross-entropy.
      random_batch: of a key, sequences, their length, and the vocabulary.
      ffn: the width inside the MLPs.
      refusal: why a configuration's options do not fit together; empty if they do.
    """

    ends: Mapping[str, Any]
    layers: Mapping[str, Mapping[str, Any]]
    apply: Callable[[Config, Params, Batch], tuple[jax.Array, jax.Array]]
    random_batch: Callable[[jax.Array, int, int, int], Batch] = random_text
    ffn: Callable[[Config], int] = ffn_of
    refusal: Callable[[Config], str] = lambda config: ""

    def param_names(self, config: Config) -> Params:
        """The logical names of the parameters' dims: a tree like the parameters."""
        every = {"ends": dict(self.ends), "layers": dict(self.layers)}
        names = jax.tree.map(lambda text: PartitionSpec(*text.split()), every)
        ends, layers = names["ends"], list(names["layers"].values())
        if config.tied:
            del ends["head"]
        if not config.scan:
            turns = _in_turn(config, layers)
            return {**ends, **{f"layer_{i}": layer for i, layer in turns}}
        loop = {"pairs": names["layers"]} if layers[1:] else {"layers": layers[0]}
        return ends | jax.tree.map(lambda names: PartitionSpec("layers", *names), loop)

    def init(self, config: Config, key: jax.Array) -> Params:
        """Draws all parameters: scales are one, biases zero."""
        c = config
        sizes = {"vocab": c.vocab, "position": c.seq, "type": 2, "heads": c.heads}
        sizes |= dict.fromkeys(("embed", "head_embed", "norm"), c.hidden)
        sizes |= dict.fromkeys(("experts", "gate_experts"), c.experts)
        sizes |= {"kv_heads": c.kv_heads or c.heads, "head_dim": c.head_dim}
        sizes |= {"mlp": self.ffn(c), "layers": c.layers // len(self.layers)}
        leaves, tree = jax.tree.flatten_with_path(self.param_names(c))
        keys = jax.random.split(key, len(leaves))

        def draw(path: Any, names: PartitionSpec, key: jax.Array) -> jax.Array:
            shape = [sizes[name] for name in names]
            if path[-1].key.endswith("bias"):
                return jnp.zeros(shape)
            if names[-1] == "norm":
                return jnp.ones(shape)
            return INIT_STDDEV * jax.random.normal(key, shape)

        drawn = [draw(*leaf, key) for leaf, key in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, drawn)


def run_layers(
    config: Config, params: Params, x: jax.Array, layers: Mapping[str, Layer]
) -> tuple[jax.Array, jax.Array]:
    """Runs as many layers as a configuration says, in a loop if it says so.

    Args:
      params: of the network.
      layers: a round of them, by their names in a loop.

    Returns:
      The output of the last, and the sum of all penalties.
    """
    if config.remat:
        # A loop's backward pass is another loop: the compiler cannot find that what is
        # computed there was computed before. Elsewhere a barrier has to prevent it.
        layers = {
            name: jax.checkpoint(layer, prevent_cse=not config.scan)
            for name, layer in layers.items()
        }
    penalties: list[Any] = []
    if config.scan:

        def run(x: jax.Array, params: Params) -> tuple[jax.Array, list[Any]]:
            found = []
            for name, layer in layers.items():
                x, penalty = inside(name, layer, params, x)
                found.append(penalty)
            return x, found

        one = len(layers) == 1
        loop = dict.fromkeys(layers, params["layers"]) if one else params["pairs"]
        x, penalties = jax.lax.scan(run, x, loop)
    else:
        for i, layer in _in_turn(config, layers.values()):
            x, penalty = inside(f"layer_{i}", layer, params, x)
            penalties.append(penalty)
    every = map(jnp.sum, jax.tree.leaves(penalties))
    return x, sum(every, start=jnp.float32(0.0))


def _in_turn(config: Config, layers: Iterable[Any]) -> Iterable[tuple[int, Any]]:
    return zip(range(config.layers), itertools.cycle(layers), strict=False)

"""The train step that all models share: cross-entropy and AdamW.

The step is a plain function, `(state, batch) -> (state, metrics)`. It is not jitted
and donates nothing: that is for the caller.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from cfp.models.options import check_options, option

Batch = dict[str, Any]
Metrics = dict[str, Any]


class TrainState(NamedTuple):
    """Parameters and AdamW's state (first and second moments), all float32."""

    params: Any
    opt_state: Any


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What a training step needs to know beside its model."""

    batch: int = option(16, "sequences in a batch")
    learning_rate: float = option(3e-4, "AdamW's learning rate")

    def __post_init__(self) -> None:
        check_options(self)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(self.learning_rate)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean negative log-likelihood, in float32.

    Args:
      logits: [batch, seq, vocab].
      labels: [batch, seq] int32.

    Returns:
      [] float32.
    """
    logits = logits.astype(jnp.float32)
    # A comparison and a sum, instead of a gather, let vocab stay sharded.
    vocab = jnp.arange(logits.shape[-1], dtype=labels.dtype)
    picked = jnp.sum(jnp.where(vocab == labels[..., None], logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def make_train_step(
    model: nn.Module, optimizer: optax.GradientTransformation
) -> TrainStep:
    """Makes the step that trains `model` with `optimizer`.

    The loss is the cross-entropy plus all that the model sows into the collection
    "losses", such as the balancing losses of expert layers.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One update. The batch has tokens and labels, both [batch, seq] int32."""

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            variables = {"params": params}
            logits, sown = model.apply(variables, batch["tokens"], mutable=["losses"])
            entropy = cross_entropy(logits, batch["labels"])
            return sum(jax.tree.leaves(sown), start=entropy), entropy

        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, entropy), grads = gradient(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "cross_entropy": entropy}
        return TrainState(params, opt_state), metrics

    return train_step


def init_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    tokens: jax.Array,
) -> TrainState:
    """The state before the first step. Of `tokens`, only shape and dtype matter."""
    params = model.init(key, tokens)["params"]
    return TrainState(params, optimizer.init(params))


def random_batch(key: jax.Array, batch: int, seq: int, vocab: int) -> Batch:
    """Random tokens, each labelled with the one after it; both [batch, seq] int32."""
    text = jax.random.randint(key, (batch, seq + 1), 0, vocab, dtype=jnp.int32)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}

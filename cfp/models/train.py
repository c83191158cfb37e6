"""The train step of all models: cross-entropy and AdamW.

The step is a plain function, `(state, batch) -> (state, metrics)`. Callers jit it and
choose donated arguments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Batch = dict[str, Any]


class TrainState(NamedTuple):
    """Parameters and AdamW's state (first and second moments), all float32."""

    params: Any
    opt_state: Any


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]
# (parameters, batch) -> logits [batch, seq, vocab], and a penalty [] that is added to
# the loss.
Apply = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]


def cross_entropy(
    logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Mean negative log-likelihood, in float32; 0 if no position counts.

    Args:
      logits: [batch, seq, vocab].
      labels: [batch, seq] int32.
      mask: [batch, seq] float32, 1 for positions that count and 0 for others; by
        default all count.
    """
    logits = logits.astype(jnp.float32)
    # A comparison and a sum, instead of a gather, let vocab stay sharded.
    vocab = jnp.arange(logits.shape[-1], dtype=labels.dtype)
    picked = jnp.sum(jnp.where(vocab == labels[..., None], logits, 0.0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    if mask is None:
        return jnp.mean(losses)
    return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def make_train_step(apply: Apply, optimizer: Any, microbatches: int = 1) -> TrainStep:
    """Makes a train step from a network and an optax optimizer.

    The loss is the cross-entropy plus the network's penalty. If the batch has a "mask",
    only its positions count.

    With microbatches, a loop runs parts of the batch and sums their gradients, so only
    one part's activations are kept. Loss and gradients equal the whole batch's if
    sequences do not interact and the penalty is a mean over sequences.
    """

    def loss_fn(
        params: Any, batch: Batch, share: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """A part's contributions to loss and cross-entropy; `share` is its weight."""
        logits, penalty = apply(params, batch)
        entropy = cross_entropy(logits, batch["labels"], batch.get("mask"))
        if share is None:
            return entropy + penalty, entropy
        return share * entropy + penalty / microbatches, share * entropy

    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def accumulate(params: Any, batch: Batch) -> Any:
        def add(total: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(params, *part)), None

        zero = jnp.zeros(())
        nothing = (zero, zero), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, nothing, _split(batch, microbatches))[0]

    def train_step(
        state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, Any]]:
        """One update; the batch's tokens and labels are [batch, seq] int32."""
        whole = accumulate if microbatches > 1 else gradient
        (loss, entropy), grads = whole(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        metrics = {"loss": loss, "cross_entropy": entropy}
        return TrainState(params, opt_state), metrics

    return train_step


def _split(batch: Batch, parts: int) -> tuple[Batch, jax.Array]:
    """The batch's parts, stacked on a new dim 0, and their weights in the mean loss."""
    # A part takes every parts-th sequence. So each device of a batch sharded over
    # devices holds a share of every part, and no sequence moves.
    split = {
        key: leaf.reshape(-1, parts, *leaf.shape[1:]).swapaxes(0, 1)
        for key, leaf in batch.items()
    }
    if "mask" not in split:
        return split, jnp.full(parts, 1 / parts)
    counts = split["mask"].sum(axis=(1, 2))
    return split, counts / jnp.maximum(counts.sum(), 1.0)


def random_text(key: jax.Array, batch: int, seq: int, vocab: int) -> Batch:
    """Random tokens, and the next tokens as labels, both [batch, seq] int32."""
    text = jax.random.randint(key, (batch, seq + 1), 0, vocab, dtype=jnp.int32)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}

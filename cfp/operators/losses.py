"""Cross-entropy: of logits, or of the hidden state with the head's kernel.

The second need never hold all logits: they are made for a part of the vocabulary or of
the tokens at a time, and made again for the gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from cfp.operators.operator import Argument, Implementation, Operator, Reason

_LABELS = Argument("labels", "t", kind="below", below="v")


def _cross_entropy(logits: Array, labels: Array) -> Array:
    y = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(y, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(y, axis=-1) - chosen


def _cross_entropy_one_hot(logits: Array, labels: Array) -> Array:
    found = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.sum(found * jax.nn.one_hot(labels, logits.shape[-1]), axis=-1)


cross_entropy = Operator(
    name="cross_entropy",
    summary="minus the log probability of each label, float32",
    arguments=(Argument("logits", "t v", spread=2.0), _LABELS),
    oracle=_cross_entropy,
    implementations=(
        Implementation("xla", "XLA", _cross_entropy),
        Implementation("one_hot", "jax.nn", _cross_entropy_one_hot),
    ),
)


def _linear(x: Array, kernel: Array, labels: Array, *, chunks: int) -> Array:
    logits = jnp.einsum("th,vh->tv", x, kernel, preferred_element_type=jnp.float32)
    return _cross_entropy(logits, labels).mean()


@jax.checkpoint
def _part(x: Array, kernel: Array, first: Array, labels: Array) -> tuple[Array, Array]:
    """Log of the sum of powers over a part of the vocabulary, and the labels' logits.

    Args:
        x: [tokens, hidden].
        kernel: [part, hidden].
        first: the part's first token.
        labels: [tokens].
    """
    logits = jnp.einsum("th,vh->tv", x, kernel, preferred_element_type=jnp.float32)
    place = labels - first
    inside = (place >= 0) & (place < kernel.shape[0])
    place = jnp.where(inside, place, 0)
    chosen = jnp.take_along_axis(logits, place[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1), jnp.where(inside, chosen, 0.0)


def _chunked_vocabulary(x, kernel, labels, *, chunks: int) -> Array:
    size = kernel.shape[0] // chunks
    whole = size * chunks

    def step(_: None, part: tuple[Array, Array]):
        return None, _part(x, *part, labels)

    parts = kernel[:whole].reshape(chunks, size, kernel.shape[1])
    _, (sums, chosen) = jax.lax.scan(step, None, (parts, jnp.arange(chunks) * size))
    chosen = chosen.sum(0)
    if whole < kernel.shape[0]:
        rest, also = _part(x, kernel[whole:], jnp.asarray(whole), labels)
        sums, chosen = jnp.concatenate([sums, rest[None]]), chosen + also
    return (jax.nn.logsumexp(sums, axis=0) - chosen).mean()


def _chunked_tokens(x, kernel, labels, *, chunks: int) -> Array:
    @jax.checkpoint
    def step(total, part):
        return total + _linear(part[0], kernel, part[1], chunks=1), None

    size = x.shape[0] // chunks
    parts = (x.reshape(chunks, size, -1), labels.reshape(chunks, size))
    total, _ = jax.lax.scan(step, jnp.float32(0.0), parts)
    return total / chunks


def _too_many(x, kernel, labels, *, chunks: int) -> Reason:
    if 1 <= chunks <= kernel.shape[0]:
        return None
    return f"a vocabulary of {kernel.shape[0]} has no {chunks} parts"


def _uneven(x, kernel, labels, *, chunks: int) -> Reason:
    if chunks >= 1 and x.shape[0] % chunks == 0:
        return None
    return f"{x.shape[0]} tokens have no {chunks} equal parts"


_SCAN = "XLA, jax.lax.scan"

linear_cross_entropy = Operator(
    name="linear_cross_entropy",
    summary="mean cross-entropy of x @ kernel.T, float32",
    arguments=(
        Argument("x", "t h"),
        Argument("kernel", "v h", spread="fan_last"),
        _LABELS,
    ),
    oracle=_linear,
    flops=lambda d: 2.0 * d["t"] * d["h"] * d["v"],
    options={"chunks": 8},
    implementations=(
        Implementation("xla", "XLA", _linear),
        Implementation(
            "chunked_vocabulary", _SCAN, _chunked_vocabulary, refuses=_too_many
        ),
        Implementation("chunked_tokens", _SCAN, _chunked_tokens, refuses=_uneven),
    ),
)

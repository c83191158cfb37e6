"""Cross-entropy: of logits, or of the hidden state with the head's kernel.

The second need never hold all logits: they are made for a part of the vocabulary at a
time, and made again for the gradient.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jax import Array

from cfp.operators import probe
from cfp.operators.norms import tokamaxes
from cfp.operators.operator import Argument, Implementation, Operator, Reason

_LABELS = Argument("labels", "t", kind="below", below="v")


# ------------------------------------------------------------------------- of logits


def _cross_entropy(logits: Array, labels: Array) -> Array:
    y = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(y, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(y, axis=-1) - chosen


def _cross_entropy_jax_nn(logits: Array, labels: Array) -> Array:
    found = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(found, labels[:, None], axis=-1)[:, 0]


def _cross_entropy_one_hot(logits: Array, labels: Array) -> Array:
    found = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.sum(found * jax.nn.one_hot(labels, logits.shape[-1]), axis=-1)


def _cross_entropy_optax(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )


cross_entropy = Operator(
    name="cross_entropy",
    summary="minus the log probability of each label, float32",
    arguments=(Argument("logits", "t v", spread=2.0), _LABELS),
    oracle=_cross_entropy,
    implementations=(
        Implementation("xla", "XLA", _cross_entropy),
        Implementation("jax_nn", "jax.nn", _cross_entropy_jax_nn),
        Implementation("optax", "optax", _cross_entropy_optax),
        Implementation("one_hot", "jax.nn", _cross_entropy_one_hot),
        Implementation(
            "rematerialized", "XLA, jax.checkpoint", jax.checkpoint(_cross_entropy)
        ),
    ),
)

# ---------------------------------------------------- of hidden state and the kernel


def _linear(x, kernel, labels, *, chunks: int, loss=_cross_entropy) -> Array:
    logits = jnp.einsum("th,vh->tv", x, kernel, preferred_element_type=jnp.float32)
    return loss(logits, labels).mean()


def _linear_rematerialized(x, kernel, labels, *, chunks: int) -> Array:
    return jax.checkpoint(functools.partial(_linear, chunks=chunks))(x, kernel, labels)


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


def _linear_chunked(x, kernel, labels, *, chunks: int) -> Array:
    size = kernel.shape[0] // chunks
    whole = size * chunks
    firsts = jnp.arange(chunks) * size

    def step(_: None, part: tuple[Array, Array]):
        return None, _part(x, *part, labels)

    parts = kernel[:whole].reshape(chunks, size, kernel.shape[1])
    _, (sums, chosen) = jax.lax.scan(step, None, (parts, firsts))
    chosen = chosen.sum(0)
    if whole < kernel.shape[0]:
        rest, also = _part(x, kernel[whole:], jnp.asarray(whole), labels)
        sums, chosen = jnp.concatenate([sums, rest[None]]), chosen + also
    return (jax.nn.logsumexp(sums, axis=0) - chosen).mean()


def _chunked_tokens(x, kernel, labels, *, chunks: int) -> Array:
    size = x.shape[0] // chunks

    @jax.checkpoint
    def step(total, part):
        return total + _linear(part[0], kernel, part[1], chunks=1), None

    parts = (x.reshape(chunks, size, -1), labels.reshape(chunks, size))
    total, _ = jax.lax.scan(step, jnp.float32(0.0), parts)
    return total / chunks


def _linear_tokamax(x, kernel, labels, *, chunks: int, backend: str) -> Array:
    return (
        probe.load_tokamax()
        .linear_softmax_cross_entropy_loss(
            x, labels, kernel.T, reduction="mean", implementation=backend
        )
        .astype(jnp.float32)
    )


def _too_many(x, kernel, labels, *, chunks: int) -> Reason:
    if 1 <= chunks <= kernel.shape[0]:
        return None
    return f"a vocabulary of {kernel.shape[0]} has no {chunks} parts"


def _uneven(x, kernel, labels, *, chunks: int) -> Reason:
    if chunks >= 1 and x.shape[0] % chunks == 0:
        return None
    return f"{x.shape[0]} tokens have no {chunks} equal parts"


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
            "optax", "optax", functools.partial(_linear, loss=_cross_entropy_optax)
        ),
        Implementation("rematerialized", "XLA, jax.checkpoint", _linear_rematerialized),
        Implementation(
            "chunked_vocabulary",
            "XLA, jax.lax.scan",
            _linear_chunked,
            refuses=_too_many,
        ),
        Implementation(
            "chunked_tokens", "XLA, jax.lax.scan", _chunked_tokens, refuses=_uneven
        ),
        *tokamaxes(_linear_tokamax, ("xla",)),
    ),
)

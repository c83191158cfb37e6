"""Cross-entropy: of logits, or of the hidden state with the head's kernel.

The second need never hold all logits: they are made for a part of the vocabulary at a
time, and made again for the gradient.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax

from cfp.operators import probe
from cfp.operators.norms import tokamaxes
from cfp.operators.operator import Argument, Implementation, Operator, Reason

_LABELS = Argument(name="labels", dims="t", kind="below", below="v")


# ------------------------------------------------------------------------- of logits


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    y = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(y, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(y, axis=-1) - chosen


def _cross_entropy_jax_nn(logits: jax.Array, labels: jax.Array) -> jax.Array:
    found = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(found, labels[:, None], axis=-1)[:, 0]


def _cross_entropy_one_hot(logits: jax.Array, labels: jax.Array) -> jax.Array:
    found = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.sum(found * jax.nn.one_hot(labels, logits.shape[-1]), axis=-1)


def _cross_entropy_optax(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )


CROSS_ENTROPY = Operator(
    name="cross_entropy",
    summary="minus the log probability of each label, float32",
    arguments=(Argument(name="logits", dims="t v", spread=2.0), _LABELS),
    oracle=_cross_entropy,
    implementations=(
        Implementation(name="xla", library="XLA", call=_cross_entropy),
        Implementation(name="jax_nn", library="jax.nn", call=_cross_entropy_jax_nn),
        Implementation(name="optax", library="optax", call=_cross_entropy_optax),
        Implementation(name="one_hot", library="jax.nn", call=_cross_entropy_one_hot),
        Implementation(
            name="rematerialized",
            library="XLA, jax.checkpoint",
            call=jax.checkpoint(_cross_entropy),
        ),
    ),
)

# ---------------------------------------------------- of hidden state and the kernel


def _linear(x, kernel, labels, *, chunks: int, loss=_cross_entropy) -> jax.Array:
    logits = jnp.einsum("th,vh->tv", x, kernel, preferred_element_type=jnp.float32)
    return loss(logits, labels).mean()


def _linear_rematerialized(x, kernel, labels, *, chunks: int) -> jax.Array:
    return jax.checkpoint(functools.partial(_linear, chunks=chunks))(x, kernel, labels)


@jax.checkpoint
def _part(
    x: jax.Array, kernel: jax.Array, first: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
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


def _linear_chunked(x, kernel, labels, *, chunks: int) -> jax.Array:
    size = kernel.shape[0] // chunks
    whole = size * chunks
    firsts = jnp.arange(chunks) * size

    def step(_: None, part: tuple[jax.Array, jax.Array]):
        return None, _part(x, *part, labels)

    parts = kernel[:whole].reshape(chunks, size, kernel.shape[1])
    _, (sums, chosen) = jax.lax.scan(step, None, (parts, firsts))
    chosen = chosen.sum(0)
    if whole < kernel.shape[0]:
        rest, also = _part(x, kernel[whole:], jnp.asarray(whole), labels)
        sums, chosen = jnp.concatenate([sums, rest[None]]), chosen + also
    return (jax.nn.logsumexp(sums, axis=0) - chosen).mean()


def _chunked_tokens(x, kernel, labels, *, chunks: int) -> jax.Array:
    size = x.shape[0] // chunks

    @jax.checkpoint
    def step(total, part):
        return total + _linear(part[0], kernel, part[1], chunks=1), None

    parts = (x.reshape(chunks, size, -1), labels.reshape(chunks, size))
    total, _ = jax.lax.scan(step, jnp.float32(0.0), parts)
    return total / chunks


def _linear_tokamax(x, kernel, labels, *, chunks: int, backend: str) -> jax.Array:
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


LINEAR_CROSS_ENTROPY = Operator(
    name="linear_cross_entropy",
    summary="mean cross-entropy of x @ kernel.T, float32",
    arguments=(
        Argument(name="x", dims="t h"),
        Argument(name="kernel", dims="v h", spread="fan_last"),
        _LABELS,
    ),
    oracle=_linear,
    flops=lambda d: 2.0 * d["t"] * d["h"] * d["v"],
    options={"chunks": 8},
    implementations=(
        Implementation(name="xla", library="XLA", call=_linear),
        Implementation(
            name="optax",
            library="optax",
            call=functools.partial(_linear, loss=_cross_entropy_optax),
        ),
        Implementation(
            name="rematerialized",
            library="XLA, jax.checkpoint",
            call=_linear_rematerialized,
        ),
        Implementation(
            name="chunked_vocabulary",
            library="XLA, jax.lax.scan",
            call=_linear_chunked,
            refuses=_too_many,
        ),
        Implementation(
            name="chunked_tokens",
            library="XLA, jax.lax.scan",
            call=_chunked_tokens,
            refuses=_uneven,
        ),
        *tokamaxes(_linear_tokamax, ("xla",)),
    ),
)

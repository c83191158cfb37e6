"""The layers that the decoder models share.

Every layer takes one array and returns one, so that `flax.linen.remat` and
`flax.linen.scan` can wrap it. Parameters are float32; `dtype` is what is computed in.

Shapes use: batch, seq, hidden, heads, head_dim, ffn, vocab.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

KERNEL_INIT = nn.initializers.normal(stddev=0.02)


def check_heads(hidden: int, heads: int) -> None:
    """Raises ValueError unless `heads` divides `hidden`."""
    if hidden % heads:
        raise ValueError(
            f"hidden must be divisible by heads, got hidden={hidden} and heads={heads}"
        )


class Embedding(nn.Module):
    """Token embedding plus a learned embedding of the position."""

    vocab: int
    seq: int
    hidden: int
    dtype: DTypeLike

    def setup(self) -> None:
        self.token = nn.Embed(self.vocab, self.hidden, embedding_init=KERNEL_INIT)
        self.position = self.param("position", KERNEL_INIT, (self.seq, self.hidden))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[batch, seq] int32 -> [batch, seq, hidden]."""
        # Rows are looked up in float32 and cast after, so that the gradients of a
        # token that occurs often are also added up in float32.
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        return x.astype(self.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden] -> [batch, seq, vocab], with the token table."""
        return x @ self.token.embedding.astype(self.dtype).T


class Attention(nn.Module):
    """Causal self-attention.

    Query, key and value have kernels of their own, [hidden, heads, head_dim], so that
    heads are a dim of the program from the first to the last op.
    """

    heads: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        seq, hidden = x.shape[1:]
        head_dim = hidden // self.heads
        project = functools.partial(
            nn.DenseGeneral,
            features=(self.heads, head_dim),
            dtype=self.dtype,
            kernel_init=KERNEL_INIT,
        )
        query = project(name="query")(x)
        # A bias of the keys shifts all scores of a query alike, which softmax takes
        # away: its gradient is rounding noise, which Adam would blow up.
        key = project(name="key", use_bias=False)(x)
        value = project(name="value")(x)

        with jax.named_scope("scores"):
            scores = jnp.einsum("bqhd,bkhd->bhqk", query * head_dim**-0.5, key)
        causal = jnp.tril(jnp.ones((seq, seq), dtype=bool))
        scores = jnp.where(causal, scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(self.dtype)
        with jax.named_scope("mix"):
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)

        return nn.DenseGeneral(
            hidden,
            axis=(-2, -1),
            dtype=self.dtype,
            kernel_init=KERNEL_INIT,
            name="out",
        )(mixed)


class MLP(nn.Module):
    """Two dense layers with a GELU between."""

    ffn: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., hidden] -> [..., hidden]."""
        dense = functools.partial(nn.Dense, dtype=self.dtype, kernel_init=KERNEL_INIT)
        h = nn.gelu(dense(self.ffn, name="up")(x))
        return dense(x.shape[-1], name="down")(h)


class DecoderLayer(nn.Module):
    """A pre-LN decoder layer: attention, then the given feed-forward module.

    Attributes:
      heads: number of attention heads.
      feed_forward: makes the second half's module; it names it too.
      dtype: what is computed in.
    """

    heads: int
    feed_forward: Callable[[], nn.Module]
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        attention = Attention(self.heads, self.dtype, name="attention")
        x = x + attention(norm(name="attention_norm")(x))
        return x + self.feed_forward()(norm(name="feed_forward_norm")(x))

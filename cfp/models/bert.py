"""BERT: a stack of post-LN encoder layers that fills in masked tokens.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", 2019; of its two tasks, masked language modelling.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from cfp.models.layers import (
    KERNEL_INIT,
    LOGITS,
    MLP,
    RESIDUAL,
    ZEROS_INIT,
    Attention,
    Embedding,
    constrain,
    dense,
    flax_network,
    layer_norm,
    named,
    run_layers,
)
from cfp.models.options import TransformerConfig, option
from cfp.models.train import Batch, Network

TYPES = 2  # A sequence is two sentences, one after the other.
MASKED_SHARE = 0.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class BERTConfig(TransformerConfig):
    """The shape of a BERT, by default of BERT-large.

    The last token of the vocabulary stands for [MASK].
    """

    vocab: int = option(30522, "tokens in the vocabulary, two or more")
    seq: int = option(512, "tokens in a sequence")
    layers: int = option(24, "encoder layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab < 2:
            raise ValueError(
                f"vocab must be at least 2, as one token stands for [MASK], got "
                f"{self.vocab}"
            )


class EncoderLayer(nn.Module):
    """A post-LN encoder layer: each half is added to its input, then normalised."""

    heads: int
    ffn: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        norm = functools.partial(layer_norm, self.dtype)
        attention = Attention(self.heads, self.dtype, causal=False, name="attention")
        x = norm(name="attention_norm")(constrain(x + attention(x), RESIDUAL))
        mlp = MLP(self.ffn, self.dtype, name="mlp")
        return norm(name="mlp_norm")(constrain(x + mlp(x), RESIDUAL))


class BERT(nn.Module):
    """Maps tokens to the logits of what stood in their places."""

    config: BERTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, types: jax.Array) -> jax.Array:
        """Both [batch, seq] int32 -> [batch, seq, vocab]."""
        c = self.config
        norm = functools.partial(layer_norm, c.dtype)
        embedding = Embedding(c.vocab, c.seq, c.hidden, c.dtype, name="embedding")
        table_init = named(KERNEL_INIT, ("type", "embed"))
        type_embedding = nn.Embed(
            TYPES, c.hidden, embedding_init=table_init, name="type_embedding"
        )

        x = embedding(tokens) + type_embedding(types).astype(c.dtype)
        x = norm(name="embedding_norm")(x)
        x = run_layers(c, EncoderLayer, (c.heads, c.ffn or 4 * c.hidden, c.dtype), x)

        # Its kernel is square: only one of its dims can have the name.
        head = dense(c.hidden, ("embed", "head_embed"), c.dtype, name="head_dense")
        x = norm(name="head_norm")(constrain(nn.gelu(head(x)), RESIDUAL))
        bias = self.param("head_bias", named(ZEROS_INIT, ("vocab",)), (c.vocab,))
        return constrain(embedding.attend(x) + bias.astype(c.dtype), LOGITS)


def bert(config: BERTConfig) -> Network:
    """A BERT that learns to fill in masked tokens."""
    return flax_network(
        BERT(config),
        lambda key, n: random_cloze(key, n, config.seq, config.vocab),
        inputs=("tokens", "types"),
    )


def random_cloze(key: jax.Array, batch: int, seq: int, vocab: int) -> Batch:
    """Random text with gaps.

    Returns:
      All of them [batch, seq]:
        labels: int32, the text.
        mask: float32, 1 where the text is hidden, 0 elsewhere.
        tokens: int32, the text with [MASK] where it is hidden.
        types: int32, 0 in the first half, 1 in the second.
    """
    text_key, mask_key = jax.random.split(key)
    mask_token = vocab - 1
    text = jax.random.randint(text_key, (batch, seq), 0, mask_token, dtype=jnp.int32)
    hidden = jax.random.bernoulli(mask_key, MASKED_SHARE, (batch, seq))
    halves = jnp.arange(seq, dtype=jnp.int32) * TYPES // seq
    return {
        "labels": text,
        "mask": hidden.astype(jnp.float32),
        "tokens": jnp.where(hidden, mask_token, text),
        "types": jnp.broadcast_to(halves, (batch, seq)),
    }

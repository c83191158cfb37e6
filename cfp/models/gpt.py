"""GPT: a stack of pre-LN decoder layers (Radford et al., 2019)."""

import dataclasses
import functools

import flax.linen as nn
import jax

from cfp.models.layers import (
    LOGITS,
    MLP,
    DecoderLayer,
    Embedding,
    constrain,
    dense,
    flax_network,
    layer_norm,
    run_layers,
)
from cfp.models.options import TransformerConfig, option
from cfp.models.train import Network, random_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """The shape of a GPT."""

    tied: bool = option(False, "use the token embedding as the head's kernel")


class GPT(nn.Module):
    """Maps tokens to the logits of the token that follows each."""

    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[batch, seq] int32 -> [batch, seq, vocab]."""
        c = self.config
        ffn = c.ffn or 4 * c.hidden
        embedding = Embedding(c.vocab, c.seq, c.hidden, c.dtype, name="embedding")
        mlp = functools.partial(MLP, ffn, c.dtype, name="mlp")
        x = run_layers(c, DecoderLayer, (c.heads, mlp, c.dtype), embedding(tokens))
        x = layer_norm(c.dtype, name="final_norm")(x)
        if c.tied:
            return embedding.attend(x)
        head = dense(c.vocab, ("embed", "vocab"), c.dtype, use_bias=False, name="head")
        return constrain(head(x), LOGITS)


def gpt(config: GPTConfig) -> Network:
    """A GPT that learns to foretell the next token."""
    return flax_network(
        GPT(config), lambda key, n: random_text(key, n, config.seq, config.vocab)
    )

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
    remat_layer,
    scan_layers,
)
from cfp.models.options import (
    REMAT_DOC,
    SCAN_DOC,
    check_heads,
    check_options,
    dtype_option,
    option,
)
from cfp.models.train import Network, random_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT. `ffn` is 4 * hidden unless given."""

    vocab: int = option(51200, "tokens in the vocabulary")
    seq: int = option(1024, "tokens in a sequence")
    hidden: int = option(1024, "width of the residual stream")
    layers: int = option(4, "decoder layers")
    heads: int = option(16, "attention heads; they divide hidden")
    ffn: int | None = option(None, "width inside the MLP; 4 * hidden if not given")
    dtype: str = dtype_option()
    tied: bool = option(False, "use the token embedding as the head's kernel")
    scan: bool = option(False, SCAN_DOC)
    remat: bool = option(False, REMAT_DOC)

    def __post_init__(self) -> None:
        check_options(self)
        check_heads(self.hidden, self.heads)


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
        kind = remat_layer(DecoderLayer, remat=c.remat, scan=c.scan)
        if c.scan:
            kind = scan_layers(kind, c.layers)
        layer = functools.partial(kind, c.heads, mlp, c.dtype)

        x = embedding(tokens)
        if c.scan:
            x, _ = layer(name="layers")(x, None)
        else:
            for i in range(c.layers):
                x = layer(name=f"layer_{i}")(x)
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

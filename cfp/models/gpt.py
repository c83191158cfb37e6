"""GPT: a stack of pre-LN decoder layers (Radford et al., 2019)."""

import dataclasses
import functools

import flax.linen as nn
import jax

from cfp.models.layers import (
    KERNEL_INIT,
    MLP,
    DecoderLayer,
    Embedding,
    check_heads,
)
from cfp.models.options import check_options, option


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT. `ffn` is 4 * hidden unless given."""

    vocab: int = option(51200, "tokens in the vocabulary")
    seq: int = option(1024, "tokens in a sequence")
    hidden: int = option(1024, "width of the residual stream")
    layers: int = option(4, "decoder layers")
    heads: int = option(16, "attention heads; they divide hidden")
    ffn: int | None = option(None, "width inside the MLP; 4 * hidden if not given")
    dtype: str = option(
        "bfloat16",
        "what is computed in; parameters are float32",
        choices=("float32", "bfloat16"),
    )
    tied: bool = option(False, "use the token embedding as the head's kernel")

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

        x = embedding(tokens)
        for i in range(c.layers):
            x = DecoderLayer(c.heads, mlp, c.dtype, name=f"layer_{i}")(x)
        x = nn.LayerNorm(dtype=c.dtype, name="final_norm")(x)
        if c.tied:
            return embedding.attend(x)
        return nn.Dense(
            c.vocab,
            use_bias=False,
            dtype=c.dtype,
            kernel_init=KERNEL_INIT,
            name="head",
        )(x)

"""A small GPT-2 and BERT in linen, with the modules and parameters of HF's."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Config:
    vocab: int = 40
    seq: int = 8
    hidden: int = 16
    layers: int = 1
    num_attention_heads: int = 2
    n_head: int = 2
    activation_function: str = "gelu_new"
    attn_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    dtype: Any = None  # Of the embeddings in NNX, which decides that of the rest.


class FlaxConv1D(nn.Module):
    """A dense layer whose kernel is [out, in]."""

    features: int

    @nn.compact
    def __call__(self, x):
        shape = (self.features, x.shape[-1])
        # At any width, so that rounding in bfloat16 is not blown up layer by layer.
        scaled = nn.initializers.normal(x.shape[-1] ** -0.5)
        kernel = self.param("kernel", scaled, shape)
        bias = self.param("bias", nn.initializers.normal(0.3), (self.features,))
        return x @ kernel.T + bias


def attend(query, key, value, mask):
    scores = jnp.einsum("bqnd,bknd->bnqk", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
    return jnp.einsum("bnqk,bknd->bqnd", weights, value)


def split_heads(x, heads):
    return x.reshape(*x.shape[:-1], heads, -1)


class FlaxGPT2Attention(nn.Module):
    config: Any
    causal: bool = True

    def setup(self):
        self.c_attn = FlaxConv1D(3 * self.config.hidden)
        self.c_proj = FlaxConv1D(self.config.hidden)
        self.resid_dropout = nn.Dropout(self.config.resid_pdrop)

    def __call__(
        self,
        hidden_states,
        key_value_states=None,
        attention_mask=None,
        deterministic=True,
        output_attentions=False,
    ):
        parts = jnp.split(self.c_attn(hidden_states), 3, axis=-1)
        q, k, v = (split_heads(x, self.config.n_head) for x in parts)
        mask = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :].astype(bool)
        mixed = attend(q, k, v, mask).reshape(hidden_states.shape)
        return (self.resid_dropout(self.c_proj(mixed), deterministic=deterministic),)


class FlaxGPT2MLP(nn.Module):
    config: Any

    def setup(self):
        self.c_fc = FlaxConv1D(4 * self.config.hidden)
        self.c_proj = FlaxConv1D(self.config.hidden)

    def __call__(self, hidden_states, deterministic=True):
        return self.c_proj(nn.gelu(self.c_fc(hidden_states)))


class FlaxGPT2Block(nn.Module):
    config: Any

    def setup(self):
        self.ln_1 = nn.LayerNorm(epsilon=1e-5)
        self.attn = FlaxGPT2Attention(self.config)
        self.ln_2 = nn.LayerNorm(epsilon=1e-5)
        self.mlp = FlaxGPT2MLP(self.config)

    def __call__(self, x, attention_mask=None, deterministic=True):
        attended = self.attn(
            self.ln_1(x), attention_mask=attention_mask, deterministic=deterministic
        )
        x = x + attended[0]
        return x + self.mlp(self.ln_2(x), deterministic=deterministic)


class GPT2(nn.Module):
    config: Any = Config()

    def setup(self):
        self.wte = nn.Embed(self.config.vocab, self.config.hidden)
        self.wpe = nn.Embed(self.config.seq, self.config.hidden)
        self.h = [FlaxGPT2Block(self.config) for _ in range(self.config.layers)]
        self.ln_f = nn.LayerNorm(epsilon=1e-5)

    def __call__(self, tokens, attention_mask=None, deterministic=True):
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x, attention_mask, deterministic)
        return self.wte.attend(self.ln_f(x))


class FlaxBertSelfAttention(nn.Module):
    config: Any

    def setup(self):
        self.query = nn.Dense(self.config.hidden)
        self.key = nn.Dense(self.config.hidden)
        self.value = nn.Dense(self.config.hidden)

    def __call__(
        self,
        hidden_states,
        attention_mask,
        layer_head_mask=None,
        key_value_states=None,
        deterministic=True,
        output_attentions=False,
    ):
        q, k, v = (
            split_heads(one(hidden_states), self.config.num_attention_heads)
            for one in (self.query, self.key, self.value)
        )
        mask = jnp.ones((1, 1, 1, q.shape[1]), bool)
        if attention_mask is not None:
            mask = attention_mask[:, None, None, :].astype(bool)
        return (attend(q, k, v, mask).reshape(hidden_states.shape),)


class FlaxBertLayer(nn.Module):
    config: Any

    def setup(self):
        self.self = FlaxBertSelfAttention(self.config)
        self.dense = nn.Dense(self.config.hidden)
        self.LayerNorm = nn.LayerNorm(epsilon=1e-12)
        self.intermediate = nn.Dense(4 * self.config.hidden)
        self.output = nn.Dense(self.config.hidden)
        self.output_norm = nn.LayerNorm(epsilon=1e-12)

    def __call__(self, x, attention_mask):
        attended = self.self(x, attention_mask, layer_head_mask=None)[0]
        x = self.LayerNorm(x + self.dense(attended))
        inner = jax.nn.gelu(self.intermediate(x), approximate=False)
        return self.output_norm(x + self.output(inner))


class Bert(nn.Module):
    config: Any = Config()

    def setup(self):
        self.word_embeddings = nn.Embed(self.config.vocab, self.config.hidden)
        self.layers = [FlaxBertLayer(self.config) for _ in range(self.config.layers)]

    def __call__(self, tokens, attention_mask=None):
        x = self.word_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.word_embeddings.attend(x)

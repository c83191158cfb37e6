"""The same GPT-2 and BERT in NNX; dense layers have kernels that are [in, out]."""

import jax
import jax.numpy as jnp
from flax import nnx

from cfp_test.operators.models_linen import Config, attend, split_heads


def _embed(rows, config, rngs):
    return nnx.Embed(rows, config.hidden, dtype=config.dtype, rngs=rngs)


class GPT2Attention(nnx.Module):
    def __init__(self, config, rngs):
        self.config = config
        self.c_attn = nnx.Linear(config.hidden, 3 * config.hidden, rngs=rngs)
        self.c_proj = nnx.Linear(config.hidden, config.hidden, rngs=rngs)

    def __call__(self, hidden_states, attention_mask=None, deterministic=True):
        parts = jnp.split(self.c_attn(hidden_states), 3, axis=-1)
        q, k, v = (split_heads(x, self.config.n_head) for x in parts)
        mask = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :].astype(bool)
        return (self.c_proj(attend(q, k, v, mask).reshape(hidden_states.shape)),)


class GPT2MLP(nnx.Module):
    def __init__(self, config, rngs):
        self.config = config
        self.c_fc = nnx.Linear(config.hidden, 4 * config.hidden, rngs=rngs)
        self.c_proj = nnx.Linear(4 * config.hidden, config.hidden, rngs=rngs)

    def __call__(self, hidden_states):
        return self.c_proj(nnx.gelu(self.c_fc(hidden_states)))


class GPT2Block(nnx.Module):
    def __init__(self, config, rngs):
        self.ln_1 = nnx.LayerNorm(config.hidden, epsilon=1e-5, rngs=rngs)
        self.attn = GPT2Attention(config, rngs)
        self.ln_2 = nnx.LayerNorm(config.hidden, epsilon=1e-5, rngs=rngs)
        self.mlp = GPT2MLP(config, rngs)

    def __call__(self, x, attention_mask=None):
        x = x + self.attn(self.ln_1(x), attention_mask=attention_mask)[0]
        return x + self.mlp(self.ln_2(x))


class GPT2(nnx.Module):
    def __init__(self, config: Config, *, rngs):
        self.wte = _embed(config.vocab, config, rngs)
        self.wpe = _embed(config.seq, config, rngs)
        self.h = nnx.List([GPT2Block(config, rngs) for _ in range(config.layers)])
        self.ln_f = nnx.LayerNorm(config.hidden, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens, attention_mask=None):
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x, attention_mask)
        return self.wte.attend(self.ln_f(x))


class BertSelfAttention(nnx.Module):
    query: nnx.Linear
    key: nnx.Linear
    value: nnx.Linear

    def __init__(self, config, rngs):
        self.config = config
        for name in ("query", "key", "value"):
            setattr(self, name, nnx.Linear(config.hidden, config.hidden, rngs=rngs))

    def __call__(self, hidden_states, attention_mask, deterministic=True):
        q, k, v = (
            split_heads(one(hidden_states), self.config.num_attention_heads)
            for one in (self.query, self.key, self.value)
        )
        mask = jnp.ones((1, 1, 1, q.shape[1]), bool)
        if attention_mask is not None:
            mask = attention_mask[:, None, None, :].astype(bool)
        return (attend(q, k, v, mask).reshape(hidden_states.shape),)


class BertLayer(nnx.Module):
    def __init__(self, config, rngs):
        self.attention = BertSelfAttention(config, rngs)
        self.dense = nnx.Linear(config.hidden, config.hidden, rngs=rngs)
        self.norm = nnx.LayerNorm(config.hidden, epsilon=1e-12, rngs=rngs)
        self.intermediate = nnx.Linear(config.hidden, 4 * config.hidden, rngs=rngs)
        self.output = nnx.Linear(4 * config.hidden, config.hidden, rngs=rngs)
        self.output_norm = nnx.LayerNorm(config.hidden, epsilon=1e-12, rngs=rngs)

    def __call__(self, x, attention_mask):
        x = self.norm(x + self.dense(self.attention(x, attention_mask)[0]))
        inner = jax.nn.gelu(self.intermediate(x), approximate=False)
        return self.output_norm(x + self.output(inner))


class Bert(nnx.Module):
    def __init__(self, config: Config, *, rngs):
        self.word_embeddings = _embed(config.vocab, config, rngs)
        self.layers = nnx.List([BertLayer(config, rngs) for _ in range(config.layers)])

    def __call__(self, tokens, attention_mask=None):
        x = self.word_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.word_embeddings.attend(x)

"""The table of operators, and of their implementations.

Three operators compute attention, of [batch, tokens, heads, head_dim]:

- BERT: a query sees the first `lengths[b]` keys of its sequence; the rest is padding.
- GPT: a query sees keys up to its own place.
- T5: every query sees all keys; a bias is added to the scores, which are not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax import Array

from cfp.operators import operator as f
from cfp.operators.operator import Argument, Operator, causal_mask, length_mask

Function = Callable[..., Array]
# From (query, key, the operator's other arguments) to keyword arguments.
Form = Callable[..., Mapping[str, Any]]


def _attention(name: str, plain: Form, fused: Form) -> dict[tuple[str, str], Function]:
    """Implementations: `plain` makes the keywords of `xla`, `fused` of the others."""

    def by(attend: Function, form: Form) -> Function:
        return lambda query, key, value, *rest: attend(
            query, key, value, **form(query, key, *rest)
        )

    cudnn, jax_nn = (
        by(partial(f.attention_jax_nn, implementation=one), fused)
        for one in ("cudnn", "xla")
    )
    return {
        (name, "cudnn"): cudnn,
        (name, "jax_nn"): jax_nn,
        (name, "xla"): by(f.all_scores, plain),
    }


def _of_t5(query: Array, key: Array, bias: Array) -> dict[str, Any]:
    return {"bias": bias, "scale": 1.0}


def _masked(softmax: Function) -> Function:
    return lambda scores, lengths: softmax(
        scores, length_mask(lengths, scores.shape[-1])
    )


def _causal(softmax: Function) -> Function:
    return lambda scores: softmax(scores, causal_mask(*scores.shape[-2:]))


# (operator, implementation) -> function; an operator's preferred implementation first.
IMPLEMENTATIONS: Mapping[tuple[str, str], Function] = {
    **_attention(
        "gpt_attention",
        lambda query, key: {"mask": causal_mask(query.shape[1], key.shape[1])},
        lambda query, key: {"is_causal": True},
    ),
    **_attention(
        "bert_attention",
        lambda query, key, lengths: {"mask": length_mask(lengths, key.shape[1])},
        lambda query, key, lengths: {"key_value_seq_lengths": lengths},
    ),
    **_attention("t5_attention", _of_t5, _of_t5),
    ("linear_cross_entropy", "xla"): f.linear_cross_entropy,
    ("linear_cross_entropy", "chunked_vocabulary"): f.chunked_vocabulary,
    ("layer_norm", "xla"): f.layer_norm,
    ("layer_norm", "jax_nn"): f.layer_norm_jax_nn,
    ("rms_norm", "xla"): f.rms_norm,
    ("dropout_add_layer_norm", "xla"): f.dropout_add_layer_norm,
    ("dropout_add_layer_norm", "jax_nn"): partial(
        f.dropout_add_layer_norm, norm=f.layer_norm_jax_nn
    ),
    ("bias_gelu", "jax_nn"): f.bias_gelu_jax_nn,
    ("bias_gelu", "rematerialized"): jax.checkpoint(f.bias_gelu_jax_nn),
    ("bias_gelu", "xla"): f.bias_gelu,
    ("swiglu", "jax_nn"): f.swiglu,
    ("swiglu", "rematerialized"): f.swiglu_rematerialized,
    ("qkv_projection", "separate"): f.qkv_separate,
    ("qkv_projection", "fused"): f.qkv_fused,
    ("qkv_projection", "batched"): f.qkv_batched,
    ("cross_entropy", "xla"): f.cross_entropy,
    ("cross_entropy", "one_hot"): f.cross_entropy_one_hot,
    ("softmax", "jax_nn"): f.softmax_jax_nn,
    ("softmax", "xla"): f.softmax,
    ("masked_softmax", "jax_nn"): _masked(f.softmax_jax_nn),
    ("masked_softmax", "xla"): _masked(f.softmax),
    ("causal_softmax", "jax_nn"): _causal(f.softmax_jax_nn),
    ("causal_softmax", "xla"): _causal(f.softmax),
    ("rotary_embedding", "xla"): f.rotary,
    ("rotary_embedding", "complex"): f.rotary_complex,
    ("embedding", "xla"): f.take,
    ("grouped_matmul", "ragged_dot"): jax.lax.ragged_dot,
    ("grouped_matmul", "one_by_one"): f.one_by_one,
    ("moe_dispatch", "ragged_dot"): f.sorted_experts,
    ("moe_dispatch", "every_expert"): f.every_expert,
}

_kernel = partial(Argument, spread="fan_in")
_X, _X_FLAT = Argument("x", "* h"), Argument("x", "t h")
_SCALE = Argument("scale", "h", around=1.0, spread=0.1)
_BIAS = Argument("bias", "h", spread=0.1)
_SCORES = Argument("scores", "b n q s", spread=2.0)
_LABELS = Argument("labels", "t", kind="below", below="v")
_LENGTHS = Argument("lengths", "b", kind="lengths", below="s")
_QKV = tuple(Argument(name, "b s n d") for name in ("query", "key", "value"))


def _operator(
    name: str,
    summary: str,
    *arguments: Argument,
    oracle: str = "xla",
    flops: Callable[[Mapping[str, int]], float] = lambda dims: 0.0,
    **options: Any,
) -> Operator:
    """Makes an operator from its `IMPLEMENTATIONS`; `oracle` is the name of one."""
    return Operator(
        name=name,
        summary=summary,
        arguments=arguments,
        oracle=IMPLEMENTATIONS[name, oracle],
        implementations={i: x for (o, i), x in IMPLEMENTATIONS.items() if o == name},
        flops=flops,
        options=options,
    )


def _attention_flops(dims: Mapping[str, int]) -> float:
    return 4.0 * dims["b"] * dims["n"] * dims["s"] ** 2 * dims["d"]


# In the order of measuring: the most important operators come first.
_EVERY = (
    _operator(
        "gpt_attention",
        "causal attention",
        *_QKV,
        flops=lambda d: 0.5 * _attention_flops(d),
    ),
    _operator(
        "bert_attention",
        "attention to the first keys of each sequence",
        *(*_QKV, _LENGTHS),
        flops=_attention_flops,
    ),
    _operator(
        "t5_attention",
        "attention with a bias of the scores, which are not scaled",
        Argument("query", "b s n d", spread="fan_last"),
        *(*_QKV[1:], Argument("bias", "1 n s s")),
        flops=_attention_flops,
    ),
    _operator(
        "linear_cross_entropy",
        "mean cross-entropy of x @ kernel.T, float32",
        *(_X_FLAT, Argument("kernel", "v h", spread="fan_last"), _LABELS),
        flops=lambda d: 2.0 * d["t"] * d["h"] * d["v"],
        chunks=8,
    ),
    _operator(
        "layer_norm",
        "(x - mean) / sqrt(variance + eps) * scale + bias, over the last dim",
        *(_X, _SCALE, _BIAS),
        eps=1e-5,
    ),
    _operator(
        "rms_norm",
        "x / sqrt(mean of squares + eps) * scale, over the last dim",
        *(_X, _SCALE),
        eps=1e-6,
    ),
    _operator(
        "dropout_add_layer_norm",
        "layer norm of residual + dropout(x), as after each half of a layer",
        *(_X, Argument("residual", "* h"), _SCALE, _BIAS),
        Argument("key", "2", kind="key"),
        rate=0.1,
        eps=1e-5,
    ),
    _operator(
        "bias_gelu",
        "GELU (tanh) of x + bias, as between the two halves of an MLP",
        *(Argument("x", "* f"), Argument("bias", "f")),
    ),
    _operator(
        "swiglu",
        "silu(x @ gate) * (x @ up), the first half of a gated MLP",
        *(_X, _kernel("gate", "h f"), _kernel("up", "h f")),
        flops=lambda d: 4.0 * d["*"] * d["h"] * d["f"],
        oracle="jax_nn",
    ),
    _operator(
        "qkv_projection",
        "query, key and value of x, stacked",
        *(_X, _kernel("kernel", "3 h h"), Argument("bias", "3 h", spread=0.1)),
        flops=lambda d: 6.0 * d["*"] * d["h"] ** 2,
        oracle="separate",
    ),
    _operator(
        "cross_entropy",
        "minus the log probability of each label, float32",
        *(Argument("logits", "t v", spread=2.0), _LABELS),
    ),
    _operator("softmax", "softmax over the last dim", _SCORES),
    _operator(
        "masked_softmax",
        "softmax over the first keys of each sequence, the others are zero",
        *(_SCORES, _LENGTHS),
    ),
    _operator(
        "causal_softmax", "softmax over the keys up to each query's own place", _SCORES
    ),
    _operator(
        "rotary_embedding",
        "turns pairs of a head's features by angles that grow with the place",
        Argument("x", "b s n d"),
        base=10000.0,
    ),
    _operator(
        "embedding",
        "rows of a table, by token",
        Argument("table", "v h"),
        Argument("tokens", "b s", kind="below", below="v"),
    ),
    _operator(
        "grouped_matmul",
        "rows of x in groups, each group with a kernel of its own",
        *(_X_FLAT, _kernel("kernels", "e h w")),
        Argument("groups", "e", kind="groups", below="t"),
        flops=lambda d: 2.0 * d["t"] * d["h"] * d["w"],
        oracle="one_by_one",
    ),
    _operator(
        "moe_dispatch",
        "each token through the MLPs of its best experts, weighted",
        *(_X_FLAT, Argument("scores", "t e")),
        *(_kernel("up", "e h w"), _kernel("down", "e w h")),
        flops=lambda d: 8.0 * d["t"] * d["h"] * d["w"],
        choices=2,
        oracle="every_expert",
    ),
)
OPERATORS: Mapping[str, Operator] = {one.name: one for one in _EVERY}

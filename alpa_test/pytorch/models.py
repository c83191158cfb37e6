"""The zoo's models in PyTorch: the same layers, the same shapes, the same numbers.

Names of parameters say what tensor parallelism does with them (`strategies.py`).
Kernels are those of `torch.nn.Linear`, [out, in].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STDDEV = 0.02
ROTARY_BASE = 10000.0
BALANCE_WEIGHT = 0.01


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model, from the zoo's options."""

    model: str
    vocab: int
    seq: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    experts: int = 0
    expert_group_size: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Attention(nn.Module):
    """Self-attention by a fused kernel; with rotary positions if asked for."""

    def __init__(self, shape: Shape, *, causal: bool, rotary: bool, bias: bool) -> None:
        super().__init__()
        s = shape
        self.head_dim, self.causal, self.rotary = s.head_dim, causal, rotary
        self.query = nn.Linear(s.hidden, s.heads * s.head_dim, bias=bias)
        # Keys have no bias: softmax takes it away.
        self.key = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.value = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=bias)
        self.out = nn.Linear(s.heads * s.head_dim, s.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq = x.shape[:2]

        # The number of heads is what is here: tensor parallelism splits them.
        def heads(y: Tensor) -> Tensor:
            return y.view(batch, seq, -1, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        if self.rotary:
            q, k = rotate(q), rotate(k)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))


def rotate(x: Tensor) -> Tensor:
    """[batch, heads, seq, head_dim]: turns pairs of numbers by their position."""
    seq, half = x.shape[2], x.shape[3] // 2
    places = torch.arange(half, device=x.device, dtype=torch.float32)
    rates = ROTARY_BASE ** -(places / half)
    angles = torch.arange(seq, device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(turned, dim=-1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """GShard's layer, by the same contractions as the zoo's; `loss` is its penalty."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s = shape
        self.group, self.experts = s.expert_group_size, s.experts
        self.gate = nn.Linear(s.hidden, s.experts, bias=False)
        self.up = nn.Parameter(torch.empty(s.experts, s.hidden, s.ffn))
        self.up_bias = nn.Parameter(torch.zeros(s.experts, s.ffn))
        self.down = nn.Parameter(torch.empty(s.experts, s.ffn, s.hidden))
        self.down_bias = nn.Parameter(torch.zeros(s.experts, s.hidden))
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, self.group, x.shape[-1])
        gates = F.linear(tokens.float(), self.gate.weight.float()).softmax(-1)
        dispatch, combine, balance = self._route(gates)
        self.loss = BALANCE_WEIGHT * balance
        seated = torch.einsum("gsec,gsh->egch", dispatch.to(x.dtype), tokens)
        groups, capacity = seated.shape[1:3]
        h = seated.flatten(1, 2)
        h = torch.baddbmm(self.up_bias.to(x.dtype)[:, None], h, self.up.to(x.dtype))
        h = F.gelu(h, approximate="tanh")
        h = torch.baddbmm(self.down_bias.to(x.dtype)[:, None], h, self.down.to(x.dtype))
        y = h.unflatten(1, (groups, capacity))
        return torch.einsum("gsec,egch->gsh", combine.to(x.dtype), y).reshape(x.shape)

    def _route(self, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        capacity = -(-2 * self.group // self.experts)
        first = F.one_hot(gates.argmax(-1), self.experts)
        others = torch.where(first == 1, -1.0, gates)
        second = F.one_hot(others.argmax(-1), self.experts)

        def seat(chosen: Tensor, index: Tensor) -> Tensor:
            taken = (chosen == 1) & (index < capacity)
            place = torch.where(taken, index, capacity)
            return F.one_hot(place, capacity + 1)[..., :capacity].to(gates.dtype)

        first_seat = seat(first, first.cumsum(1) - 1)
        second_index = second.cumsum(1) - 1 + first.sum(1, keepdim=True)
        second_seat = seat(second, second_index)
        a = (gates * first).sum(-1)[..., None, None]
        b = (gates * second).sum(-1)[..., None, None]
        load = first.to(gates.dtype).mean(1)
        balance = self.experts * (load * gates.mean(1)).sum(-1).mean()
        combine = (a * first_seat + b * second_seat) / (a + b)
        return first_seat + second_seat, combine, balance


class Layer(nn.Module):
    """A pre-norm decoder layer, or a post-norm encoder layer."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        s = shape
        llama, self.post = s.model == "llama", s.model == "bert"
        norm = nn.RMSNorm if llama else nn.LayerNorm
        epsilon = 1e-5 if llama else 1e-6
        self.attention_norm = norm(s.hidden, eps=epsilon)
        self.attention = Attention(
            s, causal=not self.post, rotary=llama, bias=not llama
        )
        self.mlp_norm = norm(s.hidden, eps=epsilon)
        if llama:
            self.mlp: nn.Module = GatedMLP(s.hidden, s.ffn)
        elif s.model == "moe" and number % 2:
            self.mlp = Experts(s)
        else:
            self.mlp = MLP(s.hidden, s.ffn)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.attention_norm(x + self.attention(x))
            return self.mlp_norm(x + self.mlp(x))
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s = self.shape = shape
        bert, llama = s.model == "bert", s.model == "llama"
        self.token = nn.Embedding(s.vocab, s.hidden)
        if not llama:
            self.position = nn.Embedding(s.seq, s.hidden)
        if bert:
            self.sentence = nn.Embedding(2, s.hidden)
            self.embedding_norm = nn.LayerNorm(s.hidden, eps=1e-6)
            self.head_dense = nn.Linear(s.hidden, s.hidden)
            self.head_bias = nn.Parameter(torch.zeros(s.vocab))
        else:
            self.head = nn.Linear(s.hidden, s.vocab, bias=False)
        self.layers = nn.ModuleList(Layer(s, i) for i in range(s.layers))
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.final_norm = norm(s.hidden, eps=1e-5 if llama else 1e-6)
        self.draw()

    @torch.no_grad()
    def draw(self) -> None:
        """All matrices from one distribution, norms at one, biases at zero."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and "bias" not in name:
                parameter.normal_(std=INIT_STDDEV)
            elif "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
            else:
                parameter.zero_()

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """[batch, seq] -> [batch, seq, vocab], computed in `dtype`."""
        x = self.token(tokens)
        if self.shape.model != "llama":
            places = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + self.position(places)
        if self.shape.model == "bert":
            halves = torch.arange(tokens.shape[1], device=tokens.device) * 2
            x = x + self.sentence(halves // tokens.shape[1])
            x = self.embedding_norm(x)
        x = x.to(dtype)
        for layer in self.layers:
            x = layer(x)
        if self.shape.model == "bert":
            x = self.final_norm(F.gelu(self.head_dense(x), approximate="tanh"))
            table = self.token.weight.to(x.dtype)
            return F.linear(x, table, self.head_bias.to(x.dtype))
        return self.head(self.final_norm(x))

    def penalty(self) -> Tensor | float:
        """Returns the experts' part of the loss."""
        losses = [layer.mlp.loss for layer in self.layers if hasattr(layer.mlp, "loss")]
        return sum(losses) if losses else 0.0

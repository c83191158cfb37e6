"""Weights of a LLaMA from safetensors files, as Hugging Face names and shapes them.

A safetensors file is a length of 8 bytes, that many bytes of JSON with a name, dtype,
shape and place for each tensor, and the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from cfp.models.model import Config

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of all files of a folder.

    Raises:
      SystemExit: there is no such file, or one of a dtype that is not known.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{folder} holds no *.safetensors")
    for file in files:
        data = np.memmap(file, np.uint8, mode="r")
        size = int(data[:8].view(np.uint64)[0])
        for name, one in json.loads(bytes(data[8 : 8 + size])).items():
            if name == "__metadata__":
                continue
            if one["dtype"] not in DTYPES:
                raise SystemExit(f"{file}: {name} is of dtype {one['dtype']}")
            start, end = one["data_offsets"]
            part = np.array(data[8 + size + start : 8 + size + end])
            dtype = jnp.dtype(DTYPES[one["dtype"]])
            yield name, part.view(dtype).reshape(one["shape"])


def load(folder: Path, config: Config) -> dict[str, Any]:
    """The tree of parameters of a model, in float32.

    Raises:
      SystemExit: a tensor is missing, or has another shape.
    """
    c, found = config, dict(tensors(folder))
    heads = {"query": c.heads, "key": c.kv_heads or c.heads}
    heads["value"] = heads["key"]

    def take(name: str, *shape: int) -> np.ndarray:
        if name not in found or found[name].shape != shape:
            got = found[name].shape if name in found else "none"
            raise SystemExit(f"expected {name} of shape {shape}, got {got}")
        return found[name].astype(np.float32)

    ffn = c.ffn
    assert ffn is not None, "a preset names it"
    params: dict[str, Any] = {
        "embedding": take("model.embed_tokens.weight", c.vocab, c.hidden),
        "final_norm": take("model.norm.weight", c.hidden),
        "head": take("lm_head.weight", c.vocab, c.hidden).T,
    }
    for i in range(c.layers):
        at = f"model.layers.{i}."
        attention = {
            name: take(
                f"{at}self_attn.{name[0]}_proj.weight", n * c.head_dim, c.hidden
            ).T.reshape(c.hidden, n, c.head_dim)
            for name, n in heads.items()
        }
        out = take(f"{at}self_attn.o_proj.weight", c.hidden, c.hidden).T
        attention["out"] = out.reshape(c.heads, c.head_dim, c.hidden)
        shapes = {"gate": (ffn, c.hidden), "up": (ffn, c.hidden)}
        shapes["down"] = (c.hidden, ffn)
        params[f"layer_{i}"] = {
            "attention_norm": take(f"{at}input_layernorm.weight", c.hidden),
            "attention": attention,
            "mlp_norm": take(f"{at}post_attention_layernorm.weight", c.hidden),
            "mlp": {
                name: take(f"{at}mlp.{name}_proj.weight", *shape).T
                for name, shape in shapes.items()
            },
        }
    return params

"""Configurations that are compared: models, sizes and types, by suite.

Sizes of the layer suite are those of CFP's artifact: GPT and LLaMA layers of width
4096, and its mixture of experts, four layers of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cfp.models import MODELS
from cfp.models.options import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One thing to compare competitors on.

    Attributes:
      model: name in the zoo.
      options: its options, dtype and batch among them.
    """

    model: str
    options: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Such as `gpt, 4 layers, batch 24, bfloat16`."""
        o = self.options
        return f"{self.model}, {o['layers']} layers, batch {o['batch']}, {o['dtype']}"


_GPT = {"hidden": 4096, "heads": 32, "seq": 1024, "vocab": 51200}
_MOE = {
    "hidden": 1280,
    "heads": 4,
    "seq": 1024,
    "vocab": 32000,
    "experts": 32,
    "expert_group_size": 2048,
}
# BERT's 30522 tokens, up to a multiple of 128, as Megatron-LM pads vocabularies.
_BERT_VOCAB = 30592
_LLAMA = {"hidden": 4096, "heads": 32, "ffn": 11008, "seq": 1024, "vocab": 32000}

SUITES: Mapping[str, Mapping[str, Mapping[str, Scalar]]] = MappingProxyType(
    {
        "layers": {
            "gpt": {**_GPT, "layers": 4, "batch": 24},
            "bert": {
                "hidden": 4096,
                "heads": 32,
                "seq": 512,
                "vocab": _BERT_VOCAB,
                "layers": 4,
                "batch": 48,
            },
            "llama": {**_LLAMA, "layers": 4, "batch": 40},
            "moe": {**_MOE, "layers": 4, "batch": 64},
        },
        "models": {
            "gpt": {**_GPT, "hidden": 2048, "layers": 24, "batch": 32},
            "bert": {
                "hidden": 1024,
                "heads": 16,
                "seq": 512,
                "vocab": _BERT_VOCAB,
                "layers": 24,
                "batch": 128,
            },
            "llama": {**_LLAMA, "layers": 32, "batch": 8, "remat": True},
            "moe": {**_MOE, "layers": 16, "batch": 64},
        },
        # So small that virtual devices of a CPU run it: for tests, and to look.
        "tiny": {model: {"layers": 2} for model in MODELS},
    }
)


def configs(
    suite: str, models: list[str], overrides: Mapping[str, Scalar], devices: int
) -> list[Config]:
    """The configurations of a suite.

    Args:
      suite: a key of `SUITES`.
      models: of its models those wanted, in order.
      overrides: options that replace the suite's.
      devices: how many there are: tiny sizes are multiples of that.
    """
    found = []
    for model in models:
        known = {option.name for option in MODELS[model].options}
        given = {k: v for k, v in overrides.items() if k in known}
        sizes = dict(SUITES[suite][model])
        if suite == "tiny":
            sizes = {**small(model, sizes, devices), "dtype": "float32"}
            sizes.pop("learning_rate")
        options = {"dtype": "bfloat16", **sizes, **given}
        found.append(Config(model=model, options=options))
    return found


def small(model: str, options: Mapping[str, Scalar], devices: int) -> dict[str, Scalar]:
    """The same model at a size that takes no time, in float32.

    All structure stays: layers, loops, rematerialisation, ties. Whatever can be split
    over the devices at full size can be split at this one.

    Args:
      model: name in the zoo.
      options: those at full size.
      devices: how many there are.
    """
    known = {option.name for option in MODELS[model].options}
    heads = max(4, devices)
    sizes = {
        "hidden": 8 * heads,
        "heads": heads,
        "kv_heads": heads,
        "ffn": 24 * heads,
        "seq": 4 * heads,
        "vocab": 40 * heads,
        "batch": 2 * heads,
        "experts": 2 * heads,
        "expert_group_size": 4 * heads,
        "dtype": "float32",
        "learning_rate": 1e-2,
    }
    kept = {
        k: v for k, v in options.items() if k in ("layers", "scan", "remat", "tied")
    }
    kv_heads = options.get("kv_heads")
    if kv_heads and kv_heads != options.get("heads"):
        sizes["kv_heads"] = heads // 2
    return {**kept, **{k: v for k, v in sizes.items() if k in known}}

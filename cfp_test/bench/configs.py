"""Sizes of the models that are compared: four layers at full width, and tiny ones.

Those of GPT, LLaMA and the mixture of experts are of CFP's artifact. Batches are for
two devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cfp.models import find
from cfp.models.model import Scalar

# BERT's 30522 tokens, up to a multiple of 128, as Megatron-LM pads vocabularies.
_BERT_VOCAB = 30592
_WIDE = {"layers": 4, "hidden": 4096, "heads": 32}
LAYERS: Mapping[str, Mapping[str, Scalar]] = MappingProxyType(
    {
        "gpt": {**_WIDE, "seq": 1024, "vocab": 51200, "batch": 12},
        "bert": {**_WIDE, "seq": 512, "vocab": _BERT_VOCAB, "batch": 24},
        "llama": {**_WIDE, "ffn": 11008, "seq": 1024, "vocab": 32000, "batch": 20},
        "moe": {
            **{"layers": 4, "hidden": 1280, "heads": 4, "seq": 1024, "vocab": 32000},
            **{"experts": 32, "expert_group_size": 2048, "batch": 32},
        },
    }
)


def small(model: str, layers: int, devices: int) -> dict[str, Scalar]:
    """Sizes of a model that take no time, in float32.

    Every dim that devices can split at full width they can split at this one.

    Args:
      model: name in the zoo.
      layers: how many.
      devices: how many there are.
    """
    known = {option.name for option in find(model).options}
    heads = max(4, devices)
    sizes = {
        "layers": layers,
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
    return {name: size for name, size in sizes.items() if name in known}

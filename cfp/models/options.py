"""The options of models: declared once, for Python, the command line, and checks."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, model_validator

Scalar = int | float | str | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOption:
    """One option of a model.

    Attributes:
      name: the keyword, as in `build(name, expert_group_size=...)`.
      type: int, float, str or bool.
      default: what holds when the option is not given. None: derived from others.
    """

    name: str
    type: type
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        """The option as written on a command line: `--expert-group-size`."""
        return "--" + self.name.replace("_", "-")


def _option(default: Scalar, doc: str, least: int | None = None) -> Any:
    return Field(default, description=doc, ge=least)


class Config(BaseModel, frozen=True, strict=True, extra="forbid"):
    """The shape of a model and its training, for all models.

    The fields before `tied` and from `batch` on are those of every model. The defaults
    are GPT's; a `Model` has those that differ.
    """

    vocab: int = _option(51200, "tokens in the vocabulary", least=2)
    seq: PositiveInt = _option(1024, "tokens in a sequence")
    hidden: PositiveInt = _option(1024, "width of the residual stream")
    layers: PositiveInt = _option(
        4, "layers; in a mixture, those of odd index have experts"
    )
    heads: PositiveInt = _option(16, "attention heads; they divide hidden")
    ffn: PositiveInt | None = _option(
        None, "width inside the MLP and each expert; 4 * hidden, or LLaMA's, by default"
    )
    dtype: Literal["float32", "bfloat16"] = _option("bfloat16", "what is computed in")
    scan: bool = _option(False, "run the layers in a loop, with stacked parameters")
    remat: bool = _option(False, "rematerialize each layer in the backward pass")

    tied: bool = _option(False, "use the token embedding as the head's kernel")
    experts: int = _option(32, "experts in an expert layer, two or more", least=2)
    expert_group_size: PositiveInt = _option(
        2048, "tokens routed together; divide batch * seq"
    )
    kv_heads: PositiveInt | None = _option(
        None, "heads of keys and values; they divide heads"
    )

    batch: PositiveInt = _option(16, "sequences in a batch")
    microbatches: PositiveInt = _option(
        1, "parts of a batch, one after another; divide batch"
    )
    learning_rate: PositiveFloat = _option(3e-4, "AdamW's learning rate")

    @model_validator(mode="after")
    def _divides(self) -> "Config":
        divided = {"hidden": "heads", "heads": "kv_heads", "batch": "microbatches"}
        for whole, part in divided.items():
            size, parts = getattr(self, whole), getattr(self, part)
            if parts and size % parts:
                raise ValueError(
                    f"{whole} must be divisible by {part}, got {whole}={size} and "
                    f"{part}={parts}"
                )
        return self

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.hidden // self.heads

"""The options of models: declared once, for Python, the command line, and checks."""

from math import prod
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, model_validator

Scalar = int | float | str | bool | None


class ModelOption(NamedTuple):
    """One option of a model; a default of None is derived from other options."""

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

    The defaults are GPT's; a `Model` has its own differences.
    """

    vocab: int = _option(51200, "tokens in the vocabulary", least=2)
    seq: PositiveInt = _option(1024, "tokens in a sequence")
    hidden: PositiveInt = _option(1024, "width of the residual stream")
    layers: PositiveInt = _option(4, "layers; in a mixture every second has experts")
    heads: PositiveInt = _option(16, "attention heads; they divide hidden")
    ffn: PositiveInt | None = _option(None, "width inside the MLP and each expert")
    dtype: Literal["float32", "bfloat16"] = _option("bfloat16", "what is computed in")
    scan: bool = _option(False, "run the layers in a loop, with stacked parameters")
    remat: bool = _option(False, "rematerialize each layer in the backward pass")

    tied: bool = _option(False, "use the token embedding as the head's kernel")
    experts: int | None = _option(None, "experts in an expert layer", least=2)
    expert_group_size: PositiveInt | None = _option(
        None, "tokens routed together; divide batch * seq"
    )
    kv_heads: PositiveInt | None = _option(
        None, "heads of keys and values; they divide heads"
    )

    batch: PositiveInt = _option(16, "sequences in a batch")
    microbatches: PositiveInt = _option(1, "parts of a batch in a row; divide batch")
    learning_rate: PositiveFloat = _option(3e-4, "AdamW's learning rate")

    @model_validator(mode="after")
    def _divides(self) -> "Config":
        tokens = {"batch": self.batch // self.microbatches, "seq": self.seq}
        for sizes, part in (
            ({"hidden": self.hidden}, "heads"),
            ({"heads": self.heads}, "kv_heads"),
            ({"batch": self.batch}, "microbatches"),
            (tokens, "expert_group_size"),
        ):
            if prod(sizes.values()) % (parts := getattr(self, part) or 1):
                got = ", ".join(f"{name}={size}" for name, size in sizes.items())
                raise ValueError(
                    f"{' * '.join(sizes)} must be divisible by {part}, got {got} and "
                    f"{part}={parts}"
                )
        return self

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.hidden // self.heads

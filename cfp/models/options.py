"""The options of models: declared once, for Python, the command line, and checks."""

import dataclasses
import typing
from typing import Any

Scalar = int | float | str | bool | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelOption:
    """One option of a model.

    Attributes:
      name: the keyword, as in `build(name, expert_group_size=...)`.
      type: int, float, str or bool.
      default: what holds when the option is not given. None: derived from others.
      choices: the values allowed, or empty for any.
    """

    name: str
    type: type
    default: Scalar
    doc: str
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The option as written on a command line: `--expert-group-size`."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """Checks a value.

        Raises:
          ValueError: it has the wrong type, is a number that is not positive, or is not
            among the choices. An int will do for a float.
        """
        if self.default is None and value is None:
            return
        wanted = (int, float) if self.type is float else (self.type,)
        # A bool is an int, but not meant as a number.
        if not isinstance(value, wanted) or (
            isinstance(value, bool) > (bool in wanted)
        ):
            raise ValueError(
                f"{self.name} must be of type {self.type.__name__}, got {value!r}"
            )
        if self.choices and value not in self.choices:
            raise ValueError(
                f"{self.name} must be one of {', '.join(self.choices)}, got {value!r}"
            )
        if self.type in (int, float) and not value > 0:
            raise ValueError(f"{self.name} must be positive, got {value!r}")


def _option(default: Scalar, doc: str, *choices: str) -> Any:
    metadata = {"default": default, "doc": doc, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a model and its training, for all models.

    The fields before `tied` and from `batch` on are those of every model. The defaults
    are GPT's; `cfp.models.registry` has those of the others.
    """

    vocab: int = _option(51200, "tokens in the vocabulary")
    seq: int = _option(1024, "tokens in a sequence")
    hidden: int = _option(1024, "width of the residual stream")
    layers: int = _option(4, "layers; in a mixture, those of odd index have experts")
    heads: int = _option(16, "attention heads; they divide hidden")
    ffn: int | None = _option(
        None, "width inside the MLP and each expert; 4 * hidden, or LLaMA's, by default"
    )
    dtype: str = _option("bfloat16", "what is computed in", "float32", "bfloat16")
    scan: bool = _option(False, "run the layers in a loop, with stacked parameters")
    remat: bool = _option(False, "rematerialize each layer in the backward pass")

    tied: bool = _option(False, "use the token embedding as the head's kernel")
    experts: int = _option(32, "experts in an expert layer, two or more")
    expert_group_size: int = _option(2048, "tokens routed together; divide batch * seq")
    kv_heads: int | None = _option(None, "heads of keys and values; they divide heads")

    batch: int = _option(16, "sequences in a batch")
    microbatches: int = _option(1, "parts of a batch, one after another; divide batch")
    learning_rate: float = _option(3e-4, "AdamW's learning rate")

    def __post_init__(self) -> None:
        for option in options_of():
            option.check(getattr(self, option.name))
        divided = {"hidden": "heads", "heads": "kv_heads", "batch": "microbatches"}
        for whole, part in divided.items():
            size, parts = getattr(self, whole), getattr(self, part)
            if parts and size % parts:
                raise ValueError(
                    f"{whole} must be divisible by {part}, got {whole}={size} and "
                    f"{part}={parts}"
                )

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.hidden // self.heads


def options_of() -> tuple[ModelOption, ...]:
    """Lists the options of all models, in order."""
    hints = typing.get_type_hints(Config)
    return tuple(
        ModelOption(
            name=field.name,
            type=(typing.get_args(hints[field.name]) or (hints[field.name],))[0],
            **field.metadata,
        )
        for field in dataclasses.fields(Config)
    )

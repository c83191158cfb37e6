"""Option records: how a model's configuration is shown to a person.

A configuration is a frozen dataclass whose fields are declared with `option`. The
same declaration gives the default, the sentence of help, and the checks, so that
the command line and the Python call cannot drift apart.
"""

import dataclasses
import types
import typing
from typing import Any

Scalar = int | float | str | bool | None

SCAN_DOC = "run the layers in a loop, their parameters stacked on dim 0"


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


def option(default: Scalar, doc: str, *, choices: tuple[str, ...] = ()) -> Any:
    """Declares a dataclass field that is also a `ModelOption`."""
    metadata = {"default": default, "doc": doc, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def dtype_option(float32: str = "parameters") -> Any:
    """Declares the type that a model computes in, beside what stays in float32."""
    doc = f"what is computed in; {float32} are float32"
    return option("bfloat16", doc, choices=("float32", "bfloat16"))


def options_of(config: type) -> tuple[ModelOption, ...]:
    """Lists the options that a configuration dataclass declares, in order."""
    hints = typing.get_type_hints(config)
    return tuple(
        ModelOption(
            name=field.name,
            type=_without_none(hints[field.name]),
            **field.metadata,
        )
        for field in dataclasses.fields(config)
    )


def check_options(config: Any) -> None:
    """Checks the fields of a configuration one by one.

    Raises:
      ValueError: a value has the wrong type, is a number that is not positive, or is
        not among the choices.
    """
    for known in options_of(type(config)):
        value = getattr(config, known.name)
        if known.default is None and value is None:
            continue
        if not _fits(value, known.type):
            raise ValueError(
                f"{known.name} must be of type {known.type.__name__}, got {value!r}"
            )
        if known.choices and value not in known.choices:
            raise ValueError(
                f"{known.name} must be one of {', '.join(known.choices)}, got {value!r}"
            )
        if known.type in (int, float) and not value > 0:
            raise ValueError(f"{known.name} must be positive, got {value!r}")


def _fits(value: Any, wanted: type) -> bool:
    """Returns True if a value has the right type; an int will do for a float."""
    if isinstance(value, bool):  # A subclass of int, but not meant as a number.
        return wanted is bool
    return isinstance(value, (int, float) if wanted is float else wanted)


def _without_none(hint: Any) -> type:
    """`int | None` -> `int`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in hint.__args__ if part is not types.NoneType)
    return hint


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a transformer. `ffn` is 4 * hidden unless given."""

    vocab: int = option(51200, "tokens in the vocabulary")
    seq: int = option(1024, "tokens in a sequence")
    hidden: int = option(1024, "width of the residual stream")
    layers: int = option(4, "decoder layers")
    heads: int = option(16, "attention heads; they divide hidden")
    ffn: int | None = option(None, "width inside the MLP; 4 * hidden if not given")
    dtype: str = dtype_option()
    scan: bool = option(False, SCAN_DOC)
    remat: bool = option(
        False, "rematerialize each layer in the backward pass, and keep only its input"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden must be divisible by heads, got hidden={self.hidden} and "
                f"heads={self.heads}"
            )

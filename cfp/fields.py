"""Types of fields of saved files; pydantic checks them when a file is read."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from cfp.printable import one_line

MOST_CHARACTERS = 10_000
MOST_COUNT = 2**53  # JSON holds integers exactly up to here.

Count = Annotated[int, Field(strict=True, ge=0, le=MOST_COUNT)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Time = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]


def matching(pattern: str, expected: str) -> AfterValidator:
    """Returns a validator of text by a regular expression; `expected` is its error."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(expected)
        return text

    return AfterValidator(check)


def _name(text: str) -> str:
    if not text.isprintable():
        raise ValueError("text of printable characters")
    return text


def _words(text: Any) -> Any:
    return one_line(text) if isinstance(text, str) else text


# Text for people, in one line; unprintable characters are replaced.
Words = Annotated[str, Field(max_length=MOST_CHARACTERS), BeforeValidator(_words)]
# Names that are compared elsewhere; unprintable characters are refused.
Name = Annotated[str, Field(max_length=MOST_CHARACTERS), AfterValidator(_name)]
Spec = tuple[tuple[Words, ...], ...]
# The source of a plan's numbers.
Rung = Annotated[str, matching("estimated|measured", "estimated or measured")]


def shown(value: object) -> str:
    """Returns a value's ASCII repr for a message, cut to 60 characters."""
    return ascii(value) if len(ascii(value)) <= 60 else ascii(value)[:57] + "..."


def first_error(error: ValidationError) -> tuple[str, str, str]:
    """Returns the first error's place, what was expected, and the value found."""
    first = error.errors(include_url=False)[0]
    parts = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
    where = "".join(parts).removeprefix(".")
    if first["type"] == "json_invalid":
        return where, "JSON", first["msg"]
    if first["type"].startswith("missing"):
        return where, "this field", "nothing"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return where, "no field of this name", shown(first["input"])
    message = re.sub("^(Value error, |Input should be )", "", first["msg"])
    return where, message.replace("tuple", "list"), shown(first["input"])

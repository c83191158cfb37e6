"""Printable text: replaced control characters, merged names, numbers with units.

Types of fields of saved files, which pydantic checks when a file is read, are here too.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from math import ceil, prod
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from cfp.errors import CfpError

_STAND_IN = "\N{REPLACEMENT CHARACTER}"
_NUMBER = re.compile(r"\d+")

# Width of text if the output has none, and the least width.
USUAL_COLUMNS = 100
LEAST_COLUMNS = 60


def columns() -> int:
    """Returns the width of text: $COLUMNS, the terminal's or 100, but at least 60."""
    return max(shutil.get_terminal_size((USUAL_COLUMNS, 24)).columns, LEAST_COLUMNS)


def counted(count: float, one: str, many: str) -> str:
    """Returns a number with its noun: ``1 strategy``, ``2 strategies``."""
    return f"{count:.0f} {one if count == 1 else many}"


def few(texts: Sequence[str], between: str = ", ", most: int = 4) -> str:
    """Joins up to `most` different texts, and counts others: ``a, b and 3 more``."""
    texts = [*dict.fromkeys(texts)]
    more = len(texts) - most
    return between.join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def mesh_text(axes: Iterable[tuple[str, int]]) -> str:
    """Writes the axes of a mesh as on the command line: ``x=2,y=4``."""
    return ",".join(f"{name}={size}" for name, size in axes)


def printable(text: str, kept: str = "") -> str:
    """Replaces unprintable characters, such as terminal escapes, by U+FFFD.

    Escape sequences may move the cursor, rename the window or write into the input.
    Characters of `kept`, such as a newline, stay.
    """
    return "".join(c if c.isprintable() or c in kept else _STAND_IN for c in text)


def one_line(text: str) -> str:
    """Joins stripped lines by spaces; replaces unprintable characters by U+FFFD."""
    if "\n" in text:
        text = " ".join(line.strip() for line in text.split("\n"))
    return printable(text)


def merged_name(names: Sequence[str]) -> str:
    """Merges names that differ in numbers into one: ``layer_0-3/mlp/up``.

    Equal ranges in one name count together: ``layer_0-3/layers/0-3/up`` is four names.
    Names that do not merge become ``first ... last``.
    """
    merged = merged_alike(names, is_paired=True)
    return merged[0] if len(merged) == 1 else f"{names[0]} ... {names[-1]}"


def merged_alike(names: Sequence[str], *, is_paired: bool = False) -> list[str]:
    """Merges names that differ in numbers alone: ``layer_0-3/up``; keeps other names.

    A merged name with several ranges means all combinations of their numbers; equal
    ranges vary together if `is_paired`. If a combination is missing, names stay apart.
    """
    alike: dict[str, dict[tuple[str, ...], str]] = {}
    for name in names:
        numbers = tuple(_NUMBER.findall(name))
        alike.setdefault(_NUMBER.sub("#", name), {}).setdefault(numbers, name)
    merged: list[str] = []
    for group in alike.values():
        columns = [*zip(*group, strict=True)]
        if prod(len({*c}) for c in ({*columns} if is_paired else columns)) > len(group):
            merged += group.values()
            continue
        spans = iter(
            c[0] if len({*c}) == 1 else span_text([*map(int, c)]) for c in columns
        )
        name = next(iter(group.values()))
        merged.append(_NUMBER.sub(lambda _, spans=spans: next(spans), name))
    return merged


def distinct_ends(names: Sequence[str]) -> list[str]:
    """Shortens paths to the shortest ends that distinguish them.

    ``a/q/kernel`` and ``a/k/kernel`` give ``q/kernel`` and ``k/kernel``.
    """
    ends: Counter[str] = Counter()
    for name in set(names):
        parts = name.split("/")
        ends.update("/".join(parts[start:]) for start in range(len(parts)))
    found = []
    for name in names:
        parts = name.split("/")
        tails = ["/".join(parts[start:]) for start in reversed(range(len(parts)))]
        found.append(next((tail for tail in tails if ends[tail] == 1), name))
    return found


def numbered(names: Sequence[str]) -> list[str]:
    """Numbers equal names: ``a, b, a`` gives ``a#1, b, a#2``."""
    counts, ranks = Counter(names), defaultdict[str, Iterator[int]](count)
    return [f"{x}#{next(ranks[x]) + 1}" if counts[x] > 1 else x for x in names]


def span_text(numbers: list[int]) -> str:
    """Sorts and abbreviates numbers: ``0-3``, ``0,2..6`` (four or more), ``0,1,5``."""
    distinct = sorted(set(numbers))
    if len(distinct) == 1:
        return str(distinct[0])
    step = distinct[1] - distinct[0]
    if distinct == list(range(distinct[0], distinct[-1] + 1, step)):
        if step == 1:
            return f"{distinct[0]}-{distinct[-1]}"
        if len(distinct) > 3:
            return f"{distinct[0]},{distinct[1]}..{distinct[-1]}"
    return ",".join(map(str, distinct))


# ------------------------------------------------------------------- numbers with units

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
# Smaller amounts without a unit are errors: the user forgot the unit.
_LEAST_WRITTEN, _LEAST_NUMBER = 2**20, 2**10
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: int | float | str | None) -> int | None:
    """Reads bytes from ``80GiB``, ``1.5 GB``, ``8000000000`` or a number; keeps None.

    Raises:
        CfpError: the text is no positive amount of memory, or has no unit and means
            less than 1 MiB, or is a number below 1024.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    scale = {**_UNITS, **_BINARY}.get(match[2]) if match else None
    try:
        amount = float(match[1]) * scale if match and scale else 0.0
    except ValueError:
        amount = 0.0
    if amount < 1:
        raise CfpError(
            f"Expected an amount of memory such as '80GiB' or '512MB', got {text!r}."
        )
    least = _LEAST_WRITTEN if isinstance(text, str) else _LEAST_NUMBER
    if not (number := str(text).strip())[-1].isalpha() and amount < least:
        raise CfpError(
            f"An amount of memory without a unit is in bytes, and {number} is too few "
            f"for a plan. Write {number}GiB or {number}MiB, or {number}B for bytes."
        )
    return int(amount)


def format_bytes(count: float, *, up: bool = False) -> str:
    """Formats bytes: ``512 B``, ``1.50 GiB``; rounded `up`, the amount suffices."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            rounded = ceil(count * 100) / 100 if up else count
            return f"{count:.0f} {unit}" if unit == "B" else f"{rounded:.2f} {unit}"
        count /= 1024
    raise AssertionError


def format_flops(flops: float) -> str:
    """Formats a number of floating-point operations: ``5.24 MFLOP``."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("", 1.0)):
        if abs(flops) >= 0.1 * scale or not prefix:
            amount = flops / scale
            digits = f"{amount:.3g}" if amount < 999.5 else f"{amount:,.0f}"
            return f"{digits} {prefix}FLOP"
    raise AssertionError


def waiting_text(label: str, seconds: float) -> str:
    """Returns the progress text while one last program, named `label`, compiles."""
    return f"waiting for 1 program to compile, {clock_text(seconds)} so far: {label!r}"


def clock_text(seconds: float) -> str:
    """Formats seconds as minutes and seconds: ``2:05``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


MOST_CHARACTERS = 10_000
MOST_COUNT = 2**53  # JSON holds integers exactly up to here.

Count = Annotated[int, Field(strict=True, ge=0, le=MOST_COUNT)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Time = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]


def matching(pattern: str, expected: str) -> AfterValidator:
    """Returns a validator: `pattern` matches the whole text; else error `expected`."""

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
    """Returns texts of the first error: ``field[0].part``, expected, found value."""
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

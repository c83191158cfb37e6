"""Reads exported records, of which nothing is trusted blindly."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from cfp.errors import CfpError
from cfp.printable import printable
from cfp.profiling.compiler_options import refused_option
from cfp.profiling.key import ProfileKey
from cfp.profiling.record import ProfileRecord

# Times and sizes can mislead a search, and do no more. Two things are followed further:
# what a record says was chosen for a whole program holds compiler options, which may
# only be such as do no harm; and what is printed must not be commands to a terminal.

# A record of a program with thousands of collectives has a few megabytes.
_MOST_LINE_BYTES = 2**26
_KEPT = "\n\t"


def read_export(path: str | os.PathLike[str]) -> list[ProfileRecord]:
    """The records of an exported file.

    Raises:
      CfpError: a line is not a record, its key is not that of its parts, or it asks
        for compiler options that are not known to be harmless.
    """
    records: list[ProfileRecord] = []
    try:
        with open(path, "rb") as file:
            while line := file.readline(_MOST_LINE_BYTES + 1):
                if len(line) > _MOST_LINE_BYTES:
                    raise ValueError(f"a line of more than {_MOST_LINE_BYTES} bytes")
                records.append(_record(line))
    except (OSError, ValueError) as error:
        raise CfpError(
            f"Nothing was merged from {path}: {printable(str(error))}, after "
            f"{len(records)} good lines. Export it again with the same version of "
            "cfp."
        ) from error
    return records


def _record(line: bytes) -> ProfileRecord:
    record = ProfileRecord.from_json(line)
    if ProfileKey(record.parts).digest != record.key:
        raise ValueError("the key is not that of the parts")
    if (found := _refused_choice(record.choice)) is not None:
        raise ValueError(found)
    if any(printable(text, _KEPT) != text for part in record.parts for text in part):
        raise ValueError("parts of the key with characters that cannot be printed")
    return replace(record, reason=printable(record.reason, _KEPT))


def _refused_choice(text: str) -> str | None:
    """Returns the reason why a choice is not to be followed; None if it may be.

    It is "", a choice with its compiler options, or a list of such.
    """
    if not text:
        return None
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return "a choice that cannot be read"
    if isinstance(data, list) and all(isinstance(one, str) for one in data):
        return next(filter(None, map(_refused_choice, data)), None)
    if not isinstance(data, dict):
        return "a choice that is neither one nor a list of them"
    return refused_option(data.get("options", {}))

"""Output of a probe: one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from cfp.cluster.doctor.machine import MARK, last_line


def answer(find: Callable[[], Mapping[str, Any]]) -> None:
    """Prints the findings of a probe, or its error.

    Args:
        find: the probe; its values can be written as JSON.
    """
    try:
        found = dict(find())
    except Exception as error:
        # Libraries raise errors that have no type in common.
        text = last_line(str(error).split("\n\n")[0].split("\n")[0])
        found = {"trouble": f"{type(error).__name__}: {text}".rstrip(": ")}
    print(f"\n{MARK}{json.dumps(found)}", flush=True)

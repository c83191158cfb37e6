"""How a probe hands back what it found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from cfp.cluster.doctor.ask import MARK, last_line


def answer(find: Callable[[], Mapping[str, Any]]) -> None:
    """Prints what a probe found, or why it found nothing.

    Args:
        find: what the probe does; its values can be written as JSON.
    """
    try:
        found = dict(find())
    except Exception as error:
        # Whatever breaks here is what the doctor wants to hear of: libraries raise
        # errors that have no type in common.
        text = last_line(str(error).split("\n\n")[0].split("\n")[0])
        found = {"trouble": f"{type(error).__name__}: {text}".rstrip(": ")}
    print(f"\n{MARK}{json.dumps(found)}", flush=True)

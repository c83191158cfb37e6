"""Values of options, read, or refused before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import PartitionSpec

from cfp.devices.joining import is_follower
from cfp.errors import CfpError, PinError
from cfp.report.plots import check_can_draw


def parse_pins(texts: Sequence[str] | None) -> dict[str, PartitionSpec]:
    """Pins from ``PATTERN=None,x``; ``x+y`` shards one dim over two axes.

    Raises:
        PinError: a text is no pin.
    """
    pins = {}
    for text in texts or ():
        pattern, equals, spec = text.rpartition("=")
        if not equals or not pattern:
            raise PinError(
                f"The pin {text!r} cannot be read. Write a pattern, =, and an axis or "
                "None for each dim, such as --pin 'state/params/*/kernel=None,x'."
            )
        entries = [part.strip() for part in spec.split(",")] if spec.strip() else []
        pins[pattern] = PartitionSpec(
            *(
                None
                if entry in ("None", "-", "")
                else tuple(entry.split("+"))
                if "+" in entry
                else entry
                for entry in entries
            )
        )
    return pins


def check_drawable(path: Path | None) -> None:
    """Says before anything is measured that the file of --plot could not be drawn.

    Raises:
        CfpError: the file cannot be written, or no such image can be made.
    """
    if path is not None:
        check_can_draw(path)
    check_writable(path, "--plot")


def check_writable(path: Path | None, option: str = "-o") -> None:
    """Says before anything is measured that the outcome could not be saved.

    Args:
        path: where to, if anywhere.
        option: the one that named it.

    Raises:
        CfpError: the file cannot be written.
    """
    if path is None or is_follower():
        return
    if str(path).startswith("-"):
        raise CfpError(
            f"{option} expects a file, got {path}, which looks like an option. A file "
            f"of that name is ./{path}."
        )
    folder = path.parent
    if path.is_dir() or not folder.is_dir():
        problem = "is a folder" if path.is_dir() else f"{folder} is no folder"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "it is not writable"
    else:
        return
    raise CfpError(f"Cannot write {path}: {problem}. Name another file with {option}.")

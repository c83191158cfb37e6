"""Golden texts: what tests print, kept in files and compared whole.

A file has a section for each text. `--update-golden` writes files anew: read the diff.
"""

import re
import tempfile
from pathlib import Path

from rich import box

from cfp import Plan
from cfp.view.console import plain_text
from cfp.view.text import plan_view

ROOT = Path(__file__).parents[2]

_HEAD = "=== "
# What is cut from a text, or stands there as "#".
_CHANGES = (
    # Places: folders, lines of tests, of files and in memory.
    (re.escape(f"{ROOT}/"), ""),
    (rf"{re.escape(tempfile.gettempdir())}/\S*/(?=[\w.-]+)", "TMP/"),
    (r"((?:test_|toy_)\w+\.py):\d+", r"\1:#"),
    (r"column \d+ \(char \d+\)", "column # (char #)"),
    (r"\b0x[0-9a-f]{6,}", "0x#"),
    # JAX's own words, which differ between releases.
    (
        r"(Tracer\w+Error|TypeError|ValueError: The f\w+)(.|\n)*?"
        r"(?=\nLeave|\n(?:The|A) step|\n\n|\n\Z|\Z)",
        r"\1 ...",
    ),
    # Options that there are: another one changes no message.
    (r"([Tt]here are:|those of [\w.]+) [\w, ]+", r"\1 ..."),
)


def settled(text: str) -> str:
    """A text without what differs between machines, releases of JAX, and places."""
    for pattern, change in _CHANGES:
        text = re.sub(pattern, change, text)
    return text


def written(texts: dict[str, str]) -> str:
    """A file's contents."""
    parts = [
        settled(f"{_HEAD}{name}\n{text.rstrip()}\n") for name, text in texts.items()
    ]
    return "\n".join(parts)


def check_golden(file: Path, texts: dict[str, str], update: bool) -> None:
    """Compares texts with their file, or writes it."""
    found = written(texts)
    if update:
        file.parent.mkdir(exist_ok=True)
        file.write_text(found)
    assert file.exists(), f"{file} is missing: --update-golden writes it"
    assert found == file.read_text(), f"{file.name}: --update-golden writes it anew"


def plan_text(plan: Plan, width: int | None = None) -> str:
    """Renders a plan's headline, tables and remarks as plain text, ASCII borders."""
    return plain_text(plan_view(plan, border=box.ASCII), width)

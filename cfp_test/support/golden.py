"""Golden texts: what tests print, kept in files and compared whole.

A file has a section for each text. `--update-golden` writes files anew: read the diff.
"""

import re
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

_HEAD = "=== "


def settled(text: str) -> str:
    """A text without what differs between runs: folders, lines of tests, addresses."""
    text = text.replace(f"{ROOT}/", "")
    folder = re.escape(tempfile.gettempdir())
    text = re.sub(rf"{folder}/\S*/(?=[\w.-]+)", "TMP/", text)
    text = re.sub(r"(test_\w+\.py):\d+", r"\1:#", text)
    text = re.sub(r"column \d+ \(char \d+\)", "column # (char #)", text)
    return re.sub(r"\b0x[0-9a-f]{6,}", "0x#", text)


def written(texts: dict[str, str]) -> str:
    """A file's contents."""
    parts = [
        f"{_HEAD}{name}\n{settled(text).rstrip()}\n" for name, text in texts.items()
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

"""Makes the tutorial's notebook and page from its source, docs/tutorial/tutorial.py.

    python cfp_test/docs/tutorial.py [--keep-outputs]

runs the source's cells in a new folder, on virtual devices, and writes the notebook,
with what the cells printed, and from that ``docs/tutorial.md``. With ``--keep-outputs``
nothing is run, and the cells keep what the notebook has: for changes of the prose.
"""

import argparse
import contextlib
import io
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
SOURCE = DOCS / "tutorial" / "tutorial.py"
NOTEBOOK = DOCS / "tutorial" / "tutorial.ipynb"
STORY = DOCS / "tutorial" / "mill.txt"
PAGE = DOCS / "tutorial.md"
_MARKER = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the tutorial: prose in Markdown, or code.

    Attributes:
      prose: whether it is prose.
      text: prose without the comment signs, or code.
      line: the line of the source that it begins at.
    """

    prose: bool
    text: str
    line: int


def read_cells(source: str) -> list[Cell]:
    """Splits a program with ``# %%`` markers into its cells."""
    marks = [*_MARKER.finditer(source)]
    ends = [mark.start() for mark in marks[1:]] + [len(source)]
    cells = []
    for mark, end in zip(marks, ends, strict=True):
        text = source[mark.end() : end].strip("\n")
        if mark[1]:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        line = 1 + source.count("\n", 0, mark.end())
        cells.append(Cell(prose=bool(mark[1]), text=text, line=line))
    return cells


def run_cells(cells: list[Cell]) -> list[str]:
    """Runs the code of cells in one namespace; returns what each printed."""
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    printed = []
    for cell in cells:
        out = io.StringIO()
        if not cell.prose:
            with contextlib.redirect_stdout(out):
                # Lines are those of the source, as plans name them.
                code = "\n" * (cell.line - 1) + cell.text
                exec(compile(code, SOURCE.name, "exec"), namespace)
        printed.append(out.getvalue())
    return printed


def make_notebook(cells: list[Cell], printed: list[str]) -> str:
    """Writes cells and what they printed as a notebook, format 4.5."""
    entries: list[dict[str, Any]] = []
    number = 0
    for index, (cell, text) in enumerate(zip(cells, printed, strict=True)):
        # Pages beside this one are a folder up from the notebook.
        prose = re.sub(r"\]\((?!http)(tutorial/)?([^)]+)\)", _link, cell.text)
        entry: dict[str, Any] = {
            "cell_type": "markdown" if cell.prose else "code",
            "id": f"cell-{index}",
            "metadata": {},
            "source": (prose if cell.prose else cell.text).splitlines(keepends=True),
        }
        if not cell.prose:
            number += 1
            stream = {
                "name": "stdout",
                "output_type": "stream",
                "text": text.splitlines(keepends=True),
            }
            entry |= {"execution_count": number, "outputs": [stream] if text else []}
        entries.append(entry)
    notebook = {
        "cells": entries,
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _link(match: re.Match[str]) -> str:
    return f"]({match[2]})" if match[1] else f"](../{match[2]})"


def read_printed(notebook: str) -> list[str]:
    """Reads what the cells of a notebook printed, one text for each cell."""
    return [
        "".join(line for out in cell.get("outputs", ()) for line in out["text"])
        for cell in json.loads(notebook)["cells"]
    ]


def make_page(cells: list[Cell], printed: list[str]) -> str:
    """Writes cells and what they printed as a page."""
    parts = []
    for cell, text in zip(cells, printed, strict=True):
        parts.append(cell.text if cell.prose else f"```python\n{cell.text}\n```")
        if text:
            parts.append(f"```\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Runs the source, and writes notebook and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep-outputs", action="store_true")
    keep = parser.parse_args().keep_outputs
    cells = read_cells(SOURCE.read_text())
    if keep:
        printed = read_printed(NOTEBOOK.read_text())
    else:
        printed = _run_in_new_folder(cells)
    NOTEBOOK.write_text(make_notebook(cells, printed))
    PAGE.write_text(make_page(cells, printed))


def _run_in_new_folder(cells: list[Cell]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copy(STORY, folder)
        return run_cells(cells)


if __name__ == "__main__":
    main()

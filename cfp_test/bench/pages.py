"""Writes the tables of the pages of results from their JSON.

    python -m cfp_test.bench pages

A page of ``docs/results`` is written by hand. Below a line ``<!-- table NAME -->``
stands the table of that name in the JSON beside the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "docs" / "results"
_PLACE = re.compile(r"^<!-- table ([\w ]+) -->\n+(?:\|.*\n)*", re.MULTILINE)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Writes a table in Markdown, a line for each row; None is an empty cell."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [["" if one is None else str(one) for one in line] for line in lines]
    assert all(len(line) == len(columns) for line in cells), "a cell for each column"
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def with_tables(text: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a page with the tables of its JSON, each below its name."""

    def written(place: re.Match[str]) -> str:
        found = tables[place[1]]
        return f"<!-- table {place[1]} -->\n\n" + table(found["columns"], found["rows"])

    named = _PLACE.findall(text)
    assert sorted(named) == sorted(tables), (named, [*tables])
    return _PLACE.sub(written, text)


def as_text(data: Mapping[str, Any]) -> str:
    """Writes a page's JSON, a line for each row of a table."""
    tables = []
    for name, one in data["tables"].items():
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in one["rows"])
        columns = json.dumps(one["columns"])
        tables.append(
            f'{json.dumps(name)}: {{"columns": {columns}, "rows": [\n{rows}]}}'
        )
    head = json.dumps({**data, "tables": {}}, ensure_ascii=False).removesuffix("{}}")
    return f"{head}{{\n{','.join(tables)}}}}}\n"


def main() -> None:
    for file in sorted(RESULTS.glob("*.json")):
        page = file.with_suffix(".md")
        text = page.read_text()
        new = with_tables(text, json.loads(file.read_text())["tables"])
        if new != text:
            page.write_text(new)
            print(page)


if __name__ == "__main__":
    main()

"""Pages of results: their tables are those of the JSON, and few."""

import json
import re

import pytest

from cfp_test.bench.pages import RESULTS, as_text, table, with_tables

FILES = sorted(RESULTS.glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_page_has_the_tables_of_its_json(file):
    data = json.loads(file.read_text())
    page = file.with_suffix(".md").read_text()
    assert with_tables(page, data["tables"]) == page
    assert as_text(data) == file.read_text()


def test_results_are_few():
    pages = {page.stem for page in RESULTS.glob("*.md")} - {"README", "constants"}
    assert pages == {file.stem for file in FILES}
    assert len(pages) <= 12
    assert sum(file.stat().st_size for file in FILES) <= 300_000
    files = [one for one in RESULTS.iterdir() if one.suffix in (".md", ".json")]
    assert sum(one.read_text().count("\n") for one in files) <= 6_000


def test_tables_are_written_below_their_names():
    tables = {"steps": {"columns": ["a", "b"], "rows": [[1, None]]}}
    old = "# A\n\n<!-- table steps -->\n\n| old |\n| --- |\n\nMore.\n"
    new = "# A\n\n<!-- table steps -->\n\n| a | b |\n| --- | --- |\n| 1 |  |\n\nMore.\n"
    assert with_tables(old, tables) == new == with_tables(new, tables)
    with pytest.raises(AssertionError):
        with_tables(old, {})
    with pytest.raises(AssertionError, match="a cell for each column"):
        table(["a", "b"], [[1]])


def test_the_readme_has_figures_of_the_pages():
    text = (RESULTS.parents[1] / "README.md").read_text()
    rows = re.findall(r"^\|.*?\((docs/results/\w+)\.md\) \|$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if "](docs/results/" in line]
    lines = [line for line in lines if line.startswith("|")]
    assert len(lines) == len(rows) > 10
    for line, page in zip(lines, rows, strict=True):
        tables = json.loads((RESULTS.parents[1] / f"{page}.json").read_text())["tables"]
        cells = [c for one in tables.values() for row in one["rows"] for c in row]
        known = [float(c) for c in cells if re.fullmatch(r"\d+\.\d+", str(c))]
        for shown in re.findall(r"([\d.]+) ms", line):
            assert any(abs(float(shown) - one) < 0.051 for one in known), (line, shown)

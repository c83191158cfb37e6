"""Pages of results: their tables are those of the JSON, and few."""

import json
import re
from importlib import import_module

import pytest

from cfp.kernels.registry import KERNELS
from cfp.profiling.runner import TimingOptions
from cfp.settings import defaults_of
from cfp_test.bench.pages import RESULTS, as_text, table, with_tables

FILES = sorted(RESULTS.glob("*.json"))
ROOT = RESULTS.parents[1]
DECISIONS = (ROOT / "docs" / "decisions.md").read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_page_has_the_tables_of_its_json(file):
    data = json.loads(file.read_text())
    page = file.with_suffix(".md").read_text()
    assert with_tables(page, data["tables"]) == page
    assert as_text(data) == file.read_text()


def test_results_are_few():
    pages = {page.stem for page in RESULTS.glob("*.md")} - {"README", "constants"}
    assert pages == {file.stem for file in FILES}
    assert len(pages) <= 13
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


def test_constants_have_the_values_that_their_page_says():
    text = (RESULTS / "constants.md").read_text()
    rows = re.findall(r"^\| `cfp\.([\w.]+)` \| (\S+) \|", text, re.MULTILINE)
    assert len(rows) >= 15
    for path, value in rows:
        module, _, name = path.rpartition(".")
        assert str(getattr(import_module(f"cfp.{module}"), name)) == value, path
    shown = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE))
    known = {name: kernel.matmul_share for name, kernel in KERNELS.items()}
    gpu, timing = defaults_of("gpu"), TimingOptions()
    for name in shown.keys() - known.keys():
        owner = timing if name.startswith("min_") else gpu
        known[name] = getattr(owner, name)
    assert shown == {name: str(value) for name, value in known.items()}


def sources(text: str) -> list[str]:
    """Pages, and headings of decisions, that a source file names."""
    plain = re.sub(r"\n\s*(# )?", " ", text)
    pages = re.findall(r"docs/[\w/-]+\.(?:md|json|toml)", plain)
    quoted = re.findall(r'decisions\.md,? ("[^"]+"(?:, "[^"]+")*)', plain)
    return pages + re.findall(r'"[^"]+"', " ".join(quoted))


def test_sources_that_code_names_are_there():
    headings = {
        f'"{one}"' for one in re.findall(r"^### (.+)$", DECISIONS, re.MULTILINE)
    }
    found = []
    for file in [*(ROOT / "cfp").rglob("*.py"), *(ROOT / "cfp").rglob("*.toml")]:
        found += [(file.name, one) for one in sources(file.read_text())]
    assert len(found) > 20
    missing = [
        (name, one)
        for name, one in found
        if (one not in headings if one.startswith('"') else not (ROOT / one).exists())
    ]
    assert missing == []


def test_sources_are_read_over_line_ends():
    text = '# 1.2; docs/results/a.md, and decisions.md, "One\n# rule", "Two".\n'
    assert sources(text) == ["docs/results/a.md", '"One rule"', '"Two"']


def test_decisions_are_forty_entries_of_four_lines():
    """Each names modules that exist."""
    entries = DECISIONS.split("\n### ")[1:]
    assert len(entries) <= 40 and DECISIONS.count("\n## ") == 8
    assert len(DECISIONS.split()) <= 3_000
    for entry in entries:
        lines = [one for one in entry.splitlines()[1:] if one.startswith("- ")]
        names = [line.split(":")[0] for line in lines]
        assert names == ["- Choice", "- Figure", "- Lost", "- Code"], entry
        for path in re.findall(r"`(cfp/[^`]+)`", lines[-1]):
            assert (ROOT / path).exists(), entry

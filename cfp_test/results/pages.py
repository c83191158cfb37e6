"""Makes every page of docs/results from the JSON beside it.

A page is its text (``text/NAME.md`` beside this module), in which ``${name}`` stands
for a table or a figure, and a function from the parsed JSON to those. A table has a row
for each row of the JSON: what looks alike is not merged, so that a slower one shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs" / "results"
TEXTS = Path(__file__).parent / "text"

Figures = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page.

    Attributes:
      name: of the page, without its suffix.
      sources: names of the JSON files that it is made from.
      figures: from what these hold, in their order, to the page's figures.
      has_text: whether the page has a text; otherwise its figure "page" is all of it.
      note: what is wrong with the page by now; it stands below the title.
    """

    name: str
    sources: tuple[str, ...]
    figures: Callable[..., Figures]
    has_text: bool = True
    note: str = ""

    def text(self, results: Path = RESULTS, texts: Path = TEXTS) -> str:
        """The page in Markdown, with its note.

        Args:
          results: the folder of the JSON files.
          texts: the folder of the pages' texts.

        Raises:
          ValueError: the text names a figure that is not there, or leaves one out.
        """
        made = self._made(results, texts)
        title, _, rest = made.partition("\n")
        return f"{title}\n\n{self.note}\n{rest}" if self.note else made

    def _made(self, results: Path, texts: Path) -> str:
        """The page in Markdown, without its note.

        Args:
          results: the folder of the JSON files.
          texts: the folder of the pages' texts.

        Raises:
          ValueError: the text names a figure that is not there, or leaves one out.
        """
        data = [json.loads((results / name).read_text()) for name in self.sources]
        figures = self.figures(*data)
        if not self.has_text:
            return figures["page"]
        template = Template((texts / f"{self.name}.md").read_text())
        named = set(template.get_identifiers())
        if named != set(figures):
            raise ValueError(
                f"The text of {self.name} should name each figure of the JSON; it "
                f"names without a figure {sorted(named - set(figures))}, and leaves "
                f"out {sorted(set(figures) - named)}. Mend {self.name}.md in {texts}."
            )
        made = template.substitute(figures).rstrip("\n")
        return f"{made}\n\n{_footer(self.sources)}\n"


def _footer(sources: tuple[str, ...]) -> str:
    links = "\n".join(f"- [{name}]({name})" for name in sources)
    return (
        "---\n\n"
        "`python -m cfp_test.results` makes this page, with all of its tables, from\n\n"
        f"{links}\n\n"
        "Figures in sentences that these files do not hold were noted by hand at the "
        "date\nof the page."
    )


def table(head: str, rows: list[list[Any]]) -> str:
    """A table in Markdown.

    Args:
      head: the columns' headings, with ``|`` between them.
      rows: cells; None is an empty one.
    """
    names = [name.strip() for name in head.split("|")]
    lines = [names, ["---"] * len(names), *rows]
    texts = [["" if cell is None else str(cell) for cell in line] for line in lines]
    assert all(len(line) == len(names) for line in texts), "a cell for each heading"
    return "\n".join("| " + " | ".join(line) + " |" for line in texts)


def noted(data: Mapping[str, Any], name: str) -> str:
    """A table that was noted by hand, with what it says of its source."""
    found = data["tables"][name]
    return table(" | ".join(found["head"]), found["rows"])


def gib(count: float | None, digits: int = 2) -> str:
    """Bytes in GiB, without the unit; empty for None."""
    return "" if count is None else f"{count / 2**30:.{digits}f}"


def fixed(number: float | None, digits: int = 2) -> str:
    """A number with so many digits behind the point; empty for None."""
    return "" if number is None else f"{number:.{digits}f}"


def plain(name: str) -> str:
    """A preset's name as a person writes it."""
    known = {
        "tensor_sequence_parallel": "tensor and sequence parallel",
        "zero1": "ZeRO-1",
    }
    head, comma, rest = name.partition(", ")
    return known.get(head, head.replace("_", " ")) + comma + rest

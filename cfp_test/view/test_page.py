"""The page of a plan, read without a browser."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from cfp.plan.plan import Plan
from cfp.printable import one_line, printable
from cfp.view.rows import blocks_rows, memory_rows, more_rows, race_rows, segments_of
from cfp.view.text import page_html
from cfp_test.support.golden import plan_text
from cfp_test.view.plans import RACE, as_data, layers, make_plan, row
from cfp_test.view.reported import (
    DEEP,
    HARMFUL,
    HOSTILE,
    KIB,
    figured,
    option,
    untimed,
)

VOID = {"meta", "link", "br", "img"}
ALLOWED = (
    "html head meta link title style body div a header h1 h2 h3 p nav main section "
    "details summary span strong b dl dt dd small ul li table caption thead tbody tr "
    "th td code figure figcaption svg rect line path circle text g br"
).split()


class Page(HTMLParser):
    """Contents of a page: its tags, its attributes, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.text = ""
        self.lines: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"{tag} is closed out of order"
        if tag == "tr":
            self.lines.append(" | ".join(" ".join(c.split()) for c in self.cells[-1]))

    def handle_data(self, data):
        if not {"style", "title"} & set(self.open):
            self.text += data
            words = " ".join(data.split())
            if words and not {"svg", "td", "th"} & set(self.open):
                self.lines.append(words)
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data

    def rows(self, first: str) -> list[list[str]]:
        found = [[" ".join(cell.split()) for cell in cells] for cells in self.cells]
        return [cells for cells in found if cells and cells[0].startswith(first)]


@pytest.mark.parametrize("plan", [DEEP, HOSTILE, make_plan([], [])])
@pytest.mark.parametrize("is_small", [False, True])
def test_a_page_stands_alone_and_is_well_formed(plan, is_small):
    html = page_html(plan, is_small)
    page = Page(html)
    assert page.open == []
    assert set(page.tags) <= set(ALLOWED)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    sent = [v for name, v in page.attributes if name in ("src", "href", "action")]
    assert all(v.startswith(("#", "data:")) for v in sent)
    assert "url(" not in html and "@import" not in html
    assert len(html.encode()) < 3 * 2**20


def test_names_that_mean_harm_are_text():
    page = Page(page_html(HOSTILE))
    assert "script" not in page.tags and "img" not in page.tags
    for name in HARMFUL:
        assert f"params/{printable(name)}" in page.text
    assert "\x1b" not in page_html(HOSTILE) and "\u202e" not in page_html(HOSTILE)
    assert "49" not in page.text.split("{{ 7 * 7 }}")[1][:4]


def test_text_of_blanks_is_made_one_line_at_once():
    assert one_line(" " * 10**6) == " " * 10**6
    assert one_line("a \n\n  b\x1b") == "a  b\ufffd"


def test_a_plan_comes_back_from_its_file_with_its_figures():
    assert Plan.from_json(as_data(DEEP)) == DEEP
    again = Plan.from_json(as_data(HOSTILE))
    assert page_html(again) == page_html(HOSTILE)
    assert HOSTILE._repr_html_() == page_html(again, is_small=True)


@pytest.mark.parametrize(
    "damage",
    [
        {"segment_kinds": [7]},
        {"picks": [9] * len(HARMFUL)},
        {"picks": [0]},
        {"fixed_bytes": -1},
        {"fixed_bytes": True},
        {"picks": ["1.5"]},
        {"segment_kinds": None},
        {"drawn": []},
        {"kinds": [{"name": "a", "options": [], "drawn": 5}]},
        {"kinds": 3},
        {"kinds": [{"name": "a", "options": [{}]}]},
    ],
    ids=str,
)
def test_damaged_figures_are_refused(damage):
    data = as_data(HOSTILE)
    data["figures"] = {**data["figures"], **damage}
    with pytest.raises(Exception, match="damaged plan"):
        Plan.from_json(data)


DATA, OWN, ZERO1, FAILED = RACE
NOISY = replace(DATA, samples_ms=(11.0, 12.0, 12.5, 13.0, 20.0), time_ms=12.5)
SLOWER = replace(ZERO1, name="data_parallel, flag", time_ms=13.0)
LATE = replace(FAILED, note="ruled out.\n  got: none")
UNRUN = replace(ZERO1, samples_ms=(), time_ms=None, rung="estimated")
UP = [row(0, 0, "Net/up", repeats=7)]
FOUR = figured([f"Net/layer_{i}/up" for i in range(4)], budget_bytes=650 * KIB)


def searched(plan, **counts):
    return replace(plan, search={**plan.search, **counts})


def alone(rung, **changes):
    """A plan of which no program was timed."""
    memory = {"peak_bytes": None, "predicted_bytes": 2 * 2**20}
    return replace(FOUR, **memory, rung=rung, measured_ms=None, search={}, **changes)


PAGES = {
    "four layers": FOUR,
    "names that mean harm": HOSTILE,
    "a race": make_plan(UP, [NOISY, OWN, SLOWER, UNRUN]),
    "a race from the cache": searched(make_plan(layers([0]), RACE), race_cached=3.0),
    "a variant that does not fit": make_plan(
        UP, [DATA, OWN, replace(SLOWER, note="over the memory budget")]
    ),
    "a note of several lines": make_plan([], [DATA, LATE]),
    "predicted": alone("measured"),
    "estimated": alone("estimated"),
    "no candidates": alone("measured", race=()),
    "virtual devices": searched(FOUR, strategies_estimated=1.0),
    "described devices": searched(FOUR, was_described=1.0),
    "verified on those": searched(FOUR, strategies_estimated=1.0, was_described=1.0),
    "collectives without times": untimed(FOUR),
    "by its name": replace(FOUR, figures=None, search={}),
    "of those that verify timed": replace(FOUR, figures=None, search={"verified": 1.0}),
    "no contraction": make_plan([], RACE),
    "a strategy that was not measured": replace(
        DEEP, figures=replace(FOUR.figures, picks=())
    ),
}


def test_pages(golden):
    pages = {name: Page(page_html(plan)) for name, plan in PAGES.items()}
    first, *_ = (page.lines for page in pages.values())
    # Of all but the first, what it does not say.
    own = {k: [x for x in page.lines if x not in first] for k, page in pages.items()}
    own["four layers"] = first
    golden("pages", {name: "\n".join(lines) for name, lines in own.items()})


def test_a_page_has_the_texts_rows():
    plan = PAGES["a race"]
    page = Page(page_html(plan))
    printed = "".join(plan_text(plan, 200).split())
    for made in (blocks_rows(segments_of(plan)), race_rows(plan), *more_rows(plan)):
        for row_ in made.rows:
            cells = [" ".join(cell.split()) for cell in row_.cells]
            assert cells in [found[: len(cells)] for found in page.rows(cells[0])]
    for row_ in race_rows(plan).rows:
        assert all("".join(cell.split()) in printed for cell in row_.cells)


def test_memory_at_its_peak_adds_up():
    """Residuals of all segments up to one, and what that one needs besides."""
    temps = [1, 9, 2, 1]
    options = [
        replace(option(str(i), 1.0, 1, 1), temp_bytes=temp * KIB)
        for i, temp in enumerate(temps)
    ]
    kinds = (replace(FOUR.figures.kinds[0], options=tuple(options)),)
    figures = replace(FOUR.figures, kinds=kinds, picks=(0, 1, 2, 3))
    rows = memory_rows(replace(FOUR, figures=figures)).rows
    sizes = [row_.bar // KIB for row_ in rows]
    # 1 for every choice, 4 of state for each of four, 2 of residuals for each of two.
    assert sizes[:5] == [1, 16, 4, 9, 30]
    assert sizes[5:] == [3 * KIB, 650]
    whole = replace(FOUR, figures=None)
    assert [row_.bar for row_ in memory_rows(whole).rows] == [whole.peak_bytes]


def test_a_note_of_several_lines_is_one_in_a_file(tmp_path):
    PAGES["a note of several lines"].save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").race[1].note == "ruled out. got: none"

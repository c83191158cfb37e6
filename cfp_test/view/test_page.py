"""The page of a plan, read without a browser."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from cfp.plan.plan import Plan
from cfp.printable import one_line, printable
from cfp.view.model import view_of
from cfp.view.page import (
    drawn_dims,
    element,
    page_html,
    pareto,
    scatter_drawing,
    small_html,
    tensor_drawing,
    ticks,
    timeline,
)
from cfp.view.text import plan_text
from cfp_test.report.plans import RACE, as_data, layers, make_plan, row
from cfp_test.view.reported import (
    DEEP,
    HARMFUL,
    HOSTILE,
    KIB,
    figured,
    option,
    tensor,
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

    def handle_data(self, data):
        if not {"style", "title"} & set(self.open):
            self.text += data
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data

    def rows(self, first: str) -> list[list[str]]:
        found = [[" ".join(cell.split()) for cell in cells] for cells in self.cells]
        return [cells for cells in found if cells and cells[0].startswith(first)]


@pytest.mark.parametrize("plan", [DEEP, HOSTILE, make_plan([], [])])
@pytest.mark.parametrize("render", [page_html, small_html])
def test_a_page_stands_alone_and_is_well_formed(plan, render):
    html = render(plan)
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


def test_a_note_of_several_lines_is_one_in_a_page_and_in_a_file(tmp_path):
    late = replace(RACE[-1], note="ruled out.\n  got: none")
    plan = replace(make_plan([], []), race=(RACE[0], late))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert "ruled out. got: none" in page_html(plan)
    assert loaded.race[1].note == "ruled out. got: none"


def test_text_of_blanks_is_made_one_line_at_once():
    assert one_line(" " * 10**6) == " " * 10**6
    assert one_line("a \n\n  b\x1b") == "a  b\ufffd"


def test_repeats_stand_once():
    html = page_html(DEEP)
    assert html.count('<details class="segment">') == 1
    assert "Net/layer_0-95/up" in html and "96 ×" in html


def test_numbers_are_those_of_the_plan():
    page = Page(page_html(DEEP))
    for one in (candidate.row for candidate in view_of(DEEP).race.candidates):
        [cells] = [r for r in page.rows(one.name) if len(r) == 6]
        wanted = [
            "-" if t is None else f"{t:.3f} ms" for t in (one.predicted_ms, one.time_ms)
        ]
        assert cells[1:3] == wanted
    assert DEEP.figures is not None
    for found in DEEP.figures.kinds[0].options:
        [cells] = [r for r in page.rows(found.name) if len(r) == 5]
        assert cells[1:] == [
            f"{found.step_ms:.3f} ms",
            f"{found.memory_bytes / KIB:.2f} KiB",
            f"{found.segment_ms:.3f} ms",
            "no" if found.name == "slow & large" else "yes",
        ]
    [gather] = [r for r in page.rows("all-gather") if r[2] == str(2 * 95)]
    assert gather == ["all-gather", "x", "190", "285.00 KiB", "11.875 ms"]
    assert "profile | 20.0 s" in " | ".join(page.rows("profile")[0])
    assert "-7.3% of the measured" in " ".join(page.text.split())
    virtual = {**DEEP.search, "strategies_estimated": 1.0}
    assert "of the measured" not in page_html(replace(DEEP, search=virtual))
    verified = replace(DEEP, search={**virtual, "was_described": 1.0})
    assert "-7.3% of the measured" in page_html(verified)


@pytest.mark.parametrize(
    ("rung", "search", "time", "memory"),
    [
        ("measured", {}, "predicted", "predicted"),
        ("estimated", {}, "estimated", "estimated"),
    ],
)
def test_time_and_memory_have_the_same_sources_in_all_renderings(
    rung, search, time, memory
):
    known = " ".join(Page(page_html(DEEP)).text.split())
    assert "Memory, each device3.00 MiB of 650.00 KiB" in known
    plan = replace(DEEP, peak_bytes=None, predicted_bytes=2 * 2**20, rung=rung)
    plan = replace(plan, measured_ms=None, search=search)
    text = " ".join(Page(page_html(plan)).text.split())
    assert f"Step, {time}9.500 ms" in text
    assert f"Memory, each device2.00 MiB {memory} of 650.00 KiB" in text
    said = " ".join(repr(plan).split())
    assert f"9.500 ms {time}; 2.00 MiB on each device, {memory} chosen:" in said


def words(plan: Plan) -> str:
    return " ".join(Page(page_html(plan)).text.split())


def test_the_page_says_why_no_strategies_are_known():
    """And does not say that nothing was measured beside times that were."""
    timed = replace(DEEP, figures=None, search={})
    whys = {
        "the strategy was asked for by name, and none was measured": timed,
        "it is the fastest that cfp verify timed, which times whole steps alone": (
            replace(timed, search={"verified": 1.0})
        ),
        "the step has no contraction to shard": make_plan([], RACE),
    }
    for why, plan in whys.items():
        said = words(plan)
        assert f"None: {why}." in said
        assert ("Why: " + why in said) == bool(plan.rows)
        assert "No prediction: no strategy was measured." in said
        assert "othing was measured" not in said
    assert "No pass was timed." in words(timed)
    assert DEEP.figures is not None
    unpicked = replace(DEEP, figures=replace(DEEP.figures, picks=()))
    assert "Why: it won the race; this strategy was not measured by its" in words(
        unpicked
    )


def test_rates_have_a_source_where_collectives_have_times():
    rates = "one after another, by rates"
    assert f"{rates} that were measured on these devices;" in words(DEEP)
    plain = words(untimed(DEEP))
    assert rates not in plain and "all-gather" in plain
    alone = "Milliseconds are as if each were launched by itself"
    assert alone in words(DEEP) and alone not in plain
    described = replace(DEEP, search={**DEEP.search, "was_described": 1.0})
    assert f"{rates} of described devices;" in words(described)
    virtual = replace(DEEP, search={"strategies_estimated": 1.0})
    assert f"{rates} of virtual devices, which say nothing of GPUs;" in words(virtual)


def test_the_page_says_of_a_race_what_the_terminal_says():
    [data, planned, zero1, _] = RACE
    noisy = replace(data, samples_ms=(11.0, 12.0, 12.5, 13.0, 20.0), time_ms=12.5)
    variant = replace(zero1, name="data_parallel, flag", time_ms=13.0)
    unrun = replace(zero1, samples_ms=(), time_ms=None, rung="estimated")
    race = [noisy, planned, variant, unrun]
    plan = make_plan([row(0, 0, "Net/up", repeats=7)], race)
    cached = {**plan.search, "race_cached": 3.0}
    page = Page(page_html(replace(plan, search=cached)))
    assert page.rows("plan")[0] == (
        ["plan", "predicted", "measured", "±", "bars", "memory", "from"]
    )
    assert page.rows("data_parallel")[0][2:4] == ["12.500 ms", "0.5 ms"]
    assert page.rows("planned")[0][2:4] == ["10.250 ms", "-"]
    assert page.rows("planned")[0][6] == "measured"
    assert "and 1 slower variant of these" in page.text
    assert page.rows("race")[0][1] == "7.0 s, from the cache"
    assert "7 times in one step" in page.text
    assert page.rows("search")[0][1] == "0.5 s"


def test_variants_that_do_not_fit_are_not_called_slower():
    [data, planned, zero1, _] = RACE
    large = replace(zero1, name="data_parallel, flag", note="over the memory budget")
    plan = make_plan([row(0, 0, "Net/up")], [data, planned, large])
    assert "and 1 variant of these, slower or not run" in plan_text(plan)
    assert "slower variant" not in Page(page_html(plan)).text


def test_a_page_without_candidates_calls_them_no_estimates():
    for rung in ("measured", "estimated"):
        plan = replace(DEEP, race=(), measured_ms=None, rung=rung)
        html = page_html(plan)
        assert "<h2>Candidates</h2>" in html and '"#race">Candidates</a>' in html


def test_a_race_of_truncated_programs_says_so_in_one_line():
    raced = {"segments_raced": 6.0, "segments": 34.0}
    page = page_html(replace(DEEP, search={**DEEP.search, **raced}))
    assert "Timed with 6 of 34 segments" in page and "\ufffd" not in page


def test_the_runner_up_and_what_it_would_cost():
    text = " ".join(Page(page_html(DEEP)).text.split())
    assert (
        "Taken: zero1; predicted step 9.500 ms, 600.00 KiB: the fastest that fits of "
        "4 measured. Runner-up: #2, with which the step would take 10.500 ms in "
        "500.00 KiB."
    ) in text


def test_a_runner_up_that_was_predicted_to_be_faster_is_explained():
    text = " ".join(Page(page_html(HOSTILE)).text.split())
    assert (
        "Taken: zero1; predicted step 9.500 ms, 600.00 KiB: it won the race, though "
        "another strategy was predicted to be faster. Runner-up: fastest, with which "
        "the step would take 9.000 ms in 900.00 KiB."
    ) in text


def test_a_sign_stays_with_the_tensor_behind_it():
    html = "".join(page_html(HOSTILE).split())
    assert html.count('<divclass="term"><spanclass="sign"') == html.count(
        'class="sign"'
    )
    assert html.count('<divclass="term"><figure>') > 0


def test_the_memory_timeline_adds_up():
    assert DEEP.figures is not None
    moments = timeline(DEEP.figures)
    assert len(moments) == 2 * 96
    # 1 KiB for every choice, 4 of state for each of 96, residuals of all, temporaries.
    assert max(m.total_bytes for m in moments) == (1 + 96 * 4 + 96 * 2 + 3) * KIB
    assert [m.segment for m in moments] == [*range(96), *reversed(range(96))]
    assert [m.residual_bytes for m in moments[:2]] == [2 * KIB, 4 * KIB]
    assert moments[0].total_bytes == moments[-1].total_bytes == (1 + 384 + 2 + 3) * KIB


def test_a_plan_that_was_not_measured_has_no_timeline():
    assert DEEP.figures is not None
    plan = replace(DEEP, figures=replace(DEEP.figures, picks=()))
    assert timeline(plan.figures) == []
    assert "were not measured by themselves" in page_html(plan)


def test_a_plan_comes_back_from_its_file_with_its_figures():
    assert Plan.from_json(as_data(DEEP)) == DEEP
    again = Plan.from_json(as_data(HOSTILE))
    assert page_html(again) == page_html(HOSTILE)
    assert HOSTILE._repr_html_() == small_html(again)


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


def test_the_front_is_what_nothing_beats():
    options = [
        option(str(i), ms, kib, 0)
        for i, (ms, kib) in enumerate([(5, 9), (4, 9), (4, 8), (6, 2), (7, 2), (1, 50)])
    ]
    front = [(o.step_ms, o.memory_bytes // KIB) for o in pareto(options)]
    assert front == [(6, 2), (4, 8), (1, 50)]
    for one in options:  # by the definition, option by option
        beaten = any(
            o.memory_bytes <= one.memory_bytes
            and o.step_ms <= one.step_ms
            and (o.memory_bytes, o.step_ms) != (one.memory_bytes, one.step_ms)
            for o in options
        )
        assert beaten != (one in pareto(options))


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        ((), (None, None)),
        (((),), (None, 0)),
        (((), ()), (0, 1)),
        (((), (), (), ()), (0, 3)),
        (((), ("x",), (), ()), (1, 3)),
        (((), ("x",), ("y",), ()), (1, 2)),
        (((), (), (), ("x",)), (0, 3)),
    ],
)
def test_sharded_dims_are_drawn(spec, dims):
    assert drawn_dims(tensor("f32[]", *spec)) == dims


def test_a_part_has_the_size_of_what_a_device_holds():
    drawn = tensor_drawing(
        tensor("f32[8,16]", ("x",), ("y",)), {"x": 4, "y": 2}, {"x": "a0", "y": "a1"}
    )
    parts = re.findall(
        r'<rect class="part (a\d)" height="(\S+)".*?width="(\S+)"', drawn
    )
    assert parts == [("a0", "12", "18"), ("a1", "12", "18")]  # of 72 by 48
    assert drawn.count('class="cut"') == 3 + 1
    assert "<title>f32[8/x,16/y]</title>" in drawn


def test_elements_escape_what_they_are_given():
    made = element("text", "<b>&", title='"><script>')
    assert made == '<text title="&#34;&gt;&lt;script&gt;">&lt;b&gt;&amp;</text>'


def test_a_chart_of_strategies_holds_its_marks_and_texts():
    options = [option(f"s{i}", 1.0 + i, 900 - 100 * i, i == 0) for i in range(3)]
    drawn = scatter_drawing(options, None)
    width, height = map(float, re.search(r"0 0 ([\d.]+) ([\d.]+)", drawn).groups())
    places = re.findall(r' c?x="([\d.-]+)" c?y="([\d.-]+)"', drawn)
    assert len(places) >= 7  # Two circles at least, and five texts.
    assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in places)
    assert width > 200 and len({*places}) == len(places)


@pytest.mark.parametrize(
    ("most", "found"), [(0, [0]), (10, [0, 2.5, 5, 7.5, 10]), (0.3, [0, 0.1, 0.2, 0.3])]
)
def test_ticks_are_round(most, found):
    assert ticks(most) == pytest.approx(found)


def test_a_budget_is_said_and_drawn():
    plan = figured(["a", "b"], budget_bytes=20 * KIB)
    assert 'class="limit budget"' in page_html(plan)
    far = replace(figured(["a", "b"], budget_bytes=2000 * KIB), peak_bytes=20 * KIB)
    assert 'class="limit budget"' not in page_html(far).split('id="strategies"')[0]
    assert "far above this picture" in page_html(far)
    # Near what the compiled program needs, which the picture shows as well.
    near = page_html(replace(far, peak_bytes=1900 * KIB))
    assert 'class="limit budget"' in near.split('id="strategies"')[0]
    assert "far above this picture" not in near


def test_the_page_says_at_its_top_why_the_plan_was_chosen():
    page = Page(page_html(make_plan(layers([0]), RACE)))
    why = (
        "Why: it is the fastest of 2 programs that were timed. Next: data_parallel or "
        "zero1, 12.250 ms, against 10.250 ms."
    )
    assert page.text.index(why) < page.text.index("Segments")
    assert "Plan 'planned' for a mesh x=4" in page.text

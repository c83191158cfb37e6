"""Every page of docs/results is what its JSON makes, and the README agrees with it."""

import json
import re
import shutil
import statistics

import pytest

from cfp.plan.parts import roles_text
from cfp.view.words import moves_text, storage_text
from cfp_test.cli.cli_runner import ROOT
from cfp_test.results import side_by_side
from cfp_test.results.pages import RESULTS, TEXTS, Page, plain, table
from cfp_test.results.plans import Saved, section
from cfp_test.results.registry import PAGES
from cfp_test.view.reported import DEEP

OLD_PLANS = sorted(RESULTS.glob("gpt*_h200x4_202611_*.json"))


def test_every_page_is_made_by_the_script():
    assert {page.name for page in PAGES} == {file.stem for file in RESULTS.glob("*.md")}
    texts = {page.name for page in PAGES if page.has_text}
    assert texts == {file.stem for file in TEXTS.glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_made_again_is_the_same(page):
    assert page.text() == (RESULTS / f"{page.name}.md").read_text()


def test_texts_hold_no_table():
    """A table is a figure of the JSON: a text names it, and does not spell it out."""
    for file in TEXTS.glob("*.md"):
        lines = file.read_text().splitlines()
        typed = [line for line in lines if line.startswith("|") and "${" not in line]
        headings = 2 if file.stem.startswith("ranges") else 0
        assert len(typed) == headings, (file.name, typed)


def test_all_that_a_page_shows_comes_from_its_json(tmp_path):
    """Another time in the JSON is another page."""
    (page,) = (page for page in PAGES if page.name == "gpt_h200x4_202611")
    for name in page.sources:
        shutil.copy(RESULTS / name, tmp_path)
    file = tmp_path / page.sources[1]
    data = json.loads(file.read_text())
    (row,) = (row for row in data["race"] if row["name"] == data["winner"])
    row["time_ms"] = 123.45
    file.write_text(json.dumps(data))
    assert "123.45" not in page.text()
    assert "| **planned 5** | 123.45 |" in page.text(tmp_path)


@pytest.mark.parametrize("text", ["no figure", "${a} and ${b}"])
def test_a_text_names_each_figure(tmp_path, text):
    (tmp_path / "made.md").write_text(text)
    (tmp_path / "made.json").write_text("{}")
    made = Page(name="made", sources=("made.json",), figures=lambda _: {"a": "1"})
    with pytest.raises(ValueError, match=r"made should name each figure"):
        made.text(tmp_path, tmp_path)


@pytest.mark.parametrize("file", OLD_PLANS, ids=lambda file: file.stem)
def test_pages_of_plans_of_old_formats(file):
    plan = Saved.load(file)
    text = "\n".join(section("NVLink", plan))
    data = json.loads(file.read_text())
    assert f"| **{data['winner']}** | {data['measured_ms']:.2f} | " in text
    assert text.count("\n| ") > len(data["race"])
    assert plan.search["strategies_measured"] == data["search"]["strategies_measured"]


def test_a_page_of_a_plan_that_was_saved_now(tmp_path):
    DEEP.save(tmp_path / "plan.json")
    text = "\n".join(section("one", Saved.load(tmp_path / "plan.json")))
    for row in DEEP.rows[:2]:
        sharded = roles_text(row.strategy)
        storage = storage_text(DEEP.segments[row.segment], short=True)
        assert (
            f"| {row.name} | {sharded} | {storage} | {moves_text(row.moves)} |" in text
        )


def test_tables_have_a_cell_for_each_heading():
    assert table("a | b", [[1, None]]) == "| a | b |\n| --- | --- |\n| 1 |  |"
    with pytest.raises(AssertionError, match="a cell for each heading"):
        table("a | b", [[1]])
    assert plain("tensor_sequence_parallel, arguments told") == (
        "tensor and sequence parallel, arguments told"
    )


def figures(name):
    (page,) = (page for page in PAGES if page.name == name)
    return page.figures(*(json.loads((RESULTS / s).read_text()) for s in page.sources))


def test_the_readme_has_the_figures_of_plans_beside_hand():
    text = (ROOT / "README.md").read_text()
    written = json.loads((RESULTS / "by_hand_h100x2_202611.json").read_text())
    called = json.loads((RESULTS / "called_kernel_h100x2_202611.json").read_text())
    ways = written["rows"][0]["ways"]
    plan = ways["plan: written"]
    rows = [(ways["hand: fsdp"]["median_ms"], plan["median_ms"], plan["planning_s"])]
    for name, model in called["models"].items():
        if not name.endswith("before"):
            times_ms = map(statistics.median, model["samples_ms"].values())
            rows.append((*times_ms, model["planning"]["planning_s"]))
    assert len(rows) == 3
    for hand_ms, plan_ms, seconds in rows:
        row = f"{plan_ms:.1f} ms | {hand_ms:.1f} ms by hand"
        (line,) = (line for line in text.splitlines() if row in line)
        assert f" | {seconds:.0f} s | " in line, line


@pytest.mark.parametrize(
    ("suite", "name", "rivals"),
    [
        ("suite_h100x2", "moe", ("hand", "preset", "pytorch")),
        ("suite_h100x2", "gpt:off", ("hand", "preset", "pytorch")),
        ("suite_budgets_h100x2", "bert", ("hand", "cost_model", "pytorch")),
        ("suite_again_h200x2", "moe:off", ("hand", "cost_model", "pytorch")),
        ("suite_slow_h200x2", "llama:off", ("hand", "cost_model", "preset")),
        ("suite_slow_h200x2", "bert:off", ("hand", "cost_model", "preset")),
    ],
)
def test_the_readme_has_the_figures_of_plans_beside_all_others(suite, name, rivals):
    said = {"hand": "by hand", "cost_model": "cost model", "pytorch": "PyTorch FSDP2"}
    data = json.loads((RESULTS / f"{suite}_202611.json").read_text())
    (piece,) = (one for one in data["pieces"] if one["piece"] == name)
    ways = side_by_side.timed_of(piece)
    times = {g: side_by_side.best(ways, g).median_ms for g in ("planned", *rivals)}
    others = [f"{times[g]:.1f} ms {said.get(g, 'best preset')}" for g in rivals]
    row = f" | {times['planned']:.1f} ms | {', '.join(others)} | "
    seconds = piece["planning"]["planning_s"]
    row += f"{times['planned'] / times['hand']:.2f} | {seconds:.0f} s |"
    text = (ROOT / "README.md").read_text().replace(" (without compiler options)", "")
    (line,) = (line for line in text.splitlines() if row in line)
    assert f"(docs/results/{suite}_202611.md) |" in line
    assert ("without P2P" in line) == piece["p2p_disabled"]


def test_the_readme_has_the_figures_of_plans_under_budgets():
    text, found = (ROOT / "README.md").read_text(), 0
    for suite in ("suite_budgets_h100x2_202611", "suite_budgets_h200x2_202611"):
        page = (RESULTS / f"{suite}.md").read_text().partition("## Under budgets")[2]
        for line in page.splitlines():
            cells = line.strip("| ").split(" | ")
            if len(cells) < 9 or not cells[4].replace(".", "").isdigit():
                continue
            _, share, _, _, plan_ms, _, preset_ms, over, seconds = cells
            best = f"{float(preset_ms):.1f} ms best preset" if preset_ms else over
            row = f"| {float(plan_ms):.1f} ms | {best} |"
            of = f"{share.replace('%', ' %')} of the memory"
            said = [one for one in text.splitlines() if row in one and of in one]
            assert all(f"| {seconds} s | " in one and suite in one for one in said)
            found += len(said)
    assert found == text.count("% of the memory | ") - 1  # One is of another page.


def test_a_guide_says_the_range_of_all_results():
    page = ROOT / "docs" / "performance.md"
    text = re.sub(r"\s+", " ", page.read_text())
    found, whole = figures("ranges_h200_202611"), figures("full_models_h200x2_202611")
    for said in (
        f"P2P off {found['p2p_off']} of the best preset",
        f"NVLink {found['nvlink']}",
        f"whole models {found['whole']}, and within a memory budget {found['budget']}",
        f"({found['first_p2p_off']} in the first races)",
        f"{found['worst_planned']} % for the plan in the picture",
        f"{whole['nominal_share'].replace('%', ' %')} of the nominal",
    ):
        assert said in text, said
    (run,) = (file for file in OLD_PLANS if file.stem == "gpt_h200x4_202611_p2p_off")
    race = {row["name"]: row["time_ms"] for row in Saved.load(run).race}
    preset = min(time for name, time in race.items() if not name.startswith("planned"))
    assert (
        f"{race['planned 5']:.1f} ms per step, the fastest preset {preset:.1f}" in text
    )

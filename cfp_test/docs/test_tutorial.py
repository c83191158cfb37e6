"""The tutorial: its notebook and page are made from its source, and it runs."""

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from cfp_test.cli.cli_runner import environment
from cfp_test.docs.tutorial import (
    NOTEBOOK,
    PAGE,
    SOURCE,
    STORY,
    Cell,
    make_notebook,
    make_page,
    read_cells,
    read_printed,
)
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import GUARD_SECONDS

CELLS = read_cells(SOURCE.read_text())
PRINTED = read_printed(NOTEBOOK.read_text())


def find_cell(words: str) -> int:
    """Finds the only code cell with some words."""
    (found,) = [
        index
        for index, cell in enumerate(CELLS)
        if not cell.prose and words in cell.text
    ]
    return found


def run(cells, folder, python):
    program = folder / "program.py"
    program.write_text("\n".join(cell.text for cell in cells if not cell.prose))
    done = subprocess.run(
        [python, program],
        cwd=folder,
        env=environment(
            JAX_PLATFORMS="cpu", XLA_FLAGS="", CFP_CACHE_DIR=str(folder / "cache")
        ),
        timeout=GUARD_SECONDS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_of(printed: str) -> dict[int, list[float]]:
    """Reads the losses of each step that is printed."""
    found = defaultdict(list)
    for line in re.findall(r"^step \d+.*$", printed, re.MULTILINE):
        for step, loss in re.findall(r"step (\d+)|(\d\.\d+)", line):
            if step:
                last = int(step)
            else:
                found[last].append(float(loss))
    return found


# A smaller model, no race, and a tenth of the steps.
LESS = {
    "quiet=True": "quiet=True, settings=cfp.PlannerSettings(race=False)",
    **{"width=128": "width=16", "heads=4": "heads=2", "layers=2": "layers=1"},
    **{"19": "1", "20": "2", "39": "3", "40": "4"},
    **{"59": "5", "60": "6", "79": "7", "80": "8", "120": "2"},
}


def shorten(cells: list[Cell]) -> list[Cell]:
    """Has the cells do all that they do with less."""
    more = re.compile(rf"(?<![\w.*])({'|'.join(LESS)})\b")
    return [
        cell
        if cell.prose
        else replace(cell, text=more.sub(lambda found: LESS[found[1]], cell.text))
        for cell in cells
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tutorial")
    shutil.copy(STORY, path)
    return path


@pytest.fixture(scope="module")
def printed(folder):
    """The output of the tutorial: of a process that was stopped, and of another.

    The page says from which cell to which the second one runs.
    """
    first, stopped = find_cell("one_step"), find_cell("Plan.load")
    return run(CELLS[:stopped], folder, quick_python()) + run(
        CELLS[:first] + CELLS[stopped:], folder, sys.executable
    )


def test_notebook_and_page_are_made_from_the_source():
    """If not: python cfp_test/docs/tutorial.py, or with --keep-outputs."""
    assert make_notebook(CELLS, PRINTED) == NOTEBOOK.read_text()
    assert make_page(CELLS, PRINTED) == PAGE.read_text()
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    kinds = ["markdown" if cell.prose else "code" for cell in CELLS]
    assert [cell["cell_type"] for cell in cells] == kinds


def test_its_cells_run(tmp_path):
    """In one process, shortened; inside they compare losses with one device's."""
    shutil.copy(STORY, tmp_path)
    steps = [*losses_of(run(shorten(CELLS), tmp_path, quick_python()))]
    assert steps == [0, 2, 4, 6, 7, 3, 5]
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.nightly
def test_it_trains(printed):
    """Losses fall as the page shows, in a new process, too.

    Inside it compares them with one device's.
    """
    found, shown = losses_of(printed), losses_of("".join(PRINTED))
    assert sum(map(len, found.values())) == sum(map(len, shown.values())) == 11
    assert found[0][0] > 4 and min(map(min, found.values())) < 2.7
    assert {0, 20} <= found.keys() & shown.keys()
    for step in found.keys() & shown.keys():
        np.testing.assert_allclose(found[step], shown[step][0], rtol=0.02)


@pytest.mark.nightly
def test_the_plan_shards_the_state(printed, folder):
    whole, held = map(float, re.findall(r"(\d\.\d\d) MiB", printed)[-2:])
    assert held < whole / 2
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")

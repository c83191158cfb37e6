"""The tutorial: its notebook and page are made from its source, and it runs."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from cfp_test.cli_runner import environment
from cfp_test.scripts.tutorial import (
    NOTEBOOK,
    PAGE,
    SOURCE,
    STORY,
    make_notebook,
    make_page,
    read_cells,
    read_printed,
)
from cfp_test.waiting import GUARD_SECONDS

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


def run(cells, folder):
    program = folder / "program.py"
    program.write_text("\n".join(cell.text for cell in cells if not cell.prose))
    done = subprocess.run(
        [sys.executable, program],
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


def losses_of(printed: str) -> list[float]:
    lines = re.findall(r"^step \d+.*$", printed, re.MULTILINE)
    return [float(n) for line in lines for n in re.findall(r"\d\.\d+", line)]


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
    defined, stopped = CELLS[: find_cell("one_step")], find_cell("Plan.load")
    return run(CELLS[:stopped], folder) + run([*defined, *CELLS[stopped:]], folder)


def test_notebook_and_page_are_made_from_the_source():
    """If not: python cfp_test/scripts/tutorial.py, or with --keep-outputs."""
    assert make_notebook(CELLS, PRINTED) == NOTEBOOK.read_text()
    assert make_page(CELLS, PRINTED) == PAGE.read_text()
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    kinds = ["markdown" if cell.prose else "code" for cell in CELLS]
    assert [cell["cell_type"] for cell in cells] == kinds


def test_it_trains(printed):
    """Losses fall as the page shows, in a new process, too.

    Inside it compares them with one device's.
    """
    first, *_ = found = losses_of(printed)
    assert len(found) == 11 and first > 4 and min(found) < 2.5
    np.testing.assert_allclose(found, losses_of("".join(PRINTED)), rtol=0.02)


def test_the_plan_shards_the_state(printed, folder):
    whole, held = map(float, re.findall(r"(\d\.\d\d) MiB", printed)[-2:])
    assert held < whole / 2
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")

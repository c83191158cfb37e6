"""Pages from results with known figures; the same results give the same files."""

import json
import subprocess
import sys

from cfp_test.bench.made_rows import ROWS, made
from cfp_test.bench.page import page
from cfp_test.cli.cli_runner import environment
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import GUARD_SECONDS


def results():
    return {
        "format": 1,
        "suite": "layers",
        "date": "2026-11-21",
        "environment": {"platform": "gpu", "device_kind": "NVIDIA H200"},
        "rounds": 5,
        "gate": {"steps": 10, "tolerance": 1e-4},
        "configurations": [{**made(ROWS), "options": {"dtype": "bfloat16"}}],
    }


def test_page_says_what_the_results_say():
    text = page("Layers", "cfp bench --suite layers", {"NVLink": results()}, "p.svg")
    lines = text.splitlines()
    assert lines[0] == "# Layers"
    assert "    cfp bench --suite layers" in lines
    assert "| NVLink | gpt, 4 layers | 9.00 | 0.900 | 0.500 | 1.125 | - | 10 |" in lines
    assert "![Step times, relative to the plan's](p.svg)" in lines
    assert "- device_kind: NVIDIA H200" in lines
    # The fastest first; what was not timed last, with its reason.
    start = lines.index("### gpt, 4 layers")
    table = [line for line in lines[start:] if line.startswith("|")][2:]
    assert table[0].startswith("| preset zero1 | x=4 | 8.00 |")
    assert table[1].startswith("| **planned** | x=4 | 9.00 | 1.00 | 1.000 |")
    assert table[2].startswith("| fsdp (by hand) | x=4 | 10.00 | - | 1.111 |")
    assert table[-1] == "| wrong (by hand) | x=4 | wrong | - | - | - | - | off by 1 |"
    assert "- planned / best handwritten: 0.900" in lines


def test_script_writes_page_and_plot(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(results()))
    words = "--title T --command C --out page.md --plot plot.svg NVLink=a.json"
    written = []
    for python in (quick_python(), sys.executable):
        done = subprocess.run(
            [python, "-m", "cfp_test.bench.page", *words.split()],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=GUARD_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        written.append(
            ((tmp_path / "page.md").read_text(), (tmp_path / "plot.svg").read_text())
        )
    assert written[0] == written[1]
    assert "(plot.svg)" in written[0][0] and "<svg" in written[0][1]

"""Benchmarks: a line of the docs for each, and a tiny form that runs on a CPU."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from cfp_test.bench.__main__ import BENCHMARKS
from cfp_test.cli.cli_runner import ROOT
from cfp_test.support.quick_flags import QUICK_FLAGS
from cfp_test.support.waiting import GUARD_SECONDS

TEXT = (ROOT / "docs" / "benchmarks.md").read_text()
TINY = re.findall(r"^python -m cfp_test\.bench (\w+ .*|pages)$", TEXT, re.MULTILINE)


def test_each_benchmark_has_a_line_a_tiny_form_and_a_module():
    lines = re.findall(r"^\| `(\w+)[^|`]*` \|", TEXT, re.MULTILINE)
    assert lines == [*BENCHMARKS]
    assert [one.split()[0] for one in TINY] == [*BENCHMARKS]
    assert all(find_spec(module) for module, _, _ in BENCHMARKS.values())


@pytest.mark.nightly
@pytest.mark.parametrize("words", TINY, ids=lambda words: words.split()[0])
def test_tiny_forms_run(words, tmp_path):
    flags = f"{QUICK_FLAGS} --xla_force_host_platform_device_count=2"
    known = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "cfp_test.bench", *words.split()],
        cwd=ROOT if words == "pages" else tmp_path,
        env={**known, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name in re.findall(r"\S+\.json\b", words):
        assert (tmp_path / name).stat().st_size > 0

"""The shell entry points: each pass over each model starts from a script."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from cfp_test.cli.cli_runner import environment
from cfp_test.support.covering import at_night
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import GUARD_SECONDS

TESTS = Path(__file__).parent.parent
SMALL = (
    "--num_layer 3 --batch_size 8 --hidden_size 32 --seq_len 16 --num_heads 4 "
    "--vocab_size 64 --device_num 4 --platform cpu --mode analysis"
).split()

EXPERTS = "--num_layer 4 --num_experts 4 --expert_group_size 32"


def run(script: str, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["sh", str(TESTS / script), *words],
        capture_output=True,
        text=True,
        env={**environment(), "PYTHON": quick_python()},
        timeout=GUARD_SECONDS,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "options", "first"),
    [
        # What comes before the layers, three that are equal, and what comes after.
        ("llama2/llama_test.sh", "--num_kv_heads 2 --remat", [0, 1, 1, 1, 4]),
        # Every other layer is one of experts.
        ("moe/moe_test.sh", EXPERTS, [0, 1, 2, 1, 2, 5]),
        *at_night(
            [
                ("bert/bert_test.sh", "", [0, 1, 1, 1, 4]),
                ("gpt/gpt_test.sh", "--ffn_size 64", [0, 1, 1, 1, 4]),
            ]
        ),
    ],
)
def test_analysis_finds_the_layers(script, options, first, tmp_path):
    done = run(script, *SMALL, *options.split(), "--workdir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    pattern = r"^ParallelBlocks sequence: .* mapped to  (\(.*\))$"
    kinds = [
        ast.literal_eval(kind)
        for kind in re.findall(pattern, done.stdout, re.MULTILINE)
    ]
    assert [kinds.index(kind) for kind in kinds] == first
    assert (tmp_path / "debug_analysis_global" / "segments.json").exists()


def test_layers_that_misfit_are_refused():
    done = run("llama2/llama_test.sh", *SMALL, "--num_kv_heads", "3")
    assert done.returncode == 2
    assert "heads must be divisible by kv_heads" in done.stderr

"""Output of the shell scripts, at sizes for a CPU."""

import ast
import json
import re
import subprocess
from pathlib import Path

from cfp_test.cli.cli_runner import ROOT, environment, steady_python
from cfp_test.support.waiting import GUARD_SECONDS

SIZES = "--hidden_size 32 --seq_len 16 --num_heads 4 --vocab_size 96 --quick"
CPU = "--platform cpu --devices 4"


def run(script: str, folder: Path, words: str) -> str:
    done = subprocess.run(
        ["sh", str(ROOT / script), *words.split()],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**environment(), "PYTHON": steady_python(folder)},
        timeout=GUARD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cost_model_script_prints_what_alpa_does(tmp_path):
    words = f"{CPU} --settings 8x1 {SIZES} --workdir work --link nvlink --json rows"
    text = run("alpa_test/scripts/gpt_A100_8GPU.sh", tmp_path, words)
    _, head, costs, count, rates, _ = text.split("\n", 5)
    assert head == (
        "============ Alpa GPT test: config:F batchsize:8 layers:1 devices:4 "
        "============"
    )
    assert re.fullmatch(r"\[\d+\.\d{8} \d+\.\d{8} \d+\.\d{8}\]", costs)
    assert float(count.removeprefix("TFLOP_COUNT: ")) > 0
    assert len(ast.literal_eval(rates.removeprefix("tflops: "))) == 3
    (row,) = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert row["winner"] == "cost model, nvlink" and row["believed_ms"] > 0


def test_enumeration_prints_volume_and_time(tmp_path):
    script = "cfp_test/scripts/enum_and_benchmark/gpt_enum_benchmark_comm_comp.sh"
    words = f"{CPU} {SIZES} --batch_size 8 --num_layer 2 --limit 2 --dtype float32"
    words += " --json rows.json --plot plot.svg"
    head, space, *rest = run(script, tmp_path, words).splitlines()
    assert head.startswith("============ GPT test: parallel_block_opt:True config:F ")
    sizes = ast.literal_eval(space.removeprefix("generated_search_space: "))
    assert sizes == [3] * 16  # Two layers of eight blocks.
    assert len(rest) == 2 * 6 + 1
    found = json.loads((tmp_path / "rows.json").read_text())
    for lines, row in zip((rest[:6], rest[6:12]), found["rows"], strict=True):
        names = ["Comm Volume", "Comm Overhead", "Comp Overhead", "Overlapped"]
        for name, line in zip([*names, "Exposed"], lines, strict=False):
            assert float(line.removeprefix(f"{name}: ")) >= 0
        match = re.fullmatch(r"sval (\[.*?\]) \[([\d. ]+)\] (\d+)", lines[5])
        assert match is not None
        numbers = ast.literal_eval(match[1])
        assert numbers == row["sval"] and numbers[:8] == numbers[8:]
        assert int(match[3]) == row["memory_bytes"] > 0
        assert row["trace"]["communication_ms"] > 0
    # Data parallel, and another: they send different amounts.
    volumes = {row["volume_bytes"] for row in found["rows"]}
    assert len(volumes) == 2 and min(volumes) > 0
    assert "<svg" in (tmp_path / "plot.svg").read_text()

"""The shell entry points, all passes, on models small enough for a CPU."""

import ast
import functools
import json
import re
import subprocess
from pathlib import Path

import pytest

from cfp_test.cli.cli_runner import ROOT, environment, steady_python
from cfp_test.support.waiting import GUARD_SECONDS

SIZES = (
    "--hidden_size 16 --seq_len 16 --num_heads 4 --vocab_size 64 --per_kind 1 --quick"
)
SMALL = f"{SIZES} --batch_size 8 --device_num 2 --platform cpu".split()
EXPERTS = "--num_experts 4 --expert_group_size 32".split()


def run(
    script: str, workdir: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["sh", str(ROOT / "cfp_test" / script), *words, "--workdir", str(workdir)],
        capture_output=True,
        text=True,
        cwd=workdir,
        env={**environment(), "PYTHON": steady_python(workdir), **variables},
        timeout=GUARD_SECONDS,
        check=False,
    )


def sequences(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    pattern = r"^ParallelBlocks sequence: (\(.*?\)) mapped to  (\(.*?\))$"
    return [
        (ast.literal_eval(a), ast.literal_eval(b))
        for a, b in re.findall(pattern, text, re.MULTILINE)
    ]


@pytest.mark.smoke
def test_analysis_of_the_full_model_needs_no_devices(tmp_path):
    """The artifact's own size: nothing is allocated, so any machine will do."""
    done = run(
        *("moe/moe_test.sh", tmp_path, "--num_layer", "4", "--batch_size", "64"),
        *("--mode", "analysis", "--platform", "cpu"),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^global analysis time: [\d.]+$", done.stdout, re.MULTILINE)
    # Nothing was measured, nor looked for.
    assert not (tmp_path / "profiles.sqlite").exists()
    found = sequences(done.stdout)
    kinds = [first for _, first in found]
    # Embedding, dense and expert layers in turn, each twice, and the head.
    assert kinds == [found[i][0] for i in (0, 1, 2, 1, 2, 5)]
    blocks = re.findall(r"^Parallel Block (\d+):$", done.stdout, re.MULTILINE)
    assert list(map(int, blocks)) == list(range(found[-1][0][1]))
    plans = re.findall(r"^    Plan: ((?:\d+, )+)$", done.stdout, re.MULTILINE)
    assert len(plans) > 2 * len(blocks)
    folder = tmp_path / "debug_analysis_global"
    text = (folder / "strategy_map.txt").read_text()
    assert re.search(r"^Strategy SRR = SRR x RR @ \{0\}$", text, re.MULTILINE)
    assert re.search(r"^Strategy .* \(allreduce @ 0\)$", text, re.MULTILINE)
    assert len(json.loads((folder / "segments.json").read_text())) == 6


@pytest.fixture(scope="module")
def passes_of(tmp_path_factory):
    """Runs a model's search before its profile pass, that pass, and search again."""

    @functools.cache
    def run_passes(model, layers):
        folder = tmp_path_factory.mktemp("passes")
        experts = EXPERTS if model == "moe" else []
        size = (*SMALL, *experts, "--num_layer", str(layers))
        return folder, *(
            run(f"{model}/{model}_test.sh", folder, *size, "--mode", mode)
            for mode in ("search", "profile", "search")
        )

    return run_passes


@pytest.mark.parametrize(
    ("model", "layers", "segments"),
    [
        # One layer, or one of each sort: nothing repeats.
        ("gpt", 1, [0]),
        pytest.param("moe", 2, [0], marks=pytest.mark.nightly),
        pytest.param("moe", 4, [0, 1, 2, 1, 2, 3], marks=pytest.mark.nightly),
    ],
)
def test_profile_and_search(passes_of, model, layers, segments):
    kinds = sorted(set(segments))
    folder, missing, profiled, searched = passes_of(model, layers)
    assert missing.returncode == 2
    assert "Run cfp profile first" in missing.stderr
    assert missing.stdout == ""

    assert profiled.returncode == 0, profiled.stderr
    lines = profiled.stdout.splitlines()
    assert lines[0] == f"NUM SEGMENT is {len(kinds)}"
    spaces = {}
    for kind in kinds:
        start = lines.index(f"RUN AutoSharding FOR SEGMENT {kind} segment_{kind}")
        space = lines[start + 2].removeprefix("segment PB search space: ")
        spaces[kind] = ast.literal_eval(space)
        assert (folder / f"debug_segment_{kind}_analysis_segment").is_dir()
    pattern = re.compile(
        r"SegmentIdx: (\d) ParallelBlock Strategy: (\[.*\]) avgcost: (\S+) "
        r"mem_cost\(GB\): (\S+) storage: (used|optimizer|sharded)"
    )
    found = [match for line in lines if (match := pattern.fullmatch(line))]
    assert {int(match[1]) for match in found} == set(kinds)
    for match in found:
        numbers = ast.literal_eval(match[2])
        sizes = spaces[int(match[1])]
        assert all(n < size for n, size in zip(numbers, sizes, strict=True))
        assert 0 < float(match[3]) < 10
    assert re.fullmatch(r"overlapped_profiling overall time [\d.]+", lines[-1])

    assert searched.returncode == 0, searched.stderr
    solution, cost, flop, tflops = searched.stdout.splitlines()[:4]
    numbers = ast.literal_eval(
        solution.removeprefix("searched ParallelBlock Strategies solution: ")
    )
    sizes = [size for kind in segments for size in spaces[kind]]
    assert all(n < size for n, size in zip(numbers, sizes, strict=True))
    shown = re.fullmatch(
        r"searched training cost: \[([\d. ]+)\], memory_cost: ([\d.]+)", cost
    )
    assert shown is not None
    count = float(flop.removeprefix("TFLOP_COUNT: "))
    rates = ast.literal_eval(tflops.removeprefix("tflops: "))
    for seconds, rate in zip(map(float, shown[1].split()), rates, strict=True):
        assert rate == pytest.approx(count / seconds, rel=1e-3)
    assert "Race" in searched.stdout
    assert (folder / "debug_search" / "after_ir.txt").exists()


def test_performance_script_prints_what_the_artifact_does(passes_of):
    """All passes in one process, which finds measured what those above measured."""
    folder, searched = passes_of("gpt", 1)[0], passes_of("gpt", 1)[-1]
    words = f"{SIZES} --platform cpu --devices 2 --settings 8x1 --json rows"
    done = run(
        "scripts/gpt_A100_8GPU.sh",
        folder,
        *words.split(),
        DUMP_PROFILE_PARALLEL_BLOCK="0",
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout
    note, line, head, analysis, seconds, flop, profiling, *rest = text.splitlines()
    assert "uses the 2 of cpu that there are" in note
    assert line == "=" * 120
    assert head == (
        "============ GPT test: parallel_block_opt:True config:F batchsize:8 layers:1 "
        "devices:2 ============"
    )
    assert analysis == "***********Analysis Pass****************"
    assert seconds.startswith("global analysis time: ")
    assert float(flop.removeprefix("FLOP_COUNT: ")) > 0
    assert profiling == "***********Profiling Pass****************"
    assert "Profiling..." in rest
    assert "SegmentIdx" not in text  # Single profiles were not asked for.
    place = rest.index("***********Search Pass****************")
    assert re.fullmatch(r"overlapped_profiling overall time [\d.]+", rest[place - 1])
    solution, cost, count, rates, end = rest[place + 1 :]
    assert solution == searched.stdout.splitlines()[0]
    numbers = ast.literal_eval(
        solution.removeprefix("searched ParallelBlock Strategies solution: ")
    )
    shown = re.fullmatch(
        r"searched training cost: \[([\d. ]+)\], memory_cost: ([\d.]+)", cost
    )
    assert shown is not None
    tflop = float(count.removeprefix("TFLOP_COUNT: "))
    for one, rate in zip(
        shown[1].split(),
        ast.literal_eval(rates.removeprefix("tflops: ")),
        strict=True,
    ):
        assert rate == pytest.approx(tflop / float(one), rel=1e-3)
    assert end == "=" * 65
    (row,) = map(json.loads, (folder / "rows").read_text().splitlines())
    assert row["solution"] == numbers and row["tflop"] == tflop
    assert (row["model"], row["devices"], row["batch"]) == ("gpt", 2, 8)

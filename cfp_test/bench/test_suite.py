"""The suite on virtual devices: what is wrong or fails is a row, others are timed."""

import json
import signal
from dataclasses import replace

import jax
import pytest
from typer.main import get_command

from cfp.cli import app
from cfp.cli.options import OF_BENCH
from cfp.models import find
from cfp.planner_settings import PlannerSettings
from cfp.profiling.in_flight import InFlightFolder
from cfp_test.bench import clock, gate
from cfp_test.bench.command import command
from cfp_test.bench.compete import SuiteOptions, compete
from cfp_test.bench.competitors import handwritten
from cfp_test.bench.configs import SUITES, configs, small
from cfp_test.bench.journal import Journal
from cfp_test.bench.rows import rows_of
from cfp_test.cli.cli_runner import environment, run_batch, run_one
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import end_of, running, until

pytestmark = pytest.mark.usefixtures("compiled_once")


def test_a_turn_on_cpus_runs_one_program_at_a_time():
    turn = clock.turn_on(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]))
    assert (turn.min_samples, turn.max_samples) == (4, 10)
    assert (turn.min_sample_ms, turn.min_repeat) == (5.0, 1)


def test_what_is_wrong_or_does_not_compile_is_a_row_and_not_timed(tmp_path):
    (config,) = configs("tiny", ["gpt"], {"layers": 1}, 4)
    (right,) = (c for c in handwritten(config, 4) if c.name == "data_parallel")

    def wrong(is_small, options):
        assert is_small, "what is wrong is not compiled at full size"
        sizes = {**small("gpt", config.options, 4), "learning_rate": 2e-2}
        hasty = handwritten(replace(config, options=sizes), 4)
        (other,) = (c for c in hasty if c.name == "data_parallel")
        return other.make(False, options)

    def broken(is_small, options):
        if is_small:
            return right.make(is_small, options)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    taking_part = [
        right,
        replace(right, name="wrong", make=wrong),
        replace(right, name="broken", make=broken),
    ]
    kept = tmp_path / "journal.json"
    options = SuiteOptions(
        workdir=tmp_path,
        journal=Journal(kept),
        settings=PlannerSettings(),
        rounds=2,
        timing=clock.QUICK_TURN,
    )
    rows = {row.name: row for row in compete(config, taking_part, options)}
    ok = rows["data_parallel"]
    assert ok.status == "ok" and len(ok.samples_ms) == 4
    assert ok.loss_gap is not None and ok.loss_gap < gate.TOLERANCE
    assert set(ok.collectives) == {"all-reduce"} and ok.peak_bytes > 0
    assert ok.trace is not None and ok.trace["communication_ms"] > 0
    assert rows["wrong"].status == "wrong"
    assert rows["wrong"].loss_gap > gate.TOLERANCE
    assert "not timed" in rows["wrong"].reason and rows["wrong"].samples_ms == ()
    assert rows["broken"].status == "out_of_memory"
    assert "RESOURCE_EXHAUSTED" in rows["broken"].reason

    # Another process has to compile what was timed, and does nothing else again.
    made = []

    def right_again(is_small, options):
        made.append(is_small)
        return right.make(is_small, options)

    taking_part[0] = replace(right, make=right_again)
    again = compete(config, taking_part, replace(options, journal=Journal(kept)))
    assert made == [False]
    assert [row.samples_ms for row in again] == [r.samples_ms for r in rows.values()]
    assert again[1:] == list(rows.values())[1:]

    # Others under the same name are others.
    journal = Journal(kept)
    taking_part[0] = replace(taking_part[0], identity="another")
    compete(config, taking_part[:1], replace(options, journal=journal))
    assert made == [False, True, False]

    journal.finish({"name": "one"})
    assert Journal(kept).finished == [{"name": "one"}]
    assert Journal(kept).steps == journal.steps > 0


@pytest.mark.nightly  # Six processes plan, some of them the same again.
def test_bench_survives_what_ends_its_process(tmp_path):
    """Two are out; the rest is timed, and kept when the user has had enough."""
    faults = {
        "gpt: zero1, checked at the small size": "abort",
        "gpt: fsdp, timed": "exit",
        "llama: planned, analysed": "sleep",
    }
    words = "bench --suite tiny --models gpt,llama --layers 1 --devices 2 --quick"
    words += " --platform cpu --per-kind 1 --no-race --rounds 2 --no-trace"
    words += " --handwritten data_parallel,zero1,fsdp --groups handwritten --quiet"
    words += " --json out.json --workdir ."
    log = str(tmp_path / "log")
    variables = {"FAULTS": json.dumps(faults), "FAULT_LOG": log}
    folder = InFlightFolder(tmp_path / "profiles.sqlite")

    def at_llama() -> bool:
        with folder.locked():
            labels = [m.label for one in folder.living() for m in one.operations]
        return "llama: planned, analysed" in labels

    command = [quick_python(), "-m", "cfp_test.cli.faulty", *words.split()]
    with running(command, tmp_path, environment(**variables)) as process:
        until(at_llama, process)
        process.send_signal(signal.SIGINT)
        out, err = end_of(process)
    assert process.returncode == 130, err
    assert "Configurations finished: 1 and stand in out.json." in err
    assert "Traceback" not in err
    assert out.count("gpt, 1 layers") == 1

    (found,) = json.loads((tmp_path / "out.json").read_text())["configurations"]
    rows = {row.name: row for row in rows_of(found)}
    assert set(rows) == {"planned", "data_parallel", "zero1", "fsdp"}
    for name in ("planned", "data_parallel"):
        assert rows[name].status == "ok" and len(rows[name].samples_ms) == 4
    assert rows["zero1"].status == "crashed"
    died = "at the small size: Fatal Python error: Aborted while running it"
    assert rows["zero1"].reason == died
    assert rows["fsdp"].status == "crashed"
    died = "the process ended with exit code 3 while running it"
    assert rows["fsdp"].reason == died
    assert rows["zero1"].samples_ms == rows["fsdp"].samples_ms == ()
    # What planning took is of the first process, and not of those that found it known.
    assert found["planning"]["x=2"]["strategies_measured"] > 0


def test_bench_command(tmp_path):
    """One configuration from planning to JSON, against all kinds of competitors."""
    words = "--suite tiny --models gpt --layers 1 --devices 2 --platform cpu --quick"
    words += " --per-kind 1 --no-race --rounds 1 --handwritten fsdp"
    words += " --groups handwritten,cost_model --json out.json --workdir work"
    words += " --no-trace"  # Another test has a trace.
    row = {
        "model": "gpt",
        "devices": 2,
        "options": {"layers": 1, "dtype": "float32"},
        "name": "FSDP2",
        "status": "ok",
        "samples_ms": [1.0, 2.0, 3.0],
    }
    (tmp_path / "torch.jsonl").write_text(json.dumps(row) + "\n")
    done = run_one(
        "bench",
        *words.split(),
        "--pytorch",
        "torch.jsonl",
        folder=tmp_path,
    )
    assert done.code == 0, done.err
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["suite"] == "tiny"
    assert results["environment"]["platform"] == "cpu"
    (found,) = results["configurations"]
    rows = rows_of(found)
    assert {row.group for row in rows} == {
        "planned",
        "handwritten",
        "cost_model",
        "pytorch",
    }
    for row in rows:
        assert row.status == "ok", row
        assert row.samples_ms
        if row.group != "pytorch":
            assert row.loss_gap is not None and row.loss_gap <= gate.TOLERANCE
            assert row.peak_bytes > 0
    assert set(found["ratios"]) == {
        "planned / best handwritten",
        "planned / best cost model",
        "planned / best PyTorch",
    }
    assert found["planning_seconds"] > 0
    assert set(found["pays_after_steps"]) == {"handwritten", "cost_model", "pytorch"}
    (model,) = found["cost_model"]
    # No choice that the model considers is cheaper to it than its own.
    believed = model["model_believes_of_the_plan_ms"]
    assert model["solver_optimal"]
    assert believed is None or model["model_believes_of_its_own_ms"] <= believed + 1e-6
    assert "FSDP2" in done.out and "planned / best handwritten" in done.out
    assert "fsdp (by hand)" in done.out


UNKNOWN = {
    "--suite nothing": "There is no suite 'nothing'",
    "--suite tiny --models resnet": "has no model 'resnet'",
    "--suite tiny --groups friends": "There are no competitors 'friends'",
    "--suite tiny --colour red": "no option --colour",
    "--suite tiny --compare absent.json": "Cannot read results from absent.json",
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """Runs `cfp bench` for each, one after another in one process."""
    on_cpus = ("--devices", "4", "--platform", "cpu")
    lines = [("bench", *words.split(), *on_cpus) for words in UNKNOWN]
    folder = tmp_path_factory.mktemp("refusals")
    return dict(zip(UNKNOWN, run_batch(lines, folder), strict=True))


@pytest.mark.parametrize("words", UNKNOWN)
def test_bench_says_what_it_does_not_know(refusals, words):
    done = refusals[words]
    assert done.code == 2
    assert UNKNOWN[words] in done.err


@pytest.mark.parametrize("name", SUITES)
def test_every_configuration_has_a_small_size_that_splits(name):
    for devices in (2, 4, 8):
        for config in configs(name, list(SUITES[name]), {}, devices):
            known = {option.name for option in find(config.model).options}
            assert config.options.keys() <= known
            sizes = small(config.model, config.options, devices)
            assert sizes["layers"] == config.options["layers"]
            assert sizes["dtype"] == "float32"
            for dim in ("batch", "heads", "hidden", "vocab", "seq"):
                assert sizes[dim] % devices == 0


def test_other_commands_know_what_is_an_option_of_bench_alone():
    plan = get_command(app).commands["plan"]
    here, known = ({f for p in c.params for f in p.opts} for c in (command(), plan))
    assert {*OF_BENCH} == here - known

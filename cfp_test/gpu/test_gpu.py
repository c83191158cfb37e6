"""The checks of `make test-gpu` on virtual devices: each fails of what it is for."""

import sys
from dataclasses import dataclass, replace

import jax
import pytest

from cfp.analysis.presets import presets
from cfp.profiling.record import ProfileKey, ProfileRecord
from cfp.race.programs import RaceRow
from cfp.settings import ConstraintLevel, defaults_of
from cfp_test.gpu import equal, plans, suite
from cfp_test.gpu.equal import check_held, compile_choice, subject_of
from cfp_test.gpu.page import page, versions
from cfp_test.gpu.place import ON_CPUS, Failed, Place
from cfp_test.gpu.planted import FAULTS
from cfp_test.gpu.suite import (
    CHECKS,
    FAILED,
    NOT_RUN,
    PARTS,
    PASSED,
    Outcome,
    function_of,
    run_check,
    run_planted,
)

BEST_PRESET = "best preset"


@pytest.fixture
def place(tmp_path):
    """Two of the devices."""
    made = Place(tmp_path)
    made.__dict__["devices"] = jax.devices()[:2]
    return made


@dataclass(frozen=True)
class Scripted(Place):
    """Runs a piece of Python in place of a check."""

    code: str = ""

    def command(self, part):
        return [sys.executable, "-c", self.code]


def test_each_check_is_there_and_each_fault_has_one():
    for name in (*CHECKS, *PARTS):
        assert callable(function_of(name))
    assert {fault.check for fault in FAULTS.values()} <= CHECKS.keys()


@pytest.mark.parametrize(
    ("code", "outcome", "said"),
    [
        ("""print('{"outcome": "passed", "said": "1.00"}')""", PASSED, "1.00"),
        ("""print('{"outcome": "FAILED", "said": "2.00"}')""", FAILED, "2.00"),
        ("import os; os.abort()", FAILED, "it died (-6)"),
        ("raise ValueError('a fault of the check')", FAILED, "a fault of the check"),
        ("import time; time.sleep(100_000)", FAILED, "no end after 0 s"),
    ],
)
def test_a_check_that_dies_or_hangs_has_failed(tmp_path, code, outcome, said):
    seconds = 0.1 if "sleep" in code else 1200.0
    found = run_check(BEST_PRESET, Scripted(tmp_path, code=code), 2, seconds)
    assert found.outcome == outcome
    assert said in found.said


def test_what_is_timed_runs_after_all_else_and_alone():
    names, ran = [*CHECKS], []

    def run(name):
        ran.append(name)
        return Outcome(name=name, what="", outcome=PASSED, said="", seconds=0.0)

    found = [one.name for one in suite.run_all(names, run, names)]
    timed = [name for name in names if CHECKS[name].timed]
    assert {*found} == {*names} and found[-len(timed) :] == timed == ran[-len(timed) :]


def test_a_check_for_which_no_time_is_left_has_failed(tmp_path):
    found = run_check(BEST_PRESET, Scripted(tmp_path), 2, -1.0)
    assert found.outcome == FAILED and "no time was left" in found.said


def test_what_takes_more_devices_is_not_run(tmp_path):
    place = Scripted(tmp_path, code="raise ValueError")
    assert run_check(BEST_PRESET, place, 1, 60.0).outcome == NOT_RUN
    assert run_planted("spec", place, 1, 60.0).outcome == NOT_RUN


@pytest.mark.parametrize(
    ("outcome", "said", "verdict"),
    [
        (FAILED, "each device has 1.00 of the state", PASSED),
        # It failed of something else; or did not.
        (FAILED, "it died (-6)", FAILED),
        (PASSED, "of the state", FAILED),
    ],
)
def test_a_fault_is_caught_by_what_is_for_it(
    monkeypatch, tmp_path, outcome, said, verdict
):
    def found(name, place, devices, seconds):
        assert (name, *place.words) == ("gpt under presets", "--plant", "spec")
        return Outcome(name=name, what="", outcome=outcome, said=said, seconds=1.0)

    monkeypatch.setattr(suite, "run_check", found)
    assert run_planted("spec", Place(tmp_path), 2, 60.0).outcome == verdict


def test_the_page():
    rows = [
        Outcome(name=name, what="w", outcome=outcome, said="a | b\nc", seconds=2.0)
        for name, outcome in (("one", PASSED), ("two", FAILED), ("three", NOT_RUN))
    ]
    text = page("make test-gpu", {"links": "GPU0\nGPU1", **versions()}, rows)
    assert text.startswith("# cfp on GPUs: 1 passed, 1 FAILED, 1 not run, 6 s\n")
    assert "| **two**: w | FAILED | 2 | a \\| b c |\n" in text
    assert "- links:\n\n```\nGPU0\nGPU1\n```\n" in text
    assert f"jax {jax.__version__}" in text
    assert "# cfp on GPUs: 1 passed, 2 s\n" in page("", {}, rows[:1])


@pytest.mark.parametrize(
    ("ratios", "slower"),
    [
        ([1.05] * 12, True),
        ([1.05] * 11 + [0.9], True),
        # A share of the turns that chance has now and then; and too little to matter.
        ([1.05] * 8 + [0.95] * 4, False),
        ([1.01] * 12, False),
        ([0.5] * 12, False),
    ],
)
def test_slower_is_what_chance_does_not_explain(ratios, slower):
    best = [10.0 + turn for turn in range(12)]
    own = [ratio * time for ratio, time in zip(ratios, best, strict=True)]
    assert plans.is_slower(own, best) == slower


def test_presets_are_found_in_a_race_with_whatever_options_they_ran():
    names = {
        "planned, large collectives": 1.0,
        "zero1, large collectives, Triton": 2.5,
        "fully_sharded, rematerialized": 2.0,
        "fully_sharded, arguments constrained": 4.0,
        "zero1, large collectives, arguments constrained": 3.0,
        "data_parallel": 5.0,
    }
    race = [RaceRow(name=n, predicted_ms=ms, time_ms=ms) for n, ms in names.items()]
    found = [plans.parts_of(row.name) for row in plans._best_presets(race)]
    rules = defaults_of("gpu")
    large, shared = rules.compiler_options["large collectives"], rules.shared_options
    assert len(large) == 3
    everything, _, arguments = ConstraintLevel
    assert found == [
        ("zero1", everything, large),
        ("zero1", arguments, large | shared),
    ]
    assert plans.parts_of("fully_sharded") == ("fully_sharded", everything, shared)


def test_kernels_are_held_to_an_oracle_of_its_own(place, monkeypatch):
    assert equal._distance("xla", "causal", "", place) < 1e-5
    assert equal._distance("chunked", "packed", "ring", place) < 1e-5
    FAULTS["mask"].plant(monkeypatch.setattr)
    assert equal._distance("xla", "causal", "", place) > 0.1


def test_presets_are_held_to_one_device_and_to_their_share(place, monkeypatch):
    sizes = {**ON_CPUS.models["gpt"], "layers": 1}
    subject = subject_of("gpt", sizes, place)
    named = presets(subject.analysis.frame)
    allowed = subject.allowed()

    def check(way, choice):
        compiled = compile_choice(subject, choice)
        check_held("gpt", way, subject, compiled)
        equal._compare("gpt", subject, compiled, allowed)

    check("fully_sharded", named["fully_sharded"])
    FAULTS["spec"].plant(monkeypatch.setattr)
    with pytest.raises(Failed, match="of the state"):
        check("fully_sharded", named["fully_sharded"])


def test_records_of_another_device_have_other_keys(monkeypatch):
    parts = (("ops", "dot"), ("device_kind", "cpu"))
    record = ProfileRecord(
        key=ProfileKey(parts).digest, parts=parts, status="ok", samples_ms=(10.0,)
    )
    other = plans._of_another(record)
    assert other.key != record.key and other.samples_ms == (1.0,)
    FAULTS["store"].plant(monkeypatch.setattr)
    record = replace(record, key=ProfileKey(parts).digest)
    assert plans._of_another(record).key == record.key


def test_a_budget_is_taken_for_more(monkeypatch):
    from cfp import passes

    FAULTS["budget"].plant(monkeypatch.setattr)
    assert passes.parse_bytes(None) is None
    assert passes.parse_bytes("1GB") == 2 * 10**9

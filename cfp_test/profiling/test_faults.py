"""Profiling from the outside, while processes die, hang and share a store."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore
from cfp_test.cli.cli_runner import ROOT, environment
from cfp_test.support.at_work import at_work, of_living
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import end_of, has_taken, running, until

TOY = f"{ROOT / 'cfp_test' / 'cli' / 'toy_targets.py'}:toy"
ON_CPU = ("--platform", "cpu", "--devices", "4", "--quick", "--workdir", ".")
FEW = ("--per-kind", "6")
SEED = 1


def begin(
    folder: Path,
    *words: str,
    faults: dict[str, str] | None = None,
    python: str = sys.executable,
):
    """Runs a command that logs what it runs and keeps, for as long as the body."""
    folder.mkdir(exist_ok=True)
    variables = {"FAULT_LOG": str(folder / "log"), "FAULTS": json.dumps(faults or {})}
    command = [python, "-m", "cfp_test.cli.faulty", *words]
    return running(command, folder, environment(**variables))


def begin_quick(folder: Path, *words: str, faults: dict[str, str] | None = None):
    """Runs a command whose start is quick; `kill_command` kills it."""
    return begin(folder, *words, faults=faults, python=quick_python())


PROFILE = ("profile", TOY, *ON_CPU, *FEW, "--quiet")


def profile(folder: Path):
    return begin_quick(folder, *PROFILE)


def finish(command: AbstractContextManager[subprocess.Popen[str]]) -> tuple[str, str]:
    """Returns the output of a command, which must end well."""
    with command as process:
        out, err = end_of(process)
    assert process.returncode == 0, err
    return out, err


def records(folder: Path) -> dict[str, ProfileRecord]:
    with ProfileStore(folder / "profiles.sqlite") as store:
        return {record.key: record for record in store.records()}


def statuses(folder: Path) -> dict[str, str]:
    return {key: record.status for key, record in records(folder).items()}


def is_rate(record: ProfileRecord) -> bool:
    return "what" in dict(record.parts)


def events(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "log").read_text().splitlines()]


def measured_again(folder: Path) -> list[str]:
    """Keys that ran, or were written, after their record had been written."""
    stored, again = set(), []
    for event, key in events(folder):
        again += [key] if key in stored else []
        stored |= {key} if event == "put" else set()
    return again


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(profile(folder))
    found = statuses(folder)
    assert Counter(found.values()) == {"ok": len(found)}
    assert Counter(events(folder)[i][0] for i in range(len(events(folder)))) == {
        "run": len(found),
        "put": len(found),
    }
    assert at_work(folder) == {}
    return folder


def with_rates(undisturbed: Path, folder: Path) -> Path:
    """A folder whose store has rates only: what is wanted follows from them."""
    with ProfileStore(folder / "profiles.sqlite") as store:
        store.put_all([r for r in records(undisturbed).values() if is_rate(r)])
    return folder


def kill_command(folder: Path) -> bool:
    """Ends the process that attends to the one at work; False if that is at its end.

    What begins quickly is not the process that was started.
    """
    for owner in of_living(folder):
        pid = owner.partition(":")[0]
        state = Path(f"/proc/{pid}/stat").read_text()
        os.kill(int(state.rpartition(")")[2].split()[1]), signal.SIGKILL)
        return True
    return False


def kill_at_random_moments(folder: Path, times: int) -> None:
    """Profiles, and ends the whole command again and again, with SIGKILL.

    After some runs and records, or when it begins to look things up: all before is
    start-up.
    """
    moments = random.Random(SEED)
    (folder / "log").touch()
    killed = 0
    for _ in range(times):
        last = len(events(folder)) + moments.randint(0, 3)
        with profile(folder) as process:
            hits = list[bool]()

            def struck(process=process, last=last, hits=hits) -> bool:
                if len(events(folder)) >= last and of_living(folder):
                    hits.append(kill_command(folder))
                return any(hits) or process.poll() is not None

            until(struck)
            # Everything may be measured before the last of twenty.
            killed += any(hits)
            process.wait()
            # What it started ends by itself.
            until(lambda: not of_living(folder))
    assert killed >= 1
    finish(profile(folder))


def check_like(undisturbed: Path, folder: Path) -> None:
    assert statuses(folder) == statuses(undisturbed)
    assert measured_again(folder) == []
    assert at_work(folder) == {}


def test_killed_and_started_again(undisturbed, tmp_path):
    kill_at_random_moments(with_rates(undisturbed, tmp_path), times=2)
    check_like(undisturbed, tmp_path)


@pytest.mark.nightly
def test_killed_twenty_times_from_an_empty_store(undisturbed, tmp_path):
    kill_at_random_moments(tmp_path, times=20)
    rates = {k for k, r in records(undisturbed).items() if is_rate(r)}
    found = statuses(tmp_path)
    # Other rates, other strategies: but as many, and none of them to blame.
    assert rates <= found.keys()
    assert Counter(found.values()) == {"ok": len(statuses(undisturbed))}
    assert measured_again(tmp_path) == []


def test_each_failure_is_recorded_and_the_search_completes(undisturbed, tmp_path):
    faults = {
        "segment 0: 2": "abort",
        "segment 0: 3": "kill",
        "segment 0: 4": "overdue",
        "segment 0: 5": "memory",
        "segment 0: 6": "exit",
    }
    folder = with_rates(undisturbed, tmp_path)
    command = ("plan", TOY, *ON_CPU, *FEW, "--measure", "--run-timeout", "600")
    out, err = finish(begin_quick(folder, *command, faults=faults))
    failed = [r for r in records(folder).values() if not r.ok]
    reasons = sorted((r.status, r.reason) for r in failed)
    assert reasons == [
        ("crashed", "the process died 2 times while running it"),
        ("crashed", "the process ended by SIGABRT while running it"),
        ("crashed", "the process ended with exit code 3 while running it"),
        ("out_of_memory", reasons[3][1]),
        ("timeout", "no end after 600 s while running it"),
    ]
    assert "RESOURCE_EXHAUSTED" in reasons[3][1]
    assert "Race" in out
    for label in list(faults)[:3]:
        assert re.search(
            f"{label} of jit_train_step is left out: (crashed|timeout): ", err
        ), err
    assert at_work(folder) == {}

    # Nothing that failed is tried again unless asked; then it is, and mended.
    before = len(events(folder))
    finish(begin_quick(folder, *command, faults=faults))
    assert len(events(folder)) == before
    two = {label: faults[label] for label in list(faults)[:2]}
    finish(begin_quick(folder, *command, "--retry-failures", "--no-race", faults=two))
    assert Counter(statuses(folder).values())["crashed"] == 2
    before = len(events(folder))
    failed = [r for r in records(folder).values() if not r.ok]
    finish(begin_quick(folder, *command, "--retry-failures", "--no-race"))
    assert set(statuses(folder).values()) == {"ok"}
    ran = {key for event, key in events(folder)[before:] if event == "run"}
    assert ran >= {record.key for record in failed}


def test_two_processes_share_the_work(undisturbed, tmp_path):
    folder = with_rates(undisturbed, tmp_path)
    # The other one has another seed of hashes.
    with profile(folder) as one, begin(folder, *PROFILE) as other:
        for process in (one, other):
            out, err = finish(nullcontext(process))
            assert "6 strategies measured" in out or "from the cache" in out
            assert err == ""
    assert statuses(tmp_path) == statuses(undisturbed)
    kinds = Counter(map(tuple, events(tmp_path)))
    assert set(kinds.values()) == {1}
    check_like(undisturbed, tmp_path)


def test_a_child_dies_with_its_parent_and_is_not_blamed(undisturbed, tmp_path):
    faults = {"segment 0: 1": "sleep"}
    folder = with_rates(undisturbed, tmp_path)

    def runs() -> bool:
        every = of_living(folder).values()
        return [one.doing for mine in every for one in mine] == ["run"]

    with begin_quick(tmp_path, "profile", TOY, *ON_CPU, *FEW, faults=faults) as parent:
        until(runs, parent)
        assert kill_command(folder)
        assert parent.wait() == -signal.SIGKILL
        until(lambda: not at_work(folder))
    _, err = finish(profile(folder))
    assert err == ""
    assert set(statuses(tmp_path).values()) == {"ok"}


@pytest.mark.parametrize("twice", [False, True])
def test_interrupting_the_parent(undisturbed, tmp_path, twice):
    # Nothing in the process that hangs can be interrupted.
    faults = {"segment 0: 3": "hang" if twice else "sleep"}
    folder = with_rates(undisturbed, tmp_path)

    def at_it() -> bool:
        found = [one for mine in of_living(folder).values() for one in mine]
        return any(m.doing == "run" and m.label in faults for m in found)

    start = begin if twice else begin_quick
    with start(tmp_path, "profile", TOY, *ON_CPU, *FEW, faults=faults) as parent:
        until(at_it, parent)
        parent.send_signal(signal.SIGINT)
        if twice:  # Of two that it has not taken note of yet one would be lost.
            until(lambda: has_taken(parent, signal.SIGINT))
            parent.send_signal(signal.SIGINT)
        _, err = end_of(parent)
    assert parent.returncode == 130, err
    assert "kept in profiles.sqlite" in err
    assert "Traceback" not in err
    good = [r for r in records(tmp_path).values() if not is_rate(r)]
    assert [record.status for record in good] == ["ok", "ok"]

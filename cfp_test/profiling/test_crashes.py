"""Logs of operations, and what those of dead processes tell."""

import json
import os
import signal
import subprocess
from dataclasses import asdict, replace
from typing import IO

import pytest

from cfp.profiling import crashes, in_flight
from cfp.profiling.crashes import ProcessEnd, record_crashes
from cfp.profiling.files import lock_file
from cfp.profiling.in_flight import (
    InFlight,
    InFlightFolder,
    InFlightLog,
    Limits,
    ProcessInFlight,
    write_whole,
)
from cfp.profiling.key import ProfileKey
from cfp.profiling.record import ProfileRecord, utc_now
from cfp.profiling.store import ProfileStore
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import GUARD_SECONDS, until

PID = 12345
SINCE = "2026-01-02T03:04:05+00:00"
HALF_PAST = "2026-01-02T03:04:05.500000+00:00"


def key_of(name: str) -> ProfileKey:
    return ProfileKey((("name", name), ("mesh", "x=4")))


def mark(name: str, doing="run", **changes) -> InFlight:
    fields = {
        "parts": key_of(name).parts,
        "label": f"task {name}",
        "doing": doing,
        "since": SINCE,
        "limit_seconds": 60.0,
        "deadline": 1e9,
    }
    return InFlight(**{**fields, **changes})


def leave(
    store: ProfileStore, *operations: InFlight, words: str = "", **changes
) -> None:
    """Leaves what a process that died in these operations leaves."""
    folder = InFlightFolder(store.path)
    folder.path.mkdir(exist_ok=True)
    process = ProcessInFlight(
        name=f"{PID}-0", pid=PID, witnessed=True, operations=operations
    )
    # More than ever: the test may run where the kernel has ended something before.
    process = replace(process, **{"oom_kills": 1 << 40, **changes})
    write_whole(folder.path / f"{process.name}.json", asdict(process))
    (folder.path / f"{process.name}.alive").write_text(words)


def failures(store: ProfileStore) -> list[tuple[str, str, str]]:
    return [(dict(r.parts)["name"], r.status, r.reason) for r in store.records()]


def suspected(store: ProfileStore) -> dict[str, int]:
    names = {key_of(name).digest: name for name in "abc"}
    found = InFlightFolder(store.path).suspects()
    return {names[key]: suspicion.crashes for key, suspicion in found.items()}


def killed_by(number: int, *, overdue: bool = False) -> dict[int, ProcessEnd]:
    return {PID: ProcessEnd(status=number, overdue=overdue)}


def exited(code: int) -> dict[int, ProcessEnd]:
    return {PID: ProcessEnd(status=code << 8)}


ABORTED = "Fatal Python error: Aborted\n\nCurrent thread 0x1"
WORDS = "Fatal Python error: Aborted while running it"


@pytest.mark.parametrize(
    ("left", "words", "changes", "ended", "status", "reason"),
    [
        ([mark("a")], ABORTED, {}, None, "crashed", WORDS),
        # What waits has done nothing; what is built beside a run neither.
        (
            [mark("b", "wait"), mark("a"), mark("c", "build")],
            ABORTED,
            {},
            None,
            "crashed",
            WORDS,
        ),
        (
            [mark("a", "build"), mark("b", "wait")],
            "",
            {},
            killed_by(signal.SIGSEGV),
            "crashed",
            "the process ended by SIGSEGV while compiling it",
        ),
        (
            [mark("a")],
            "",
            {},
            exited(0),
            "crashed",
            "the process ended with exit code 0 while running it",
        ),
        (
            [mark("a")],
            "",
            {},
            killed_by(signal.SIGKILL, overdue=True),
            "timeout",
            "no end after 60 s while running it",
        ),
        # It noted that by itself, and it was ended by hand, or its parent did.
        (
            [mark("a", overdue=True)],
            "",
            {},
            None,
            "timeout",
            "no end after 60 s while running it",
        ),
        # Of several builds, that which is overdue.
        (
            [mark("b", "build"), mark("a", "build", overdue=True)],
            "",
            {},
            killed_by(signal.SIGKILL, overdue=True),
            "timeout",
            "no end after 60 s while compiling it",
        ),
        (
            [mark("a")],
            "",
            {"oom_kills": -1},
            killed_by(signal.SIGKILL),
            "out_of_memory",
            "the machine's memory was used up, and the kernel ended the process "
            "while running it",
        ),
    ],
)
def test_what_a_process_died_of(
    store, caplog, left, words, changes, ended, status, reason
):
    leave(store, *left, words=words, **changes)
    [crash] = record_crashes(store, ended)
    assert failures(store) == [("a", status, reason)]
    assert crash.pid == PID
    assert crash.record == store.records()[0]
    assert "task a is left out" in caplog.text
    assert record_crashes(store) == []


def test_what_was_ended_from_outside_is_not_blamed(store, caplog):
    for _ in range(5):
        leave(store, mark("a"))
        [crash] = record_crashes(store)
        assert [m.label for m in crash.suspects] == ["task a"]
    assert store.records() == []
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("changes", "ended"),
    # No crash record could be written; or the parent saw this process killed alone.
    [({"witnessed": False}, None), ({}, killed_by(signal.SIGKILL))],
)
@pytest.mark.parametrize("kept", [None, "ok", "crashed"])
def test_the_second_unexplained_death_is_one_too_many(store, changes, ended, kept):
    before = "2026-01-02T03:04:04+00:00"
    if kept:
        # It was measured long ago, and is tried again, or raced.
        key = key_of("a")
        samples_ms = (1.0,) if kept == "ok" else ()
        store.put(
            ProfileRecord(
                key=key.digest,
                parts=key.parts,
                status=kept,
                reason="long ago",
                samples_ms=samples_ms,
                created=before,
            )
        )
    leave(store, mark("a"), **changes)
    record_crashes(store, ended)
    assert [r.reason for r in store.records()] == (["long ago"] if kept else [])
    assert suspected(store) == {"a": 1}
    leave(store, mark("a"), **changes)
    record_crashes(store, ended)
    reason = "the process died 2 times while running it"
    assert failures(store) == [("a", "crashed", reason)]
    assert suspected(store) == {}


@pytest.mark.explained("A process died, trying again")
def test_several_builds_are_suspects(store, caplog):
    builds = [mark("a", "build"), mark("b", "build")]
    leave(store, *builds, words=ABORTED)
    [crash] = record_crashes(store)
    assert crash.record is None
    assert store.records() == []
    assert suspected(store) == {"a": 1, "b": 1}
    assert "was compiling task a; compiling task b. Trying again" in caplog.text
    # One of them was measured since.
    store.put(
        ProfileRecord(
            key=key_of("b").digest,
            parts=key_of("b").parts,
            status="ok",
            samples_ms=(1.0,),
        )
    )
    record_crashes(store)
    assert suspected(store) == {"a": 1}


@pytest.mark.parametrize(
    ("since", "created", "kept"),
    [
        (SINCE, SINCE, "ok"),
        (SINCE, "2026-01-02T03:04:04+00:00", "crashed"),
        # Within one second.
        (HALF_PAST, HALF_PAST, "ok"),
        (HALF_PAST, "2026-01-02T03:04:05.500001+00:00", "ok"),
        (HALF_PAST, "2026-01-02T03:04:05.499999+00:00", "crashed"),
        # One of the two by an earlier version, to the second.
        (SINCE, HALF_PAST, "ok"),
        (HALF_PAST, SINCE, "crashed"),
        (HALF_PAST, "2026-01-02T03:04:06+00:00", "ok"),
    ],
)
def test_a_record_made_since_tells_that_it_did_not_die_of_it(
    store, since, created, kept
):
    key = key_of("a")
    record = ProfileRecord(
        key=key.digest,
        parts=key.parts,
        status="ok",
        samples_ms=(1.0,),
        created=created,
    )
    store.put(record)
    leave(store, mark("a", since=since), words=ABORTED)
    record_crashes(store)
    assert [r.status for r in store.records()] == [kept]


def test_what_was_measured_right_before_is_no_alibi(store):
    """Moments of records and of operations are distinguished within a second."""
    key = key_of("a")
    record = ProfileRecord(
        key=key.digest, parts=key.parts, status="ok", samples_ms=(1.0,)
    )
    store.put(record)
    until(lambda: utc_now() > record.created)
    with InFlightLog(store.path) as log, log.doing(key, "task a", "run"):
        [alive] = log.folder.living()
    leave(store, *alive.operations, words=ABORTED)
    record_crashes(store)
    assert [r.status for r in store.records()] == ["crashed"]


@pytest.mark.parametrize("damage", ["", "[]", '{"operations": [{"parts": 3}]}', "{"])
def test_logs_that_cannot_be_read_blame_nothing(store, damage):
    leave(store, mark("a"), words=ABORTED)
    (InFlightFolder(store.path).path / f"{PID}-0.json").write_text(damage)
    [crash] = record_crashes(store)
    assert crash.suspects == ()
    assert store.records() == []
    assert record_crashes(store) == []


def test_living_processes_get_no_record(store):
    with (
        InFlightLog(store.path) as log,
        log.doing(key_of("a"), "task a", "run", 100.0),
    ):
        [alive] = log.folder.living()
        assert alive.pid == os.getpid()
        [made] = alive.operations
        assert (made.label, made.doing, made.limit_seconds) == ("task a", "run", 62.0)
        assert record_crashes(store) == []
        json_file = log.folder.path / f"{alive.name}.json"
        assert json.loads(json_file.read_text())["pid"] == os.getpid()
    left = [path.name for path in log.folder.path.iterdir()]
    assert left == ["lock"]


@pytest.mark.parametrize("moment", ["before its file is opened", "before the lock"])
def test_what_ends_meanwhile_is_neither_dead_nor_alive(store, monkeypatch, moment):
    owner = InFlightLog(store.path)
    owner.__enter__()
    claims = [key_of("a")]
    assert owner.claim(claims, 1) == claims

    def leaves(*_: object, **__: object) -> None:
        monkeypatch.undo()
        owner.__exit__()

    if moment == "before the lock":

        def lock(file: IO[bytes], *, wait: bool) -> bool | None:
            leaves()
            return lock_file(file, wait=wait)

        with owner.folder.locked():
            monkeypatch.setattr(in_flight, "lock_file", lock)
            assert owner.folder.dead() == []
    else:
        names = owner.folder._names()
        leaves()
        monkeypatch.setattr(owner.folder, "_names", lambda: names)
        assert owner.folder.living() == owner.folder.dead() == []
    assert record_crashes(store) == []


def test_two_processes_never_claim_the_same(store):
    keys = [key_of(name) for name in "abcd"]
    short = Limits(run_seconds=0.05)
    with InFlightLog(store.path, short) as one, InFlightLog(store.path) as other:
        assert one.claim(keys, 3) == keys[:3]
        assert other.claim(keys, 3) == keys[3:]
        one.release(keys[0])
        assert other.claim(keys, 3) == [keys[0], keys[3]]
        assert other.claim(keys[1:3], 3) == []
        # What hangs keeps no other waiting.
        with one.doing(keys[1], "task b", "run"):
            until(lambda: other.claim(keys[1:3], 3) == keys[1:3])


def test_what_takes_too_long_is_noted(store, caplog):
    limits = Limits(run_seconds=0.05)
    with InFlightLog(store.path, limits) as log:
        with log.doing(key_of("a"), "task a", "run"):
            until(lambda: log.folder.living()[0].operations[0].overdue)
        # It came to an end after all.
        assert log.folder.living()[0].operations == ()
    until(lambda: "task a: running for more than 0 s" in caplog.text)
    assert record_crashes(store) == []


def test_limits():
    limits = Limits(run_seconds=3.0, run_expected=10.0, build_seconds=7.0)
    assert limits.seconds("run", 500.0) == 8.0
    assert limits.seconds("build", 500.0) == 7.0
    assert limits.seconds("wait", 500.0) is None


PROGRAM = """
import os, sys
import jax
from cfp.profiling.builder import Built
from cfp.profiling.key import ProfileKey
from cfp.profiling.scheduler import run_tasks
from cfp.profiling.tasks import Task
from cfp.profiling.store import ProfileStore

compiled = jax.jit(lambda x: x).lower(1.0).compile()

def task(name):
    key = ProfileKey((("name", name), ("mesh", "x=4")))
    return Task(key=key, label=f"task {name}")

def build(task):
    return Built(key=task.key, compiled=compiled)

def run(task, built):
    if task.label == f"task {sys.argv[2]}":
        os.abort()
    return built.record("ok", samples_ms=[1.0])

with ProfileStore(sys.argv[1]) as store:
    run_tasks([task(name) for name in "abc"], store, build=build, run=run)
"""


def test_a_library_process_that_crashes_is_found_by_the_next(store):
    def go(fault: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [quick_python(), "-c", PROGRAM, str(store.path), fault],
            env={k: v for k, v in os.environ.items() if k != "PYTHONFAULTHANDLER"},
            capture_output=True,
            text=True,
            timeout=GUARD_SECONDS,
        )

    assert go("b").returncode == -signal.SIGABRT
    assert failures(store) == [("a", "ok", "")]
    again = go("b")
    assert again.returncode == 0, again.stderr
    assert "task b is left out: crashed" in again.stderr
    assert sorted(failures(store)) == [
        ("a", "ok", ""),
        ("b", "crashed", WORDS),
        ("c", "ok", ""),
    ]


def test_the_kernels_count_can_be_read():
    assert crashes.oom_kills() >= 0


def test_warnings_name_the_program_and_come_up_only_for_it(store, caplog):
    """All programs of a user share a store."""
    of_a = [mark("a", "build", program="train"), mark("b", "build", program="train")]
    leave(store, *of_a, words=ABORTED)
    record_crashes(store, about={key_of("c").digest})
    assert caplog.text == ""
    record_crashes(store, about={key_of("c").digest})
    assert caplog.text == ""
    record_crashes(store, about={key_of("a").digest, key_of("c").digest})
    assert "was compiling task a of train. Trying again" in caplog.text
    assert "task b" not in caplog.text


@pytest.mark.explained("A strategy is left out")
def test_what_is_left_out_is_named_where_it_would_have_been_measured(store, caplog):
    leave(store, mark("a", program="train"), words=ABORTED)
    record_crashes(store, about={key_of("c").digest})
    assert caplog.text == ""
    assert failures(store) == [("a", "crashed", WORDS)]
    leave(store, mark("b", program="train"), words=ABORTED)
    record_crashes(store, about={key_of("b").digest})
    assert "task b of train is left out: crashed" in caplog.text


def test_operations_have_their_program(store):
    with InFlightLog(store.path, program="train") as log:
        with log.doing(key_of("a"), "task a", "run"), log.folder.locked():
            [living] = log.folder.living()
    assert [(m.label, m.program) for m in living.operations] == [("task a", "train")]

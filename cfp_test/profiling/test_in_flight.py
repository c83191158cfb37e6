"""Operations of processes, and findings when one has died."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from cfp.cli import supervise
from cfp.profiling import tasks
from cfp.profiling.record import ProfileKey, ProfileRecord, utc_now
from cfp.profiling.tasks import InFlight, Limits, forget, is_late, settle
from cfp_test.support import at_work as support
from cfp_test.support.at_work import GONE, SINCE, alone, at_work
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import GUARD_SECONDS, until

OWNER = f"{GONE}:1"
leave = partial(support.leave, owner=OWNER)
ABORTED = "crashed", "the process ended by SIGABRT"


def key_of(name):
    return ProfileKey((("name", name), ("mesh", "x=4")))


def mark(name, doing="run", **changes):
    return support.operation(key_of(name), name, doing, **changes)


def failures(store):
    return [(dict(r.parts)["name"], r.status, r.reason) for r in store.records()]


def deaths(store):
    return {one.label: one.deaths for one in at_work(store).get("", ())}


def test_what_its_parent_knows_is_on_record_at_once(store, caplog):
    leave(store, mark("a", program="train"))
    assert [one.label for one in settle(store, GONE, ABORTED)] == ["task a"]
    reason = "the process ended by SIGABRT while running it"
    assert failures(store) == [("a", "crashed", reason)]
    assert at_work(store) == {}
    assert f"task a of train is left out: crashed: {reason}" in caplog.text


@pytest.mark.parametrize("several", [False, True])
def test_an_abort_of_one_of_several_processes_may_be_due_to_another(
    store, monkeypatch, several
):
    monkeypatch.setenv("CFP_JOIN", str(int(several)))
    child = subprocess.Popen([sys.executable, "-c", "import os; os.abort()"])
    support.leave(store, mark("a"), owner=f"{child.pid}:1")
    end = supervise._attend(child.pid, store)
    child.wait()
    assert end == (128 + signal.SIGABRT if several else None)
    reason = "the process ended by SIGABRT while running it"
    assert failures(store) == ([] if several else [("a", "crashed", reason)])
    assert deaths(store) == ({"task a": 1} if several else {})


def test_the_second_death_is_one_too_many(store):
    leave(store, mark("a"))
    assert settle(store) == []
    assert failures(store) == [] and deaths(store) == {"task a": 1}
    leave(store, mark("a"))
    settle(store)
    reason = "the process died 2 times while running it"
    assert failures(store) == [("a", "crashed", reason)]
    assert at_work(store) == {}


def test_what_was_overdue_is_on_record(store):
    leave(store, mark("a"), mark("b", "build", overdue=True))
    settle(store)
    assert failures(store) == [("b", "timeout", "no end after 60 s while compiling it")]


def test_what_a_parent_ended_since_it_was_late_is_on_record(store):
    """The process itself may have been unable to note it."""
    leave(store, mark("a", deadline=0.0))
    assert settle(store, GONE)
    assert failures(store) == [("a", "timeout", "no end after 60 s while running it")]


def test_of_several_builds_each_may_be_it(store):
    builds = [mark("a", "build"), mark("b", "build")]
    leave(store, *builds)
    assert len(settle(store, GONE, ABORTED)) == 2
    assert failures(store) == [] and deaths(store) == {"task a": 1, "task b": 1}
    with InFlight(store) as log:
        digests = [one.key for one in builds]
        assert log.at_once(digests, 8) == 1 and log.at_once(["another"], 8) == 8
    # Built one at a time, it is known.
    leave(store, builds[1])
    settle(store)
    assert [name for name, *_ in failures(store)] == ["b"]
    assert deaths(store) == {"task a": 1}


@pytest.mark.parametrize("created", [SINCE, utc_now()], ids=["since", "now"])
def test_a_record_made_since_tells_that_it_did_not_die_of_it(store, created):
    key = key_of("a")
    record = ProfileRecord(
        key=key.digest,
        parts=key.parts,
        status="ok",
        samples_ms=(1.0,),
        created=created,
    )
    leave(store, mark("a"))
    support.leave(store, mark("a", deaths=1))
    store.put(record)
    assert settle(store, GONE, ABORTED) == []
    assert store.get(key.digest) == record and at_work(store) == {}


def test_what_was_ended_from_outside_is_not_blamed(store):
    for _ in range(3):
        leave(store, mark("a"))
        forget(store, GONE)
        assert settle(store) == []
    assert failures(store) == [] and at_work(store) == {}


@pytest.mark.parametrize("owner", ["{}:1", "elsewhere:{}:1:a"])
def test_what_another_process_of_the_number_left_is_not_this_ones(store, owner):
    support.leave(store, mark("a"), owner=owner.format(os.getpid()))
    with InFlight(store):
        assert deaths(store) == {"task a": 1} and failures(store) == []


def test_living_processes_are_left_alone(store):
    with InFlight(store) as log, log.doing(key_of("a"), "task a", "run", 100.0):
        assert settle(store) == []
        [one] = alone(store)
        assert (one.label, one.doing, one.limit_seconds) == ("task a", "run", 62.0)
        assert not is_late(store, os.getpid())
    assert at_work(store) == {} and failures(store) == []


def test_what_takes_too_long_is_noted(store, caplog, monkeypatch):
    monkeypatch.setattr(tasks, "_WATCH_SECONDS", 0.02)
    with InFlight(store, Limits(run_seconds=0.05)) as log:
        with log.doing(key_of("a"), "task a", "run"):
            until(lambda: alone(store)[0].overdue)
            assert is_late(store, os.getpid())
        assert caplog.text.count("task a: running for more than") == 1


def test_limits():
    limits = Limits(run_seconds=3.0, run_expected=10.0, build_seconds=7.0)
    assert limits.seconds("run", 500.0) == 8.0
    assert limits.seconds("build", 500.0) == 7.0


PROGRAM = """
import os
import sys
import jax
from cfp.profiling.builder import Built
from cfp.profiling.jobs import run_jobs
from cfp.profiling.record import ProfileKey
from cfp.profiling.tasks import Task
from cfp.profiling.store import ProfileStore

compiled = jax.jit(lambda x: x).lower(1.0).compile()

def task(name):
    key = ProfileKey((("name", name), ("mesh", "x=4")))
    return Task(key=key, label=f"task {name}")

class Here:
    threads, tune, tuners, tuned, open_links = 1, None, 1, set(), None

    def build(self, task):
        return Built(key=task.key, compiled=compiled)

    def run(self, task, built):
        if task.label == f"task {sys.argv[2]}":
            os.abort()
        return built.record("ok", samples_ms=[1.0])

with ProfileStore(sys.argv[1]) as store:
    run_jobs(Here(), [task(name) for name in "abc"], store)
"""


@pytest.mark.explained("A strategy is left out")
def test_a_library_process_that_crashes_twice_is_found_by_the_next(store):
    def go(fault: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [quick_python(), "-c", PROGRAM, str(store.path), fault],
            capture_output=True,
            text=True,
            timeout=GUARD_SECONDS,
        )

    for _ in range(2):
        assert go("b").returncode == -signal.SIGABRT
        assert failures(store) == [("a", "ok", "")]
    again = go("b")
    assert again.returncode == 0, again.stderr
    assert "task b is left out: crashed" in again.stderr
    assert sorted(failures(store)) == [
        ("a", "ok", ""),
        ("b", "crashed", "the process died 2 times while running it"),
        ("c", "ok", ""),
    ]

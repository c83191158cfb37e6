import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest

from cfp.profiling import jobs
from cfp.profiling.builder import Built
from cfp.profiling.record import ProfileKey, ProfileRecord
from cfp.profiling.tasks import MeasureOptions, Progress, Task
from cfp.view.console import progress_text
from cfp_test.support.at_work import alone, at_work, leave, operation
from cfp_test.support.waiting import GUARD_SECONDS, until


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Task):
    """A task that says itself how it is built and run."""

    build: Callable[[], Built | ProfileRecord]
    run: Callable[[Built], ProfileRecord]


@dataclass(frozen=True)
class AnyPlace:
    """A place of work."""

    threads: int
    tune: None = None
    tuners: int = 1
    tuned: set[str] = field(default_factory=set)
    open_links: Callable[[Work, Built], object] | None = None

    def build(self, job: Work) -> Built | ProfileRecord:
        return job.build()

    def run(self, job: Work, built: Built) -> ProfileRecord:
        return job.run(built)

    def check(self, crash: ProfileRecord) -> None:
        assert crash.status == "crashed"


@dataclass(frozen=True)
class Ended:
    """Records of jobs, and the counts of the last progress."""

    records: dict[str, ProfileRecord]
    measured: int
    cached: int
    failed: int


def run_tasks(
    tasks,
    store,
    *,
    threads=1,
    open_links=None,
    retry_failures=False,
    progress=lambda event: None,
    **how,
) -> Ended:
    last, place = [], AnyPlace(threads, open_links=open_links)

    def tell(event):
        last[:] = [event]
        progress(event)

    options = MeasureOptions(retry_failures=retry_failures, progress=tell)
    found = jobs.run_jobs(place, tasks, store, options, **how)
    [end] = last
    return Ended(found, end.done - end.cached - end.failed, end.cached, end.failed)


def key_of(name: str) -> ProfileKey:
    return ProfileKey((("name", name),))


@pytest.fixture(scope="module")
def compiled():
    return jax.jit(jnp.negative).lower(1.0).compile()


@dataclass
class Workshop:
    """Builds and runs by name, and writes down what it did and when."""

    compiled: object
    times_ms: dict[str, float] = field(default_factory=dict)
    unbuildable: set[str] = field(default_factory=set)
    crashing: set[str] = field(default_factory=set)
    raising: dict[str, BaseException] = field(default_factory=dict)
    # What building and running begin with, by name.
    on_build: dict[str, Callable[[], object]] = field(default_factory=dict)
    on_run: dict[str, Callable[[], object]] = field(default_factory=dict)
    # Of each, so that what should not happen meanwhile would be seen.
    pause_seconds: float = 0.0
    built: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    most_waiting: int = 0
    overlapped: bool = False
    building: int = 0
    most_building: int = 0
    running: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def task(self, name: str) -> Work:
        return Work(
            key=key_of(name),
            label=f"task {name}",
            build=lambda: self._build(name),
            run=lambda built: self._run(name, built),
        )

    def tasks(self, names: str) -> list[Work]:
        return [self.task(name) for name in names]

    def _build(self, name: str) -> Built | ProfileRecord:
        assert threading.current_thread() is not threading.main_thread()
        with self.lock:
            self.building += 1
            self.most_building = max(self.most_building, self.building)
            self.overlapped |= self.running
        self.on_build.get(name, self._pause)()
        with self.lock:
            self.building -= 1
            self.overlapped |= self.running
            self.built.append(name)
            self.most_waiting = max(self.most_waiting, len(self.built) - len(self.ran))
        if name in self.raising:
            raise self.raising[name]
        key = key_of(name)
        if name in self.unbuildable:
            return ProfileRecord(
                key=key.digest,
                parts=key.parts,
                status="compile_error",
                reason=f"failure {len(self.built)}",
                build_seconds=0.5,
            )
        return Built(key=key, compiled=self.compiled, build_seconds=0.25)

    def _run(self, name: str, built: Built) -> ProfileRecord:
        assert threading.current_thread() is threading.main_thread()
        assert not self.running
        with self.lock:
            self.running = True
            self.overlapped |= self.building > 0
        self.on_run.get(name, self._pause)()
        with self.lock:
            self.running = False
        self.ran.append(name)
        if name in self.crashing:
            return built.record("crashed", reason="boom", run_seconds=1.0)
        time_ms = self.times_ms.get(name, 1.0)
        return built.record("ok", samples_ms=[time_ms], run_seconds=2.0)

    def _pause(self) -> None:
        time.sleep(self.pause_seconds)

    def ends(self) -> None:
        """Waits until no thread builds any more."""
        until(
            lambda: (
                not any(t.name.startswith("cfp-build") for t in threading.enumerate())
            )
        )


@pytest.fixture
def shop(compiled):
    return Workshop(compiled)


def digests(names: str) -> list[str]:
    return [key_of(name).digest for name in names]


def test_when_time_is_over_nothing_else_is_begun(compiled, store):
    shop, late = Workshop(compiled), threading.Event()
    shop.on_run["b"] = late.set
    found = run_tasks(shop.tasks("abcdef"), store, threads=2, is_late=late.is_set)
    assert shop.ran == ["a", "b"]
    assert {key_of(name).digest for name in "ab"} == found.records.keys()
    assert (found.measured, found.failed) == (2, 0)
    shop.ends()
    # What was not measured can be measured at once.
    again = run_tasks(shop.tasks("abcdef"), store)
    assert shop.ran == [*"abcdef"] and again.cached == 2


def test_what_waits_to_be_built_is_not_built_when_time_is_over(compiled, store):
    shop, late = Workshop(compiled), threading.Event()
    shop.on_build["a"] = late.set
    found = run_tasks(shop.tasks("abc"), store, threads=1, is_late=late.is_set)
    assert (shop.built, shop.ran, dict(found.records)) == (["a"], [], {})


def test_records_come_in_the_order_of_the_tasks(shop, store):
    summary = run_tasks(shop.tasks("cab"), store, threads=3)
    assert list(summary.records) == digests("cab")
    assert shop.ran == list("cab")
    assert all(record.ok for record in summary.records.values())
    assert (summary.measured, summary.cached, summary.failed) == (3, 0, 0)
    assert store.get_many(digests("abc")).keys() == summary.records.keys()


def test_suspects_are_built_one_at_a_time(shop, store):
    leave(store, operation(key_of("c"), "c", deaths=1))
    shop.pause_seconds = 0.005
    run_tasks(shop.tasks("abcde"), store, threads=4)
    assert shop.most_building == 1
    run_tasks(shop.tasks("c"), store)
    assert at_work(store) == {}


def test_what_another_process_is_at_is_waited_for(shop, store):
    events, other = [], ExitStack()
    assert other.enter_context(store.alone(digests("abc")))

    def tell(event: Progress) -> None:
        events.append((event.phase, event.label))
        if event.phase == "wait":
            assert shop.ran == []
            theirs = Built(key=key_of("a"), compiled=shop.compiled)
            store.put(theirs.record("ok", samples_ms=[5.0]))
            other.close()

    summary = run_tasks(shop.tasks("abc"), store, progress=tell)
    assert shop.ran == ["b", "c"]
    assert (summary.measured, summary.cached) == (2, 1)
    assert summary.records[key_of("a").digest].time_ms == 5.0
    assert events.count(("wait", "task a")) == 1


def test_another_process_is_not_waited_for_when_time_is_over(shop, store):
    late = threading.Event()

    def tell(event: Progress) -> None:
        if event.phase == "wait":
            late.set()

    with store.alone(digests("ab")):
        found = run_tasks(shop.tasks("ab"), store, is_late=late.is_set, progress=tell)
    assert late.is_set() and (shop.built, dict(found.records)) == ([], {})


def test_other_tasks_of_another_process_are_not_waited_for(store):
    """The least of many keys mostly begins with 0."""
    mine, theirs = (["0" * 62 + end, "f" * 64] for end in ("a1", "b2"))
    with store.alone(mine) as first, store.alone(theirs) as second:
        assert first and second


def test_another_process_that_hangs_is_not_waited_for_without_end(
    shop, store, monkeypatch
):
    monkeypatch.setattr(jobs, "_PATIENCE_SECONDS", 0.3)
    with store.alone(digests("ab")):
        run_tasks(shop.tasks("ab"), store)
    assert shop.ran == ["a", "b"]


def test_equal_tasks_are_measured_once(shop, store):
    summary = run_tasks(shop.tasks("abaab"), store)
    assert list(summary.records) == digests("ab")
    assert sorted(shop.built) == ["a", "b"]
    assert summary.measured == 2


def test_failures_are_answered_too(shop, store):
    shop.unbuildable, shop.crashing = {"b"}, {"c"}
    first = run_tasks(shop.tasks("abc"), store)
    assert (first.measured, first.cached, first.failed) == (1, 0, 2)
    assert shop.ran == ["a", "c"]
    again = run_tasks(shop.tasks("abc"), store)
    assert (again.measured, again.cached, again.failed) == (0, 3, 0)
    assert [r.status for r in again.records.values()] == [
        "ok",
        "compile_error",
        "crashed",
    ]


def test_failures_are_tried_again_if_asked(shop, store):
    shop.unbuildable, shop.crashing = {"b"}, {"c"}
    run_tasks(shop.tasks("abc"), store)
    shop.crashing = set()
    shop.built.clear()
    again = run_tasks(shop.tasks("abc"), store, retry_failures=True)
    assert sorted(shop.built) == ["b", "c"]
    assert (again.measured, again.cached, again.failed) == (1, 1, 1)
    [_, b, c] = store.get_many(digests("abc")).values()
    assert c.ok
    # The newer reason has taken the older one's place.
    assert b.reason == again.records[b.key].reason != "failure 2"


def test_a_good_record_is_never_replaced_by_a_failure(shop, store):
    shop.crashing = {"a"}
    run_tasks(shop.tasks("a"), store)
    good = Built(key=key_of("a"), compiled=shop.compiled).record("ok", samples_ms=[1])

    def another_process(event):
        if event.phase == "run":
            store.put(good)

    summary = run_tasks(
        shop.tasks("a"), store, retry_failures=True, progress=another_process
    )
    assert summary.failed == 1
    assert store.get(good.key) == good


@pytest.mark.parametrize(("threads", "batch"), [(1, 1), (2, 7), (4, 10)])
def test_builds_and_runs_keep_apart(shop, store, threads, batch):
    shop.pause_seconds = 0.005
    names = "abcdefghijklmnopqrst"
    summary = run_tasks(shop.tasks(names), store, threads=threads)
    assert not shop.overlapped
    assert shop.ran == list(names)
    assert summary.measured == len(names)
    assert shop.most_waiting == batch


def test_links_are_opened_by_the_first_while_others_are_built(shop, store):
    """It counts as a run, which has less time than a build before it hangs."""
    opened, begun = threading.Event(), threading.Event()
    shop.on_build["b"] = lambda: (begun.set(), opened.wait(GUARD_SECONDS))
    did = []

    def open_links(task, built):
        assert begun.wait(GUARD_SECONDS)
        doing = {mark.label: mark.doing for mark in alone(store)}
        did.append((task.label, built.key, doing["task a"], [*shop.ran]))
        opened.set()

    tasks = shop.tasks("abc")
    how = {"threads": 2, "open_links": open_links}
    summary = run_tasks(tasks, store, **how)
    assert did == [("task a", key_of("a"), "run", [])]
    assert shop.ran == ["a", "b", "c"] and summary.measured == 3
    run_tasks(tasks, store, **how)
    assert len(did) == 1, "what is known opens nothing"


def test_what_could_not_be_built_opens_no_links(shop, store):
    shop.unbuildable = {"a"}
    opened = []
    how = {"open_links": lambda *_: opened.append(1)}
    summary = run_tasks(shop.tasks("ab"), store, threads=2, **how)
    assert not opened and summary.measured == 1


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        ("abcdefghijklmnop", [8, 8]),  # No batch of four after one of twelve.
        ("abcdefghijklmnopqrstu", [11, 10]),
    ],
)
def test_batches_are_of_one_size(shop, store, names, sizes):
    waiting = []

    def note(event):
        if event.phase == "run":
            waiting.append(len(shop.built) - len(shop.ran))

    run_tasks(
        shop.tasks(names),
        store,
        threads=3,
        progress=note,
    )
    assert waiting == [left for size in sizes for left in range(size, 0, -1)]


# ----------------------------------------------------------------------------- progress


def test_progress_adds_up(shop, store):
    run_tasks(shop.tasks("ax"), store)
    shop.times_ms = {"b": 5.0, "c": 0.5, "d": 3.0}
    shop.unbuildable, shop.crashing = {"e"}, {"f"}
    events = []
    summary = run_tasks(
        shop.tasks("abcdefa"),
        store,
        threads=2,
        progress=events.append,
    )
    assert {event.total for event in events} == {6}
    first, last = events[0], events[-1]
    assert (first.phase, first.done, first.cached, first.label) == ("look up", 1, 1, "")
    assert first.best_ms == 1.0
    assert last.done == last.total == len(summary.records)
    assert last.done == summary.measured + summary.cached + summary.failed
    assert (last.cached, last.failed) == (summary.cached, summary.failed) == (1, 2)
    assert last.best_ms == 0.5
    for before, after in pairwise(events):
        assert before.elapsed_seconds <= after.elapsed_seconds
        assert before.best_ms >= after.best_ms
        assert after.done - before.done == (1 if after.phase == "done" else 0)
    ran = [event.label for event in events if event.phase == "run"]
    assert ran == ["task b", "task c", "task d", "task f"]
    finished = [event.label for event in events if event.phase == "done"]
    assert finished == [f"task {name}" for name in "bcdef"]


# --------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("phase", ["build", "run", "done"])
def test_an_interrupt_keeps_what_was_measured(shop, store, phase):
    stopped = threading.Event()

    def stop(event):
        if event.phase == phase and event.label == "task c":
            stopped.set()
            raise KeyboardInterrupt

    if phase == "build":  # It is awaited.
        shop.on_build["c"] = lambda: until(stopped.is_set)

    with pytest.raises(KeyboardInterrupt):
        run_tasks(shop.tasks("abcdef"), store, progress=stop)
    measured = "abc" if phase == "done" else "ab"
    assert store.get_many(digests("abcdef")).keys() == set(digests(measured))
    shop.ran.clear()
    summary = run_tasks(shop.tasks("abcdef"), store)
    assert summary.cached == len(measured)
    assert shop.ran == list("abcdef")[len(measured) :]


def test_a_bug_passes_through_and_the_rest_is_kept(shop, store):
    shop.raising = {"c": AssertionError("a bug")}
    with pytest.raises(AssertionError, match="a bug"):
        run_tasks(shop.tasks("abcd"), store)
    assert store.get_many(digests("abcd")).keys() == set(digests("ab"))


def test_failures_to_build_are_kept_at_once(shop, store):
    shop.unbuildable = {"b", "c"}

    def stop(event):
        if event.phase == "run" and event.label == "task a":
            failed = set(digests("bc"))
            until(lambda: store.get_many(failed).keys() == failed)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tasks(shop.tasks("abc"), store, threads=3, progress=stop)
    assert store.get_many(digests("abc")).keys() == set(digests("bc"))


# ------------------------------------------------------------------------------ threads


def test_the_last_compile_says_that_it_alone_is_awaited(compiled, store, monkeypatch):
    monkeypatch.setattr(jobs, "_TELL_SECONDS", 0.0)
    shop, told, is_told = Workshop(compiled), [], threading.Event()
    shop.on_build["c"] = lambda: is_told.wait(GUARD_SECONDS)

    def progress(event):
        told.append(event)
        if (event.label, event.awaited) == (shop.task("c").label, 1):
            is_told.set()

    found = run_tasks(shop.tasks("abc"), store, threads=2, progress=progress)
    assert found.measured == 3 and is_told.is_set()
    text = progress_text(next(e for e in told if e.awaited == 1 and "c" in e.label))
    assert "waiting for 1 program to compile, 0:0" in text
    assert text.count("'") == 2, "the name is quoted"

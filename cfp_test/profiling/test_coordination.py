"""One process leads, another follows: here two threads with a channel between them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from cfp.errors import ProcessError
from cfp.profiling import coordination
from cfp.profiling.coordination import Coordination, Said, check_alike, coordinated


class Shared:
    """Messages of two processes."""

    def __init__(self):
        self.said = {}
        self.news = threading.Condition()


class End:
    """One process's end of a channel."""

    count = 2

    def __init__(self, process, shared):
        self.process, self.shared = process, shared

    def put(self, key, text):
        with self.shared.news:
            self.shared.said[key] = text
            self.shared.news.notify_all()

    def get(self, key, seconds):
        with self.shared.news:
            self.shared.news.wait_for(lambda: key in self.shared.said, seconds)
            return self.shared.said.get(key)

    def below(self, folder):
        begin = f"{folder}/"
        said = [*self.shared.said.items()]
        return {k.removeprefix(begin): t for k, t in said if k.startswith(begin)}

    def forget(self, folder):
        for key in self.below(folder):
            self.shared.said.pop(f"{folder}/{key}", None)


@pytest.fixture
def talks(monkeypatch):
    """Both ends; nothing is waited for long."""
    monkeypatch.setattr(coordination, "_LOOK_SECONDS", 0.01)
    shared = Shared()
    return [
        Coordination(End(n, shared), timeout_seconds=5.0, after_failure=0.3, epoch=1)
        for n in range(2)
    ]


def both(lead, follow):
    """Returns the outcomes of both, or their errors."""
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(lead), threads.submit(follow)]
        return [one.exception() or one.result() for one in made]


def said(talk):
    """Keys of messages that are there."""
    return [*talk.channel.shared.said]


def test_a_follower_does_what_it_is_told_until_the_end(talks):
    leader, follower = talks
    did, kept = [], []

    def lead():
        first = leader.say("double", 21)
        found = leader.answers(first)
        found += leader.answers(leader.say("double", 4))
        del first
        leader.broadcast("the plan")
        return found

    def double(number, value):
        did.append(value)
        follower.answer(number, 2 * value)

    found = both(lead, lambda: follower.follow({"double": double}, kept.append))
    assert found == [[42, 8], "the plan"]
    # The second is released once it is answered, the first where it is deleted.
    assert (did, kept) == ([21, 4], [{1}, {1, 2}, {3}])
    # Both are at the same point, and no message is left.
    assert leader.number == follower.number == 3
    assert said(leader) == []


def test_meshes_and_numbers_travel(talks):
    leader, follower = talks
    sent = jax.make_mesh((2,), ("x",), devices=jax.devices()[1:3]), 1 + 2j, "text"

    def lead():
        return leader.answers(leader.say("show", *sent)), leader.broadcast("")

    def show(number, *values):
        follower.answer(number, values == sent)

    assert both(lead, lambda: follower.follow({"show": show}, id)) == [([True], ""), ""]


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("theirs", [True, False])
def test_each_process_has_the_values_of_all(talks, ours, theirs):
    leader, follower = talks
    found = both(lambda: leader.gather(ours), lambda: follower.gather(theirs))
    assert found == [[ours, theirs]] * 2 and said(leader) == []


def run_of(talks, ours, theirs):
    """Both run what fails so: their outcomes, and what the follower ran."""
    leader, follower = talks
    ran = []

    def lead():
        job = leader.say("run")
        order = leader.order(job)
        for times in () if ours else (3, 1):
            order(times)
        order(0)
        leader.settle(job, ours)
        leader.broadcast("the plan")

    def run(number):
        ran.extend(() if theirs else follower.orders(number))
        return follower.answer(number, theirs) or theirs

    return *both(lead, lambda: follower.follow({"run": run}, id)), ran


def test_the_leader_says_how_often_to_run(talks):
    assert run_of(talks, "", "") == (None, "the plan", [3, 1])
    assert said(talks[0]) == []


def test_a_run_that_failed_in_all_is_a_failure_like_any_other(talks):
    assert run_of(talks, "no memory", "no room") == (None, "the plan", [])
    assert said(talks[0]) == []


def test_a_failed_run_does_not_shorten_the_next(talks):
    leader, follower = talks
    ran = []

    def lead():
        leader.settle(leader.say("fail"), "no memory")
        order = leader.order(job := leader.say("run"))
        time.sleep(2 * follower.after_failure)
        order(1), order(0)
        leader.settle(job, "")
        leader.broadcast("the plan")

    def fail(number):
        return follower.answer(number, "no room") or "no room"

    def run(number):
        ran.extend(follower.orders(number))
        return follower.answer(number, "")

    jobs = {"fail": fail, "run": run}
    assert both(lead, lambda: follower.follow(jobs, id)) == [None, "the plan"]
    assert ran == [1]


@pytest.mark.parametrize(("ours", "theirs"), [("", "no room"), ("no memory", "")])
def test_a_run_that_failed_in_one_process_ends_planning(talks, ours, theirs):
    error, other, _ = run_of(talks, ours, theirs)
    which = 1 if theirs else 0
    assert isinstance(error, ProcessError)
    assert f"failed in process {which}, and ran in the others" in str(error)
    assert ours + theirs in str(error)
    # No word of the leader's is to come: its devices may wait for this one's.
    assert isinstance(other, ProcessError)
    assert "Process 0 of 2 does not answer" in str(other)


def test_a_run_that_fails_while_the_other_waits_for_devices_says_why(talks):
    leader, _ = talks
    with pytest.raises(ProcessError, match="cannot go on without the others") as error:
        leader.settle(leader.say("run"), "no memory")
    assert "no memory. Process 1 of 2 does not answer" in str(error.value)


def test_processes_meet_where_they_are_started_alike(talks):
    leader, follower = talks
    facts = {"mesh": "x=2"}
    both(lambda: leader.meet(facts, 80), lambda: follower.meet(facts, 60))
    assert leader.hosts == follower.hosts and len(leader.hosts) == 2
    assert leader.least_bytes == follower.least_bytes == 60
    other = {"mesh": "x=4"}
    found = both(lambda: leader.meet(facts, 80), lambda: follower.meet(other, 60))
    for error in found:
        assert isinstance(error, ProcessError) and "differ in the mesh" in str(error)
        assert "x=2 in process 0; x=4 in process 1" in str(error)


def test_facts_that_one_process_has_are_compared():
    check_alike({"mesh": "x"}, {"mesh": "x"}, 1)
    for facts in ({}, {"mesh": "x", "kind": "H100"}):
        with pytest.raises(ProcessError, match=r"differ in the (mesh|kind)"):
            check_alike({"mesh": "x"}, facts, 2)


def test_what_ends_one_process_ends_the_other(talks, monkeypatch):
    leader, follower = talks

    def interrupted():
        monkeypatch.setattr(coordination, "talk_of", lambda _: follower)
        with coordinated(["a mesh"]):  # pyright: ignore
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    leader.epoch = follower.epoch
    with pytest.raises(ProcessError, match="Process 1 of this program has failed") as e:
        leader.answers(Said(1))
    assert "KeyboardInterrupt" in str(e.value)


def test_one_that_does_not_answer_is_named(talks):
    leader, _ = talks
    leader.timeout_seconds = 0.1
    began = time.monotonic()
    with pytest.raises(ProcessError, match=r"^Process 1 of 2 does not answer"):
        leader.answers(leader.say("anything"))
    assert time.monotonic() - began < 5.0

"""One process leads, another follows: here two threads with a channel between them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cfp.errors import ProcessError
from cfp.profiling import coordination
from cfp.profiling.coordination import END, Coordination, coordinated_planning
from cfp.profiling.processes import meet


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


def test_a_follower_does_what_it_is_told_until_the_end(talks):
    leader, follower = talks
    did, dropped = [], []

    def lead():
        number = leader.say("double", 21)
        found = leader.answers(number)
        leader.drop(leader.name(number))
        leader.say(END, "the plan")
        return found

    def double(number, value):
        did.append(value)
        follower.answer(number, 2 * value)

    found = both(lead, lambda: follower.follow({"double": double}, dropped.append))
    assert found == [[42], "the plan"]
    assert (did, dropped) == ([21], ["1.1"])
    # Both are at the same point, and what was answered is gone.
    assert leader.number == follower.number == 2
    assert [*leader.channel.shared.said] == ["cfp/1/2/job"]


def test_the_leader_sets_the_pace(talks):
    mine, theirs = (talk.pace(7) for talk in talks)
    found = both(lambda: [mine(0.25), mine(0.5)], lambda: [theirs(9.0), theirs(9.0)])
    assert found == [[0.25, 0.5]] * 2


def test_a_run_that_failed_in_all_is_a_failure_like_any_other(talks):
    leader, follower = talks
    found = both(
        lambda: leader.settle("no memory", 1), lambda: follower.settle("no room", 1)
    )
    assert found == [None, None]


@pytest.mark.parametrize(("ours", "theirs"), [("", "no room"), ("no memory", "")])
def test_a_run_that_failed_in_one_process_ends_planning(talks, ours, theirs):
    leader, follower = talks
    found = both(lambda: leader.settle(ours, 1), lambda: follower.settle(theirs, 1))
    which = 1 if theirs else 0
    for error in found:
        assert isinstance(error, ProcessError)
        assert f"failed in process {which}, and ran in the others" in str(error)
        assert ours + theirs in str(error)


def test_a_run_that_fails_while_the_other_waits_for_devices_says_why(talks):
    leader, follower = talks
    for number, one in enumerate((follower, leader), start=1):
        with pytest.raises(ProcessError, match="in this process of several") as error:
            one.settle("no memory", number)
        assert ": no memory. Process" in str(error.value)


def test_a_follower_in_a_run_hears_that_the_leader_failed_in_it(talks):
    leader, follower = talks
    leader._put("1/0", "no memory")
    with pytest.raises(coordination.LeaderFailed):
        follower.pace(1)(0.0)


def test_processes_meet_where_they_are_started_alike(talks):
    facts = {"mesh": "x=2"}
    assert both(*(lambda t=t: meet(t, facts, 80) for t in talks)) == [None, None]
    assert talks[0].hosts == talks[1].hosts and talks[0].least_bytes == 80
    found = both(*(lambda n=n: meet(talks[n], {"mesh": f"x={n}"}, 8) for n in (0, 1)))
    for error in found:
        assert "differ in the mesh" in str(error)
        assert ": x=0 in process 0; x=1 in process 1" in str(error)


def test_processes_at_other_points_find_out(talks):
    leader, follower = talks
    found = both(lambda: leader.gathered("a", 1), lambda: follower.gathered("b", 1))
    assert all("not at the same point" in str(error) for error in found)


def test_what_ends_one_process_ends_the_other(talks, monkeypatch):
    leader, follower = talks

    def interrupted():
        monkeypatch.setattr(coordination, "coordination", lambda: follower)
        with coordinated_planning(alone=False):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    leader.epoch = follower.epoch
    with pytest.raises(ProcessError, match="Process 1 of this program has failed") as e:
        leader.answers(1)
    assert "KeyboardInterrupt" in str(e.value)


def test_one_that_does_not_answer_is_named(talks):
    leader, _ = talks
    began = time.monotonic()
    with pytest.raises(ProcessError, match="Process 1 of 2 has not answered"):
        leader.answers(leader.say("anything"), 0.1)
    assert time.monotonic() - began < 5.0

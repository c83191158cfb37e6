"""Epochs of planning that processes hear of an interrupt in."""

import json

import pytest

from cfp.profiling import coordination
from cfp.profiling.coordination import coordinated_planning, interrupting_all


class Answering:
    """A channel of process 1 of 2; the other agrees with all that it says.

    Args:
        ends: whether Ctrl-C comes while this process waits for an answer.
    """

    process, count = 1, 2

    def __init__(self, ends=False):
        self.ends, self.said = ends, {}

    def put(self, key, text):
        self.said[key] = text

    def get(self, key, seconds):
        if self.ends:
            raise KeyboardInterrupt
        what = json.loads(self.said[key.replace("all", "1")])["what"]
        return json.dumps({"what": what, "value": None})

    def below(self, folder):
        return {}

    def failed(self):
        """The epochs in which it has failed."""
        return {int(k.split("/")[1]) for k in self.said if k.endswith("/failed/1")}


@pytest.fixture
def channel(monkeypatch):
    made = Answering()
    monkeypatch.setattr(coordination, "open_channel", lambda: made)
    return made


def plan(interrupted):
    with coordinated_planning(False), coordinated_planning(False):
        if interrupted:
            raise KeyboardInterrupt


def plan_all(*plans):
    with pytest.raises(KeyboardInterrupt), interrupting_all(False):
        for interrupted in plans:
            plan(interrupted)
        raise KeyboardInterrupt


def test_an_interrupt_within_a_plan_is_told_of_there_alone(channel):
    plan_all(False, True)
    assert channel.failed() == {2}
    # Who goes on is where the others are.
    plan(False)
    assert coordination.coordination().epoch == 3


def test_an_interrupt_between_plans_is_told_of_in_the_next(channel):
    plan_all(False)
    assert channel.failed() == {2}
    plan_all(True)
    plan_all()  # Another one, before any plan.
    assert channel.failed() == {2, 3, 4}


def test_an_interrupt_at_the_end_of_a_plan_is_told_of_in_both(channel):
    """The other may be past the end."""
    channel.ends = True
    plan_all(False)
    assert channel.failed() == {1, 2}

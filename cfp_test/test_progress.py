"""What is told while something is measured, where no terminal shows it."""

import io
import math
import time
from contextlib import redirect_stderr

import pytest

from cfp.cli import progress as room
from cfp.cli.progress import Display, PlainLines
from cfp.profiling.runner import Progress


def measuring(done: int, seconds: float) -> Progress:
    return Progress(
        done=done,
        cached=1,
        failed=0,
        total=9,
        best_ms=1.25 if done else math.inf,
        label=f"segment 0: {done}",
        phase="run",
        elapsed_seconds=seconds,
    )


@pytest.mark.smoke
def test_a_line_stands_at_each_beginning_and_every_half_minute():
    lines = PlainLines()
    told = {}
    for second in range(120):
        event = measuring(second // 10, second) if second < 80 else "compiling planned"
        if (line := lines.due(event, second)) is not None:
            told[second] = line
    assert told == {
        10: "cfp 0:10: measuring 1/9, 1 cached, running segment 0: 1, best 1.25 ms",
        40: "cfp 0:40: measuring 4/9, 1 cached, running segment 0: 4, best 1.25 ms, "
        "about 1:07 left",
        70: "cfp 1:10: measuring 7/9, 1 cached, running segment 0: 7, best 1.25 ms, "
        "about 0:23 left",
        80: "cfp 1:20: compiling planned",
        110: "cfp 1:50: compiling planned",
    }


def test_the_same_kind_of_work_is_one_phase():
    lines = PlainLines()
    events = ["compiling planned", "compiling zero1", "timing planned, turn 1 of 3"]
    told = [lines.due(event, 20.0 + i) for i, event in enumerate(events)]
    assert told == ["cfp 0:20: compiling planned", None, f"cfp 0:22: {events[2]}"]


@pytest.fixture(autouse=True)
def looked_at_often(monkeypatch):
    monkeypatch.setattr(room, "_LOOK_SECONDS", 0.01)


def at_once() -> PlainLines:
    return PlainLines(silent_seconds=0.0)


def test_without_a_terminal_lines_go_to_the_error_stream(capsys):
    stream = io.StringIO()
    with redirect_stderr(stream), Display(lines=at_once()) as display:
        display.tell("compiling planned")
        deadline = time.monotonic() + 60
        while "compiling planned\n" not in stream.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    told = stream.getvalue()
    with redirect_stderr(stream):
        time.sleep(0.05)
    assert stream.getvalue() == told
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("how", [{"quiet": True, "lines": at_once()}, {}])
def test_quiet_work_and_short_work_say_nothing(how):
    stream = io.StringIO()
    with redirect_stderr(stream), Display(**how) as display:
        display.tell("compiling planned")
        time.sleep(0.1)
    assert stream.getvalue() == ""


def test_an_error_stream_that_nobody_reads_ends_no_work():
    stream = io.StringIO()
    stream.close()
    with redirect_stderr(stream), Display(lines=at_once()) as display:
        display.tell("compiling planned")
        time.sleep(0.1)

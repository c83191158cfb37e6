"""Several real processes plan, run and check together; and end together."""

import itertools
import json
import math
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.errors import ProcessError
from cfp.passes import PlanOptions
from cfp.platform import Membership
from cfp.profiling.coordination import check_alike, is_follower
from cfp.variants import facts_of
from cfp_test.distributed.hosts_of_several import ROWS, WIDTH, numbers, train_step
from cfp_test.distributed.several import Ended, described, ends, run_all, start
from cfp_test.support.covering import at_night
from cfp_test.support.waiting import end_group

Begun = dict[tuple[str, str], list[subprocess.Popen[str]]]
Endings = dict[tuple[str, str], list[Ended]]
PROGRAM = ["-m", "cfp_test.distributed.programs_of_several"]
# What goes wrong, and in which process.
FAULTS = (("die-planning", "1"), ("raise-planning", "1"), ("other-program", "1"))
MORE_FAULTS = (
    ("die-compiling", "1"),
    ("die-step", "1"),
    ("die-planning", "0"),
    ("other-mesh", "1"),
    ("other-jax", "1"),
)
STEP = """
import jax, jax.numpy as jnp

def linear():
    def train_step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss
    w = jax.ShapeDtypeStruct((6, 6), jnp.float32)
    return train_step, (w, jax.ShapeDtypeStruct((12, 6), jnp.float32))
"""


def test_processes_with_unequal_devices_plan_and_run_alike(tmp_path):
    found = run_all(
        [*PROGRAM, str(tmp_path)], tmp_path, (2, 1), TEST_LOST_SECONDS="600"
    )
    assert [one.code for one in found] == [0, 0], described(found)
    said = [re.findall("(?:LOSS|PLAN) .*", one.out) for one in found]
    assert said[0] == said[1]
    *losses, plan = said[0]
    numbers = [float(text.split()[1]) for text in losses]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) == 3
    # What was measured is the same in both, to the last digit.
    assert re.fullmatch(
        r"PLAN data_parallel \(\(\(\), \(\)\), \(\('x',\), \(\)\)\) [\d.e-]+", plan
    )
    kept = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert kept[0] == "profiles.sqlite"


def test_state_is_sharded_within_each_of_two_hosts(tmp_path):
    program = ["-m", "cfp_test.distributed.hosts_of_several", str(tmp_path)]
    found = run_all(program, tmp_path, (2, 2))
    assert [one.code for one in found] == [0, 0], described(found)
    said = [re.findall("(?:LOSS|PLAN) .*", one.out) for one in found]
    assert said[0] == said[1]
    *losses, plan = said[0]
    w = jnp.asarray(numbers(WIDTH))
    for text in losses:
        w, loss = train_step(w, jnp.asarray(numbers(ROWS)))
        assert float(text.split()[1]) == pytest.approx(float(loss), rel=1e-5)
    # Weights are gathered within a host, and halves of the gradient summed across.
    size = 4 * WIDTH**2
    assert plan.startswith("PLAN (('y',), ())")
    assert f"('all-gather', 2, {size})" in plan
    assert f"('all-reduce', 2, {size // 2})" in plan


def begin(faults: Iterable[tuple[str, str]], make_folder: Callable) -> Begun:
    """Starts both processes for each that goes wrong; at once: most is waiting."""
    running = {}
    for fault in faults:
        folder = make_folder(fault[0])
        running[fault] = start([*PROGRAM, str(folder), *fault], folder, (1, 1))
    return running


def endings(running: Begun) -> Endings:
    """Ends of both processes, by what goes wrong."""
    return {fault: ends(one) for fault, one in running.items()}


@pytest.fixture(scope="module", autouse=True)
def begun(request, tmp_path_factory) -> Iterator[Begun]:
    """Starts them before the first test; those of their ends come last.

    Half a minute passes until a process that died is missed.
    """
    asked = {name for item in request.session.items for name in item.fixturenames}
    faults = FAULTS if "all_endings" in asked else ()
    running = begin(faults, tmp_path_factory.mktemp)
    yield running
    for process in itertools.chain.from_iterable(running.values()):
        end_group(process)


@pytest.fixture(scope="module")
def all_endings(begun) -> Endings:
    return endings(begun)


@pytest.fixture(scope="module")
def more_told(tmp_path_factory) -> Endings:
    return endings(begin(MORE_FAULTS, tmp_path_factory.mktemp))


def message(ended: Ended) -> str:
    """Returns what a process said of the error that ended it."""
    assert ended.code != 0, ended.out
    return ended.messages


def silent(text: str, process: int) -> bool:
    """Returns True if a text says that a process gave no sign of life any more."""
    ours = f"Process {process} of 2 has not answered"
    return ours in text or bool(
        re.search(rf"stopped sending heartbeats\):\s+{process}\b", text)
        or f"Task {process} heartbeat timeout" in text
    )


@pytest.mark.nightly
def test_a_process_that_dies_while_it_compiles(more_told):
    other, died = more_told["die-compiling", "1"]
    assert died.code == -9
    text = message(other)
    assert silent(text, 1)


@pytest.mark.nightly
def test_a_process_that_dies_in_a_step(more_told):
    other, died = more_told["die-step", "1"]
    assert died.code == -9 and "LOSS" in died.out
    text = message(other)
    assert "LOSS" in other.out and "PLAN" not in other.out
    assert "Gloo" in text or silent(text, 1)


@pytest.mark.explained("JAX distributed service detected fatal errors")
@pytest.mark.nightly
def test_the_coordinator_dies(more_told):
    died, other = more_told["die-planning", "0"]
    assert died.code == -9
    text = message(other)
    assert "JAX distributed service detected fatal errors" in text
    assert "the leader task was preempted/died/restarted unexpectedly" in text


@pytest.mark.parametrize("place", ["running", *at_night(["tracing"])])
def test_an_interrupt_between_variants_ends_all(place, tmp_path):
    command = ["-m", "cfp_test.distributed.variants_of_several", str(tmp_path), place]
    other, interrupted = run_all(command, tmp_path, (1, 1))
    assert "KeyboardInterrupt" in message(interrupted)
    assert "Process 1 of this program has failed, and so this one ends" in message(
        other
    )
    assert "KeyboardInterrupt" in message(other)
    assert "PLANNED" not in other.out + interrupted.out


def assert_both_tell(ended: list[Ended], what: str) -> None:
    for one in ended:
        text = message(one)
        assert f"The processes of this program differ in {what}: " in text
        assert re.search(r": .* in process 0; .* in process 1", text)
        assert "Start all alike: the same step" in text


@pytest.mark.nightly
def test_processes_that_differ_otherwise(more_told):
    assert_both_tell(more_told["other-mesh", "1"], "the mesh")
    assert_both_tell(more_told["other-jax", "1"], "the jax version")


def test_a_process_alone_with_a_time_budget_is_named():
    """The time left differs by their clocks, and process 0 says it."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    facts = [
        facts_of([mesh], PlanOptions(settings=cfp.PlannerSettings(seconds=seconds)))
        for seconds in (60.0, 59.5, math.inf)
    ]
    check_alike(facts[0], facts[1], 1)
    with pytest.raises(ProcessError, match="differ in the time budget: ") as error:
        check_alike(facts[1], facts[2], 1)
    assert "some in process 0; none in process 1" in str(error.value)
    # cfp need not be installed: it may be on PYTHONPATH.
    assert facts[0]["version of cfp"] == cfp.__version__


@pytest.mark.explained("There is no coordinator")
def test_a_process_without_a_coordinator(tmp_path):
    command = [*PROGRAM, str(tmp_path)]
    alone = start(command, tmp_path, (1, 1), only=[1], TEST_JOIN_SECONDS="2")
    [ended] = ends(alone)
    text = message(ended)
    assert re.search(r"There is no coordinator at localhost:\d+ within 2 s", text)
    assert "Start process 0 of 2" in text


@pytest.mark.explained("Not all processes of this program have come together")
@pytest.mark.nightly
def test_a_process_that_does_not_come(tmp_path):
    command = [*PROGRAM, str(tmp_path)]
    alone = start(command, tmp_path, (1, 1), only=[0], TEST_JOIN_SECONDS="2")
    [ended] = ends(alone)
    text = message(ended)
    assert "Not all 2 processes of this program have come together" in text
    assert "read the output of missing processes" in text


def run_words(folder, *words: str) -> list[str]:
    (folder / "steps.py").write_text(STEP)
    return ["-m", "cfp", *words[:1], "steps.py:linear", "--platform", "cpu", *words[1:]]


def test_commands_in_several_processes(tmp_path):
    more = {"CFP_CACHE_DIR": str(tmp_path / "cache"), "CFP_JOIN_SECONDS": "600"}
    more["CFP_LOST_SECONDS"] = "600"
    preset = ("--preset", "data_parallel", "--devices", "3", "--donate", "0")
    words = run_words(tmp_path, "plan", *preset, "--no-race", "-o", "plan.json")
    found = run_all(words, tmp_path, (1, 1), **more)
    assert [one.code for one in found] == [0, 0], described(found)
    assert "Saved plan.json" in found[0].out
    assert "Saved" not in found[1].out and "Plan" not in found[1].out
    plan = cfp.Plan.load(tmp_path / "plan.json")
    assert plan.mesh_axes == (("x", 3),) and plan.environment["processes"] == "2"
    check = ("--plan", "plan.json", "--steps", "2", "--check", "--json")
    found = run_all(run_words(tmp_path, "run", *check), tmp_path, (1, 1), **more)
    assert [one.code for one in found] == [0, 0], described(found)
    start_of_json = found[0].out.index("{")
    trial = json.loads(found[0].out[start_of_json:])
    assert trial["passed"] and len(trial["steps"]) == 2
    assert "passed" not in found[1].out


@pytest.mark.nightly
def test_commands_that_differ_in_their_devices(tmp_path):
    words = [
        run_words(tmp_path, "run", "--preset", "data_parallel", "--devices", count)
        for count in ("4", "2")
    ]
    script = "import os, sys; os.execv(sys.executable, [sys.executable, *eval("
    choose = f"{script}repr({words!r}))[int(os.environ['CFP_PROCESS_ID'])]])"
    found = run_all(["-c", choose], tmp_path, (1, 1), CFP_JOIN_SECONDS="600")
    text = message(found[0])
    assert "There are too few devices: " in text
    assert "here are 3 of platform cpu: 2 in process 0, 1 in process 1" in text
    assert "leaves out processes" in message(found[1])


@pytest.mark.explained("A program failed in this process of several")
def test_a_process_that_dies_while_it_measures(all_endings):
    other, died = all_endings["die-planning", "1"]
    assert died.code == -9
    assert silent(message(other), 1)
    if "A program failed in this process of several" in other.err:
        assert "Gloo" in other.err


@pytest.mark.explained("Process 1 of this program has failed, and so this one ends")
def test_a_process_that_fails_alone(all_endings):
    other, failed = all_endings["raise-planning", "1"]
    reason = "MemoryError: no room left in this process"
    assert reason in message(failed)
    # It says why, although its devices wait for the other's.
    assert "Process 1 of this program has failed, and so this one ends" in message(
        other
    )
    assert reason in message(other)


@pytest.mark.explained("The processes of this program differ")
def test_processes_with_other_programs(all_endings):
    assert_both_tell(all_endings["other-program", "1"], "the program")


VARIABLES = "CFP_COORDINATOR", "CFP_PROCESSES", "CFP_PROCESS_ID"


@pytest.mark.parametrize(
    ("given", "environment", "found"),
    [
        ((None, None, None), {}, None),
        ((None, None, None), dict.fromkeys(VARIABLES, ""), None),
        ((None, None, None), {"CFP_COORDINATOR": ""}, None),
        (("a:1", 2, None), {"CFP_PROCESS_ID": ""}, "process id missing"),
        (("a:1", 2, 0), {}, ("a:1", 2, 0)),
        (
            (None, None, None),
            {"CFP_COORDINATOR": "[::1]:9", "CFP_PROCESSES": "3", "CFP_PROCESS_ID": "2"},
            ("[::1]:9", 3, 2),
        ),
        (("a:1", None, 0), {"CFP_PROCESSES": "2"}, ("a:1", 2, 0)),
        (("a:1", 2, None), {}, "process id missing"),
        (("a", 2, 1), {}, "coordinator a, processes 2"),
        (("a:1", 2, 2), {}, "process id 2"),
        (("a:99999", 2, 1), {}, "coordinator a:99999"),
        ((None, None, None), {"CFP_PROCESSES": "two"}, "Expected a number"),
    ],
)
def test_which_process_this_is(given, environment, found):
    if isinstance(found, str):
        with pytest.raises(ProcessError, match=found):
            Membership.of(*given, environment)
        return
    member = Membership.of(*given, environment)
    assert (
        member is None
        if found is None
        else member
        == Membership(coordinator=found[0], processes=found[1], process_id=found[2])
    )


@pytest.mark.parametrize("value", [None, "", "0", "1"])
def test_without_a_process_id_a_process_is_the_first(monkeypatch, value):
    monkeypatch.delenv("CFP_PROCESS_ID", raising=False)
    if value is not None:
        monkeypatch.setenv("CFP_PROCESS_ID", value)
    assert is_follower() == (value == "1")

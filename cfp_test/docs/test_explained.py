"""Every message that docs/troubleshooting.md explains is produced by a test."""

import ast
import json
import os
import re
import signal
import subprocess
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import cfp
from cfp.checking.check import Differences, Leaf
from cfp.checking.trial import StepResult, Trial
from cfp.cli.running import check_lines, trial_data
from cfp.errors import CfpError
from cfp.platform import flags_for_devices, make_mesh
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.support.forking import quick_python
from cfp_test.view.plans import make_plan

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "troubleshooting.md"


def headings() -> list[str]:
    """Lists the headings of the page, but for its part without messages."""
    messages, _, _ = PAGE.read_text().partition("\n## When there is no message\n")
    return re.findall(r"^## (.+)$", messages, re.MULTILINE)


def explained(text: str) -> list[str]:
    """The headings that a module's tests are marked with."""
    found = []
    for node in ast.walk(ast.parse(text)):
        for mark in getattr(node, "decorator_list", ()):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith(
                "mark.explained"
            ):
                found.append(ast.literal_eval(mark.args[0]))
    return found


def test_every_heading_has_its_test_and_every_mark_its_heading():
    marks = [
        h for path in TESTS.rglob("test_*.py") for h in explained(path.read_text())
    ]
    assert len(headings()) > 15
    assert sorted(marks) == sorted(headings())


def test_marks_are_found():
    text = "@pytest.mark.explained('a')\n@pytest.mark.slow\ndef test(): pass"
    assert explained(text) == ["a"]


@pytest.mark.explained("JAX finds no device")
def test_a_platform_without_devices(monkeypatch):
    def none():
        raise RuntimeError("Unknown backend: 'cuda' requested")

    monkeypatch.setattr(jax, "devices", none)
    with pytest.raises(CfpError, match=r"JAX finds no device(?s:.*)Unknown backend"):
        make_mesh(None)


LATE = """
import threading
import jax
import jax.numpy as jnp

mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,))

def late(x):
    if x[0] == 0:
        threading.Event().wait()
    return x

def body(x):
    return jax.lax.psum(jax.pure_callback(late, x, x), "x")

spec = jax.P("x")
jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.arange(2))
"""


@pytest.mark.explained("Termination timeout exceeded, threads to join the rendezvous")
def test_virtual_devices_that_do_not_meet(monkeypatch):
    """Commands wait for longer than XLA does, or for as long as the user says."""
    limit = "--xla_cpu_collective_call_terminate_timeout_seconds"
    monkeypatch.delenv("XLA_FLAGS")
    assert f"{limit}=600" in flags_for_devices(2)
    monkeypatch.setenv("XLA_FLAGS", f"{limit}=6000")
    assert f"{limit}=600 {limit}=6000 " in flags_for_devices(2)
    monkeypatch.setenv("XLA_FLAGS", f"{limit}=1")
    flags = flags_for_devices(2)
    ended = subprocess.run(
        [quick_python(), "-c", LATE],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGABRT
    assert re.search("Termination timeout .* of 1 seconds exceeded", ended.stderr)
    assert "Expected 2 threads to join the rendezvous, but only 1" in ended.stderr


@pytest.mark.explained("Some donated buffers were not usable")
def test_what_is_donated_and_not_returned():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    step = flatten_step(lambda x: x.sum(), (jnp.ones(8),), donate_argnums=0)
    with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
        trace(step, mesh)


@pytest.mark.explained("Outside the step, JAX wants shardings")
def test_results_are_on_explicit_axes_if_arguments_are():
    """JAX refuses a lookup in a result on Explicit axes, and takes it on Auto ones."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    table = jnp.arange(32.0).reshape(8, 4)
    how = {"mesh": mesh, "pins": {"table": P("x")}, "donate_argnums": 0}

    def rows(table):
        doubled = cfp.parallelize(lambda table: table * 2, quiet=True, **how)(table)
        return jax.jit(lambda table: table[jnp.arange(3)])(doubled)

    expected = 2 * np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(found := rows(table + 0), expected)
    explicit = jax.NamedSharding(mesh, P("x"))
    with pytest.raises(Exception, match=r"Use `.at\[...\].get\(out_sharding=\)`"):
        rows(jax.device_put(table, explicit))
    with pytest.raises(ValueError, match="Mesh for all inputs should be equal"):
        jax.jit(jnp.dot)(found, jax.device_put(table[:4], explicit))


def checked(off: float, rounding: float) -> Trial:
    """Returns a check of a step with one leaf, which is off by so much."""
    leaf = Leaf(path="w", relative_l2=off, rounding=rounding, change=1.0)
    step = StepResult(time_ms=1.0, metrics={}, comparison=Differences([leaf]))
    return Trial(steps=(step,), tolerance=1e-5, checked=True)


def checked_text(off: float, rounding: float) -> str:
    """Returns the message of a check with one leaf, which is off by so much."""
    return "\n".join(check_lines(checked(off, rounding)))


def test_a_check_says_how_near_a_result_came_to_what_it_may_be_off():
    text = checked_text(5.1e-6, 1e-7)
    assert "Nearest to its limit is w: off by 5.1e-06 (relative L2), 51% of the" in text
    assert "0.51" not in text
    assert "Nearest" not in checked_text(0.51, 1.0)  # Rounding alone decides that one.


@pytest.mark.explained("Check FAILED")
def test_a_check_that_fails():
    text = checked_text(1e-3, 1e-7)
    assert text.startswith("Check FAILED: ")
    assert "step 0: w is off by 0.001, may be by 1e-05" in text
    assert trial_data(checked(1e-3, 1e-7), make_plan([], []))["failures"] == [
        {"step": 0, "path": "w", "relative_l2": 1e-3, "allowed": pytest.approx(1e-5)}
    ]


def test_a_check_of_what_is_no_number_is_json():
    trial = checked(inf, 1e-7)
    [step] = trial.steps
    trial = replace(trial, steps=(replace(step, metrics={"loss": nan, "n": 1.5}),))
    data = trial_data(trial, make_plan([], []))
    json.dumps(data, allow_nan=False)
    assert data["steps"][0]["metrics"] == {"loss": None, "n": 1.5}
    assert data["largest_difference"] == {"path": "w", "relative_l2": None}
    assert not data["passed"] and data["failures"][0]["relative_l2"] is None


@pytest.mark.explained("No more than rounding does on one device")
def test_a_check_that_rounding_explains():
    text = checked_text(1e-3, 1e-3)
    assert text.startswith("Check passed: ")
    assert "no more than rounding does there on one device" in text

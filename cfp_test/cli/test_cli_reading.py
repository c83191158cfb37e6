"""The commands that read plans, as their users type them."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import cfp
from cfp import platform
from cfp.cli import app
from cfp.cli.running import running_text
from cfp.cli.session import analyse, target_of
from cfp.errors import CfpError
from cfp.targets import resolve
from cfp.view.text import diff_text, explain_text, page_html, python_text
from cfp_test.cli.cli_runner import COLUMNS, run_batch
from cfp_test.support.checking import make_mesh
from cfp_test.view.reported import DEEP, HOSTILE

TOYS = str(Path(__file__).with_name("toy_targets.py"))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Outcomes of the commands, by their first words, and the folder they ran in."""
    folder = tmp_path_factory.mktemp("plans")
    DEEP.save(folder / "deep.json")
    HOSTILE.save(folder / "hostile.json")
    lines = {
        "report": "show hostile.json --html report.html",
        "made": "show hostile.json --html new/pages/report.html",
        "nowhere": "show hostile.json --html deep.json/report.html",
        "explain": "show deep.json --explain",
        "block": "show deep.json --explain --block layer_95",
        "unknown": "show deep.json --explain --block attention",
        "diff": "show deep.json --diff hostile.json",
        "python": "show deep.json --python",
    }
    found = run_batch([line.split() for line in lines.values()], folder)
    assert [outcome.crash for outcome in found] == [""] * len(lines)
    return dict(zip(lines, found, strict=True)), folder


def test_a_report_is_written(done):
    found, folder = done
    assert found["report"].code == 0
    assert (folder / "report.html").read_text() == page_html(HOSTILE)
    assert found["made"].code == 0
    assert (folder / "new/pages/report.html").read_text() == page_html(HOSTILE)
    assert found["nowhere"].code == 2
    assert "deep.json is no folder" in found["nowhere"].err


def test_plans_are_shown(done, monkeypatch):
    monkeypatch.setenv("COLUMNS", COLUMNS)
    found, _ = done
    assert found["explain"].out == explain_text(DEEP)
    assert found["diff"].out == diff_text(DEEP, HOSTILE, ("deep.json", "hostile.json"))
    assert found["block"].out == explain_text(DEEP, "layer_95")
    assert found["unknown"].code == 2
    assert "No block has 'attention' in its name" in found["unknown"].err
    assert found["python"].out == python_text(DEEP)


def test_a_step_is_donated_and_static_as_its_plan_says(tmp_path):
    """Neither --donate nor --static need be given beside a plan."""
    mesh = make_mesh((("x", 4),))
    for name, donate, static in (("toy", (0,), ()), ("with_static", (), (1,))):
        target = resolve(f"{TOYS}:{name}", donate=donate, static=static)
        plan = cfp.plan(
            target.step,
            *target.args,
            mesh=mesh,
            preset="data_parallel",
            donate_argnums=donate,
            static_argnums=static,
            settings=cfp.PlannerSettings(race=False),
            cache_dir=tmp_path,
        )
        plan.save(tmp_path / "plan.json")
        loaded = cfp.Plan.load(tmp_path / "plan.json")
        params = {"target": f"{TOYS}:{name}", "static": None}
        found, devices = target_of(SimpleNamespace(params=params, args=[]), loaded)
        assert found.static == static and found.donate == ()
        step = analyse(found, devices, plan=loaded).step
        assert step.donated == plan.donated
        assert any(plan.donated) == bool(donate)


def test_donated_leaves_in_a_row_are_printed_as_a_range():
    donated = range(1, 96)
    some = replace(DEEP, donated=(False, *[True] * 95))
    assert f"donate_argnums={donated})" in running_text(some, Path("step.jax"))
    jitted = jax.jit(lambda *leaves: leaves, donate_argnums=donated[:2])
    assert [*map(float, jitted(*map(jnp.float32, range(4))))] == [0, 1, 2, 3]
    some = replace(DEEP, donated=(True, False, True, True, *[False] * 92))
    assert "donate_argnums=[0, 2, 3])" in running_text(some, Path("step.jax"))


@pytest.mark.parametrize("axes", [{}, {"explicit_axes": "x"}])
def test_printed_lines_run_an_exported_step(axes, tmp_path):
    """The step may be on a mesh of other axis types than the plan's, as in commands."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    x = jnp.arange(8.0)
    with jax.set_mesh(mesh) if axes else nullcontext():
        plan = cfp.plan(jnp.sin, x, mesh=mesh, preset="data_parallel", quiet=True)
    assert plan.environment.items() >= axes.items()
    for some in plan, plan.on(make_mesh([("x", 4)])).bind(jnp.sin, x):
        some.export(tmp_path / "step.jax")
        exec(running_text(some, tmp_path / "step.jax"), names := {"args": (x,)})
        np.testing.assert_allclose(*names["results"], jnp.sin(x), rtol=1e-6)


class Asked(CfpError):
    """Stands for the devices that a command asks for."""


@pytest.mark.parametrize(
    "words",
    [
        "verify deep.json toy.py:toy",
        "run toy.py:toy --plan deep.json",
        "export deep.json toy.py:toy",
    ],
)
def test_the_platform_is_the_plans_if_none_is_given(words, tmp_path, monkeypatch):
    def select(name, axes):
        raise Asked(f"{name} {axes}")

    monkeypatch.setattr(platform, "select", select)
    monkeypatch.chdir(tmp_path)
    on_cpu = {**DEEP.environment, "platform": "cpu"}
    replace(DEEP, environment=on_cpu).save(tmp_path / "deep.json")
    for more, name in (([], "cpu"), (["--platform", "cuda"], "cuda")):
        result = CliRunner().invoke(app, [*words.split(), *more])
        assert result.exit_code == 2
        assert f"{name} {DEEP.mesh_axes}" in result.stderr, result.stderr

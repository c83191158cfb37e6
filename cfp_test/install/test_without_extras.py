"""cfp plans where only its own dependencies are installed."""

import subprocess
import sys

import pytest

from cfp_test.cli.cli_runner import environment

# Every package that only an extra brings is refused, wherever it is imported.
_PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

EXTRAS = {
    "equinox", "flax", "haiku", "highspy", "hypothesis", "jsonschema", "matplotlib",
    "optax", "pulp", "pytest", "ray", "torch",
}

class Refuses(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuses())
import cfp.cli

if sys.argv[1:]:
    sys.exit(cfp.cli.main())
import jax
import cfp
from cfp_test.cli.toy_targets import toy

step, args = toy()
plan = cfp.plan(step, *args, mesh=jax.make_mesh((2,), ("x",)), preset="data_parallel")
print(plan.winner, *sorted(EXTRAS & {*sys.modules}))
"""


def run_without_extras(tmp_path, command):
    """Runs a command line, or plans a step where it is empty."""
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, *command],
        env=environment(
            XDG_CACHE_HOME=str(tmp_path),
            XLA_FLAGS="--xla_force_host_platform_device_count=2",
        ),
        capture_output=True,
        text=True,
        check=False,
    )


def test_planning_imports_no_package_that_an_extra_brings(tmp_path):
    done = run_without_extras(tmp_path, [])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["data_parallel"]


@pytest.mark.parametrize("command", [["--help"], ["operators", "--list"]])
def test_help_and_operators_need_no_extra(tmp_path, command):
    done = run_without_extras(tmp_path, command)
    assert done.returncode == 0, done.stderr
    assert "operator" in done.stdout


def test_models_without_their_extra_name_it(tmp_path):
    done = run_without_extras(tmp_path, ["plan", "gpt"])
    assert done.returncode == 2
    assert "pip install 'cfp[models]'" in done.stderr

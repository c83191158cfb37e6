"""cfp plans where only its own dependencies are installed."""

import subprocess
import sys

from cfp_test.cli.cli_runner import environment

# Every package that only an extra brings is refused, wherever it is imported.
_PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

EXTRAS = {
    "equinox", "haiku", "highspy", "hypothesis", "jsonschema", "matplotlib", "pulp",
    "pytest", "ray", "torch",
}

class Refuses(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuses())
import jax
import cfp
import cfp.cli
from cfp_test.cli.toy_targets import toy

step, args = toy()
plan = cfp.plan(step, *args, mesh=jax.make_mesh((2,), ("x",)), preset="data_parallel")
print(plan.winner, *sorted(EXTRAS & {*sys.modules}))
"""


def test_planning_imports_no_package_that_an_extra_brings(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=environment(
            XDG_CACHE_HOME=str(tmp_path),
            XLA_FLAGS="--xla_force_host_platform_device_count=2",
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["data_parallel"]

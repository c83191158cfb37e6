"""A planning on a Ray that is started for it; each test has one in its own process."""

import json
import subprocess
import sys
from pathlib import Path

from cfp.cluster.on_ray import gpus_for
from cfp.profiling.store import ProfileStore
from cfp_test.cli.cli_runner import environment
from cfp_test.support.waiting import GUARD_SECONDS

# The same program here and there, so that times follow from what is compiled.
_PROGRAM = """
import json, os, signal, sys
import jax, pytest
import cfp
from jax.sharding import AbstractMesh
from cfp.cluster import on_ray as planning
from cfp.cluster.on_ray import connected
from cfp.cluster.on_ray import plan_step
from cfp.context import DetailedSettings
from cfp_test.support.injected import hold_times
from cfp_test.cli.toy_targets import toy

planning._NODE_SECONDS = 1200.0  # However busy the machine is.
settings = DetailedSettings(measure=True, per_kind=1, in_context=False)
on_ray = DetailedSettings(measure=True, per_kind=1, in_context=False, ray="local")
died = os.path.abspath("died")

def plan(*args, **options):
    # In the runner, whose process ends the first time.
    import os
    if not os.path.exists(died):
        open(died, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    hold_times(pytest.MonkeyPatch())
    return cfp.plan(*args, **options)

step, args = toy()
names = ("x",)
with connected("local"):
    there = plan_step(plan, step, args, {}, AbstractMesh((2,), names),
                      cache_dir="there", settings=on_ray)
    try:
        cfp.plan(step, *args, mesh=AbstractMesh((4,), names), settings=on_ray)
    except cfp.CfpError as error:
        said = str(error)
hold_times(pytest.MonkeyPatch())
mesh = jax.make_mesh((2,), names)
here = cfp.plan(step, *args, mesh=mesh, cache_dir="here", settings=settings)
print(json.dumps({
    "there": json.loads(there.to_json()), "here": json.loads(here.to_json()),
    "said": said, "bound": there.step is not None,
    "on": [d.id for d in there.mesh.devices.flat],
}))
"""


def keys(path: Path) -> set[str]:
    with ProfileStore(path) as store:
        return {record.key for record in store.records() if record.ok}


def test_a_plan_is_made_on_a_cluster_as_it_is_made_here(tmp_path):
    variables = environment(
        CFP_CACHE_DIR=str(tmp_path / "cache"),
        JAX_PLATFORMS="cpu",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_gcs_server_port_wait_time_s="1200",
        RAY_worker_register_timeout_seconds="1200",
        RAY_health_check_failure_threshold="400",
        RAY_memory_monitor_refresh_ms="0",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=variables,
        timeout=GUARD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # The runner died, and Ray started another.
    assert (tmp_path / "died").exists()
    for plan in (found["there"], found["here"]):
        del plan["search"]  # Seconds, and counts of what was known.
    assert found["there"] == found["here"]
    assert found["bound"] and found["on"] == [0, 1]
    # All records are in the store of the driver; they are those of a planning here.
    there = keys(tmp_path / "there/profiles.sqlite")
    here = keys(tmp_path / "here/profiles.sqlite")
    assert there == here and len(here) > 4
    assert "Ray's runner has too few devices" in found["said"]
    assert "needs 4, and there are 2 of" in found["said"]


def test_what_a_mesh_needs_of_a_node():
    def node(**resources: float) -> dict[str, object]:
        return {"Resources": resources, "Alive": True}

    cpus, gpus = node(CPU=8.0), node(CPU=16.0, GPU=4.0)
    two = (("x", 2),)
    assert gpus_for("cpu", two, [gpus]) == 0
    assert gpus_for("cuda", two, [cpus]) == 2
    assert gpus_for(None, two, [cpus, gpus]) == 2
    assert gpus_for(None, two, [cpus]) == 0
    assert gpus_for("cuda", None, [cpus, gpus]) == 4

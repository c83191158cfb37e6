"""Two processes of one program measure the same, and in step."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from cfp_test.support.waiting import GUARD_SECONDS

PROGRAM = textwrap.dedent("""\
    import sys
    from pathlib import Path

    import jax

    place, address, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, place)

    from cfp.profiling import collectives
    from cfp.profiling.collectives import measure_rates
    from cfp.profiling.options import MeasureOptions
    from cfp.profiling.collectives import ProbeSizes
    from cfp.profiling.store import ProfileStore

    collectives.SMALL = ProbeSizes(
        collective_bytes=(1 << 10, 1 << 13),
        chain_bytes=1 << 12,
        longest_chain=4,
        matmul_width={"float32": 32, "bfloat16": 32},
        memory_bytes=1 << 12,
        memory_passes=2,
    )
    mesh = jax.make_mesh((4,), ("x",))
    with ProfileStore(folder / f"{place}.sqlite") as store:
        rates = measure_rates(mesh, store)
        # One of the two has forgotten something: both measure it again.
        again = ProfileStore(folder / f"{place} again.sqlite")
        for number, record in enumerate(store.records()):
            if number != place:
                again.put(record)
        events = []
        measure_rates(mesh, again, MeasureOptions(progress=events.append))
        again.close()
    ran = sum(event.phase == "run" for event in events)
    print("RESULT", ran, sorted(rates.curves.items()), rates.memory_bytes_per_ms)
    """)


@pytest.mark.nightly
def test_two_processes_agree(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(place), address, str(tmp_path)],
            env={**os.environ, **flags, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in range(2)
    ]
    results = []
    for process in processes:
        out, errors = process.communicate(timeout=GUARD_SECONDS)
        assert process.returncode == 0, errors
        results += [line for line in out.splitlines() if line.startswith("RESULT")]
    assert len(results) == 2
    assert results[0] == results[1]
    assert results[0].startswith("RESULT 2 ")

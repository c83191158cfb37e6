"""Times that follow from a compiled program, in place of measured ones.

What a test of choices expects must not be decided by how busy the machine is: with
these times, the same programs give the same choices wherever they are planned.

``python -m cfp_test.support.injected -m MODULE ...`` or ``-c CODE`` runs Python with
them.
"""

import runpy
import sys
from typing import Any

import jax
import pytest

from cfp.profiling.builder import Built
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import Timing, TimingOptions

# Where compiled programs are timed, under the name that each module has for it.
_TIMED_IN = ("collectives", "runner")
_LEAST_MS, _BYTES_PER_MS = 0.01, 1e6


def time_ms(compiled: jax.stages.Compiled) -> float:
    """A time that grows with what a program reads and writes, as XLA counts it."""
    costs = compiled.cost_analysis()
    return _LEAST_MS + costs.get("bytes accessed", 0.0) / _BYTES_PER_MS


def execute(built: Built, *args: object, **options: object) -> ProfileRecord:
    """Stands for `cfp.profiling.runner.execute`; nothing runs."""
    return built.record("ok", samples_ms=[time_ms(built.compiled)], run_seconds=0.01)


def measure(run: Any, timing: TimingOptions, **options: object) -> Timing:
    """Stands for `cfp.profiling.runner.measure`; everything runs, twice.

    So what a program donates is fed back to it, and what cannot run fails.
    """
    run(2)
    samples_ms = (time_ms(run.compiled),) * timing.min_samples
    return Timing(samples_ms=samples_ms, warmup_ms=())


def inject_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured any more, until the patch is undone."""
    for module in _TIMED_IN:
        monkeypatch.setattr(f"cfp.profiling.{module}.execute", execute)


def hold_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is measured runs, and takes what follows from it."""
    monkeypatch.setattr("cfp.profiling.runner.measure", measure)


if __name__ == "__main__":
    hold_times(pytest.MonkeyPatch())
    kind, what, *rest = sys.argv[1:]
    sys.argv = [what if kind == "-m" else kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(what, {"__name__": "__main__"})

"""Plants a fault in cfp, and counts the programs until it is found.

    python -m cfp_test.random_steps.faults NAME

Programs are those of the seeds from 0 on. One without a block of the kinds that reach
the fault, or without a twin where that is needed, is counted and not run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cfp_test.random_steps.__main__ import prepare

MOST = 200


@dataclass(frozen=True)
class Fault:
    """A fault that may be planted.

    Attributes:
        what: the fault.
        plant: puts it in place.
        kinds: blocks of the programs that are run; of any kind, if there are none.
        by_twin: whether only a twin can be wrong.
    """

    what: str
    plant: Callable[[pytest.MonkeyPatch], None] = field(repr=False)
    kinds: Collection[str] = ()
    by_twin: bool = False


def _plant_factor(patch: pytest.MonkeyPatch) -> None:
    from cfp.kernels.problem import AttentionStrategy

    patch.setattr(AttentionStrategy, "spread", property(lambda self: None))


def _plant_key(patch: pytest.MonkeyPatch) -> None:
    from cfp.plan.execute import Executables

    key = Executables.key

    def stale(self: Any, text: bytes, *rest: Any) -> str:
        return key(self, b"", *rest)

    patch.setattr(Executables, "key", stale)


FAULTS = {
    "factor": Fault(
        "the factor of keys, which attention sums over, is taken for one that each "
        "device may have its own part of",
        _plant_factor,
        kinds=("attention",),
    ),
    "key": Fault(
        "the key of a kept executable leaves out the program's text",
        _plant_key,
        by_twin=True,
    ),
}


def find(name: str, strategies: int = 24) -> dict[str, Any]:
    """Plants a fault and checks programs until one is wrong.

    Args:
        name: of the fault, among `FAULTS`.
        strategies: for each program.

    Returns:
        The fault, the number of programs with the first wrong one, and what it says;
        None for the number if the fault was not found.
    """
    from cfp_test.random_steps.check import WRONG
    from cfp_test.random_steps.program import draw_spec
    from cfp_test.random_steps.run import check_seed, has_twin

    fault, ran = FAULTS[name], 0
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as made:
        fault.plant(patch)
        for seed in range(MOST):
            blocks = {block.kind for block in draw_spec(seed).blocks}
            if fault.kinds and not blocks.intersection(fault.kinds):
                continue
            if fault.by_twin and not has_twin(seed):
                continue
            ran += 1
            folder = Path(made) / str(seed)
            for row in check_seed(seed, 1 if fault.by_twin else strategies, folder):
                wrong = [way[3] for way in row["ways"] if way[2] == WRONG]
                if wrong:
                    return {
                        "name": name,
                        "fault": fault.what,
                        "programs": seed + 1,
                        "ran": ran,
                        "wrong": wrong[0],
                    }
    return {"name": name, "fault": fault.what, "programs": None, "ran": ran}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=sorted(FAULTS))
    name = parser.parse_args().name
    prepare()
    print(json.dumps(find(name)))

"""Times of the winner's branches: each flag of the arguments set to all its values."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from cfp.analysis.work import long_branches
from cfp.profiling.inputs import sources
from cfp.profiling.key import ProfileKey
from cfp.profiling.runner import run
from cfp.program.graph import Program, numpy_dtype
from cfp.race.compile import Builder
from cfp.race.programs import RaceResult


def flag_values(
    program: Program, carried: Collection[int]
) -> Iterator[tuple[str, Program]]:
    """Yields a text such as ``refresh=False``, and the program with that value.

    A flag is a scalar argument that is a long branch's predicate, or index (up to 7).

    Args:
        carried: arguments that a result takes the place of: no value of theirs stays.
    """
    given = [*program.given, *[b""] * (len(program.args) - len(program.given))]
    ways: dict[int, int] = {}
    for op in (one for one in long_branches(program) if one.results):
        for v in sources(program, op.operands[0]).difference(carried):
            if v in program.args and not program.shape(v):
                ways[v] = max(ways.get(v, 0), len(op.yields) // len(op.results))
    for v, count in sorted(ways.items()):
        place, dtype = program.args.index(v), numpy_dtype(program.values[v].dtype)
        for value in np.arange(min(count, 8)).astype(dtype):
            other = [*given[:place], value.tobytes(), *given[place + 1 :]]
            text = f"{program.arg_names[place]}={value}"
            yield text, replace(program, given=tuple(other))


def time_flags(builder: Builder, best: RaceResult) -> tuple[tuple[str, float], ...]:
    """Times a compiled program with each value of its flags.

    Returns:
        Step times by flag and value, from the store or measured while time lasts.
    """
    one, found = best.program, list[tuple[str, float]]()
    built = builder.built.get(one.identity)
    carried = {one.job.part.inputs[place] for place in one.job.donated}
    for text, program in flag_values(builder.program, carried):
        key = ProfileKey((*one.job.key.parts, ("flag", text)))
        record = builder.store.get(key.digest)
        if record is None and built is not None and time.monotonic() < builder.end:
            builder.options.tell(f"timing {one.name} with {text}")
            with builder.in_flight as at, at.doing(key, text, "run", best.time_ms):
                made = replace(built, key=key)
                record = run(made, one.job, program, builder.devices)
            builder.store.put(record)
        if record is not None and record.ok:
            found.append((text, record.time_ms))
    return tuple(found)

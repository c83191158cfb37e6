"""Choices for a whole program that were compiled before, and what they need.

Memory is predicted, and compiled programs need a few percent more or less. What was
compiled is known: of two budgets the plan for the smaller is known to fit into the
larger, and the smallest that any compiled plan needs is a budget that does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Storage
from cfp.analysis.strategies import AxisChoice, Strategy, block_strategies
from cfp.profiling.builder import Job
from cfp.profiling.compiler_options import refused_option
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore
from cfp.search.measure import Told


@dataclass(frozen=True, slots=True)
class Remembered:
    """A choice that was compiled whole.

    Attributes:
        choice: the choice.
        extent: how much of it the compiler was told.
        options: of the compiler.
        record: what it needs on each device and, if it was timed, takes.
    """

    choice: Choice
    extent: Told
    options: Mapping[str, str]
    record: ProfileRecord


def remembered(analysis: Analysis, store: ProfileStore, job: Job) -> list[Remembered]:
    """What the store knows of other choices for a whole program, the fastest first.

    Failures are left out, but for what was compiled and then refused for its size.

    Args:
        analysis: of the program.
        store: where races keep their records.
        job: the whole program under any choice, without compiler options.
    """
    like = _apart_from_choice(job.key.parts)
    options = _strategies(analysis)
    found = [
        Remembered(*made, record)
        for record in store.records()
        if record.choice
        and _apart_from_choice(record.parts) == like
        and (record.ok or _was_refused(record))
        and (made := _read(analysis, options, record)) is not None
    ]
    return sorted(found, key=lambda one: one.record.time_ms)


def choice_of(analysis: Analysis, record: ProfileRecord) -> Choice | None:
    """The choice that a record is of; None if it does not say, or nobody knows it."""
    found = _read(analysis, _strategies(analysis), record)
    return found[0] if found is not None else None


def _strategies(analysis: Analysis) -> list[Sequence[Strategy]]:
    frame = analysis.frame
    return [block_strategies(frame.program, b, frame.mesh) for b in frame.blocks]


def _apart_from_choice(parts: tuple[tuple[str, str], ...]) -> dict[str, str]:
    chosen = ("shardings", "options", "race")
    return {name: value for name, value in parts if name not in chosen}


def _was_refused(record: ProfileRecord) -> bool:
    is_large = record.status == "out_of_memory" and not record.run_seconds
    return is_large and record.peak_bytes > 0


def _read(
    analysis: Analysis, options: Sequence[Sequence[Strategy]], record: ProfileRecord
) -> tuple[Choice, Told, Mapping[str, str]] | None:
    """The choice, unless it is one that another version of cfp has made.

    Args:
        analysis: of the program.
        options: the strategies of each block.
        record: what has it.
    """
    try:
        data = json.loads(record.choice)
        blocks = tuple(
            tuple(AxisChoice(**axis) for axis in strategy)
            for strategy in data["blocks"]
        )
        storage = tuple(map(Storage, data["storage"]))
        remat, extent = tuple(data["remat"]), Told(data["extent"])
        told = dict(data["options"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    # Records may come from elsewhere.
    if (
        len(blocks) == len(options)
        and len(storage) == len(analysis.frame.groups)
        and all(block in those for block, those in zip(blocks, options, strict=True))
        and all(type(place) is int for place in remat)
        and all(place in range(len(analysis.segments)) for place in remat)
        and refused_option(told) is None
    ):
        return Choice(blocks, storage, remat), extent, told
    return None

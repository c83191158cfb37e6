"""Results of races that nothing ran."""

from typing import Any

from cfp.profiling.record import ProfileRecord
from cfp.race.programs import RaceProgram, RaceResult
from cfp.search.guided import Candidate


def result_of(
    candidate: Candidate, record: ProfileRecord, fits: bool = True
) -> RaceResult:
    """Outcome of a candidate, by a record of it."""
    job: Any = None
    program = RaceProgram(candidate=candidate, job=job)
    return RaceResult(program=program, record=record, size=record.size, fits=fits)

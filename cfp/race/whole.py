"""Which of those that won truncated wins whole: the first that fits and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from cfp.analysis.layout import Choice
from cfp.race.outcome import RaceRow, left_out, race_row
from cfp.race.programs import RaceResult, TimedCandidate
from cfp.settings import WHOLE_TRIES, ConstraintLevel
from cfp.solution import Candidate

UNTRIED = "not tried: with other compiler options it does not run whole"


@dataclass(frozen=True, slots=True)
class Refused:
    """Candidates whose whole programs do not fit or run, though truncated ones did.

    Attributes:
        found: what and how, by how much the compiler was constrained: with other
            options it is as large.
    """

    found: dict[tuple[Choice, ConstraintLevel], TimedCandidate] = field(
        default_factory=dict
    )

    def __contains__(self, candidate: Candidate) -> bool:
        return (candidate.choice, candidate.level) in self.found

    def add(self, candidate: Candidate, result: RaceResult) -> None:
        """Notes what did not run whole."""
        self.found[candidate.choice, candidate.level] = candidate, result

    def row(self, candidate: Candidate, result: RaceResult) -> RaceRow:
        """How a candidate did, as a plan keeps it: truncated, unless refused whole."""
        if candidate not in self:
            return race_row(result)
        other, whole = self.found[candidate.choice, candidate.level]
        if other.key != candidate.key:
            return left_out(candidate.name, candidate.predicted_ms, UNTRIED)
        return race_row(replace(whole, name=candidate.name))


def first_whole(
    ranked: Iterable[TimedCandidate],
    most_bytes: float,
    run: Callable[[Candidate], RaceResult],
) -> tuple[TimedCandidate | None, Refused]:
    """The first of those that ran truncated whose whole program fits and runs.

    Args:
        ranked: what took part and how it did, the best first.
        most_bytes: what needs more, as the truncated program says, is not tried.
        run: compiles and times a candidate's whole program.

    Returns:
        Which, and how it did: None if none of three runs. And what was refused.
    """
    refused, tries = Refused(), 0
    for candidate, short in ranked:
        if not short.ran or candidate in refused:
            continue
        if short.peak_bytes > most_bytes:
            refused.add(candidate, replace(short, fits=False))
            continue
        if tries == WHOLE_TRIES:
            break
        tries += 1
        whole = run(candidate)
        if whole.ran:
            return (candidate, whole), refused
        refused.add(candidate, whole)
    return None, refused

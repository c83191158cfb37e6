"""Who of those that won abridged wins whole: the first whose program fits and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from cfp.analysis.layout import Choice
from cfp.plan_parts import RaceRow
from cfp.planner_parts import Decision, left_out, race_row
from cfp.search.finalist import RaceResult
from cfp.search.measure import Told

# A whole program of 48 layers is compiled for 50 s.
_TRIES = 3
UNTRIED = "not tried: with other compiler options it does not run whole"


@dataclass(frozen=True, slots=True)
class Refused:
    """Whose whole programs do not fit or run, though they did abridged.

    Attributes:
        found: who and how, by what the compiler was told: with other options it is as
            large.
    """

    found: dict[tuple[Choice, Told], tuple[Decision, RaceResult]] = field(
        default_factory=dict
    )

    def __contains__(self, entry: Decision) -> bool:
        return (entry.choice, entry.extent) in self.found

    def add(self, entry: Decision, result: RaceResult) -> None:
        """Notes who did not run whole."""
        self.found[entry.choice, entry.extent] = entry, result

    def row(self, entry: Decision, result: RaceResult) -> RaceRow:
        """How somebody did, as a plan keeps it: abridged, unless refused whole."""
        if entry not in self:
            return race_row(result)
        other, whole = self.found[entry.choice, entry.extent]
        if other.key != entry.key:
            return left_out(entry.name, entry.predicted_ms, UNTRIED)
        return race_row(replace(whole, name=entry.name))


def first_whole(
    ranked: Iterable[tuple[Decision, RaceResult]],
    most_bytes: float,
    run: Callable[[Decision], RaceResult],
) -> tuple[tuple[Decision, RaceResult] | None, Refused]:
    """The first of those that ran abridged whose whole program fits and runs.

    Args:
        ranked: who took part and how they did, the best first.
        most_bytes: who needs more, by what the abridged program says, is not tried.
        run: compiles and times somebody's whole program.

    Returns:
        Who, and how it did: None if none of three runs. And who was refused.
    """
    refused, tries = Refused(), 0
    for entry, short in ranked:
        if not short.ran or entry in refused:
            continue
        if short.peak_bytes > most_bytes:
            refused.add(entry, replace(short, fits=False))
            continue
        if tries == _TRIES:
            break
        tries += 1
        whole = run(entry)
        if whole.ran:
            return (entry, whole), refused
        refused.add(entry, whole)
    return None, refused

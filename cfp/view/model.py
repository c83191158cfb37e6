"""The view of a plan: everything that is shown of it, decided once.

`view_of` makes it; renderers, `cfp.view.text` and `cfp.view.page`, place its values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from cfp.plan.figures import OptionFigures, StrategyFigures
from cfp.plan.parts import MoveFigure, PlanRow, PlanSegment, roles_text
from cfp.plan.plan import Plan
from cfp.printable import counted, merged_name, span_text
from cfp.profiling.timing import interquartile_range
from cfp.race.admission import MEMORY_SHARE
from cfp.race.programs import RaceRow
from cfp.settings import ALIKE
from cfp.units import format_bytes
from cfp.view import words
from cfp.view.remarks import remarks, reserve_text
from cfp.view.words import REMATERIALIZED, STORAGE_WORDS, few, kernels_text


def strategy_text(
    strategy: StrategyFigures, base: StrategyFigures | None = None
) -> str:
    """Describes a strategy: what it shards, and how parameters are kept.

    Args:
        base: say only in what it differs from this one of the same kind; "" where it
            differs in nothing.
    """
    before = {
        name: alike.strategy
        for alike in (base.blocks if base else ())
        for name in alike.names
    }
    by_text: dict[str, list[str]] = {}
    for alike in strategy.blocks:
        text = roles_text(alike.strategy)
        for name in alike.names:
            was = before.get(name)
            if was != alike.strategy:
                reads_alike = was is not None and roles_text(was) == text
                other = f"{text}{_OTHER_DIM if reads_alike else ''}"
                by_text.setdefault(other, []).append(name)
    parts = []
    for text, names in by_text.items():
        shown = few(names, width=words.NAME_WIDTH) if base else ", ".join(names)
        parts.append(f"{shown} {text}")
    stored = strategy.storage
    if stored is not None and (base is None or base.storage != stored):
        parts.append(f"parameters {STORAGE_WORDS[stored]}")
    if strategy.kernels and (base is None or base.kernels != strategy.kernels):
        parts.append(kernels_text(strategy.kernels))
    elif base is not None and base.kernels and not strategy.kernels:
        parts.append("computed as it is written")
    if strategy.rematerialized and not (base and base.rematerialized):
        parts.append(REMATERIALIZED)
    elif base is not None and base.rematerialized and not strategy.rematerialized:
        parts.append(f"not {REMATERIALIZED}")
    return "; ".join(parts)


# Of a block that reads as another strategy's does: two dims have one size.
_OTHER_DIM = ", another dim of that size"
_SIZE = re.compile(r" [\d.]+ (B|[KMG]iB)")
# With fewer samples nothing is said of their spread.
_SPREAD_SAMPLES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """A block of a run of segments that are alike.

    Attributes:
        row: a block in the middle of those with the same collectives as most, which
            stands for all: the first and the last have other neighbours.
        members: the block in each segment of the run, by its index.
        name: of all, as one: ``Net/layer_0-3/up``.
        path: the same without the module that all blocks of the plan stand in.
        sharded: what each axis shards, in words.
        exceptions: the collectives of segments that have others, in words.
        moves: the collectives of `row` by kind and axes, most bytes first.
    """

    row: PlanRow
    members: tuple[int, ...]
    name: str
    path: str
    sharded: str
    exceptions: tuple[str, ...]
    moves: tuple[MoveFigure, ...]

    @property
    def collectives(self) -> str:
        """The collectives of most, and those of others where they differ."""
        return "; ".join([words.moves_text(self.row.moves), *self.exceptions])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceView:
    """The reason for a segment's choice, and the choice that comes next.

    Attributes:
        taken, runner_up: None where they were not measured.
        too_large: a remark on a runner-up that does not fit, or "".
    """

    why: str
    taken: OptionFigures | None = None
    runner_up: OptionFigures | None = None
    too_large: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentView:
    """Segments that are alike, each in another repeat of a run.

    Attributes:
        span: the same in words: ``1-4``.
        names: its first block, and its last.
        parameters: how they are stored, and what else the segment does.
        time_ms: of each; None if it was not measured.
        collectives_ms: of each, one after another.
    """

    indices: tuple[int, ...]
    span: str
    names: str
    parameters: str
    time_ms: float | None
    collectives_ms: float
    blocks: tuple[BlockView, ...]
    choice: ChoiceView

    @property
    def count(self) -> int:
        """Number of segments."""
        return len(self.indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Segments that stand back to back and repeat, shown once.

    Attributes:
        first: index of the first segment.
        period: number of segments in one repeat.
    """

    first: int
    period: int
    count: int
    segments: tuple[SegmentView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateView:
    """A program of the race, with all the names under which it raced.

    Attributes:
        row: the row of its fastest variant; the winner's, if it won.
        won: whether it is the plan's.
        others: other names of the same program.
        spread_ms: half of its samples lie as near to their median as this; None if
            they are too few to tell.
        note: why it could not win, or the names of the same program.
    """

    row: RaceRow
    won: bool
    others: tuple[str, ...]
    spread_ms: float | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceView:
    """The candidates, the fastest first.

    Attributes:
        ran: whether any of them was run.
        shared_note: a note that all have in common, which stands at none of them.
        slower: the number of variants that were slower than another of their
            candidate, in words, or "".
        is_tie: whether the winner's figure is not the least: the simplest of a tie.
        has_rungs: whether figures of some are not measured.
    """

    title: str
    ran: bool
    candidates: tuple[CandidateView, ...]
    shared_note: str
    slower: str
    is_tie: bool
    has_rungs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """Everything of a plan that is worked out to be shown.

    Facts that a sentence tells are in `cfp.view.words`.

    Attributes:
        chosen: how it was chosen, briefly.
        why: the same in sentences; "" if it was not searched for.
        memory: memory and the budget, in a sentence, or "".
        moves: collectives of all blocks together by kind and axes, most bytes first.
        remarks: see `cfp.view.remarks.remarks`.
    """

    plan: Plan
    chosen: str
    why: str
    memory: str
    runs: tuple[RunView, ...]
    moves: tuple[MoveFigure, ...]
    race: RaceView
    remarks: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks as sentences that stand alone."""
        return tuple(remark[0].upper() + remark[1:] for remark in self.remarks)

    @property
    def segments(self) -> tuple[SegmentView, ...]:
        """Segments of all runs."""
        return tuple(segment for run in self.runs for segment in run.segments)


def view_of(plan: Plan) -> PlanView:
    """Makes the view of a plan."""
    race = _race(plan)
    chosen, why = _reasons(plan, race)
    return PlanView(
        plan=plan,
        chosen=chosen,
        why=why,
        memory=_memory_text(plan),
        runs=tuple(_runs(plan)),
        moves=merged_moves(move for row in plan.rows for move in row.moves),
        race=race,
        remarks=tuple(remarks(plan)),
    )


def _memory_text(plan: Plan) -> str:
    if plan.figures is None:
        return ""
    budget, peak = plan.figures.budget_bytes, plan.peak_bytes
    limit = "no limit" if budget is None else f"at most {format_bytes(budget)}"
    needs = f"{format_bytes(peak)} as compiled, " if peak else ""
    return f"Memory: {needs}{limit} on each device{reserve_text(plan)}."


def merged_moves(moves: Iterable[MoveFigure]) -> tuple[MoveFigure, ...]:
    """Collectives by kind and axes alone, most bytes first."""
    groups: dict[tuple[str, tuple[str, ...]], list[MoveFigure]] = {}
    for move in moves:
        groups.setdefault((move.kind, move.axes), []).append(move)
    found = []
    for (kind, axes), alike in groups.items():
        times = [move.time_ms for move in alike if move.time_ms is not None]
        found.append(
            MoveFigure(
                kind=kind,
                axes=axes,
                count=sum(move.count for move in alike),
                total_bytes=sum(move.total_bytes for move in alike),
                time_ms=sum(times) if len(times) == len(alike) else None,
            )
        )
    return tuple(sorted(found, key=lambda move: (-move.total_bytes, move.kind)))


# ----------------------------------------------------------------------------- segments


def _runs(plan: Plan) -> Iterator[RunView]:
    """Finds segments that are alike and stand back to back.

    Alike are segments of one kind whose blocks are sharded and stored alike.
    """
    parts = [[*rows] for _, rows in groupby(plan.rows, key=lambda row: row.segment)]
    marks = [
        (plan.segments[rows[0].segment].alike, *((r.op, r.strategy) for r in rows))
        for rows in parts
    ]
    prefix = words.common_prefix([row.name for row in plan.rows])
    at = 0
    while at < len(parts):
        period, count = _longest_repeat(marks, at)
        segments = []
        for first in range(at, at + period):
            twins = parts[first : at + period * count : period]
            blocks = [_block(column, prefix) for column in zip(*twins, strict=True)]
            segments.append(_segment(plan, [t[0].segment for t in twins], blocks))
        yield RunView(
            first=parts[at][0].segment,
            period=period,
            count=count,
            segments=tuple(segments),
        )
        at += period * count


def _longest_repeat(marks: Sequence[tuple], at: int) -> tuple[int, int]:
    """(period, count) of the repeat that covers most from here on; (1, 1) if none."""
    best = (1, 1)
    for period in range(1, (len(marks) - at) // 2 + 1):
        count = 1
        unit = marks[at : at + period]
        while marks[at + period * count : at + period * (count + 1)] == unit:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = (period, count)
    return best


def _block(twins: Sequence[PlanRow], prefix: str) -> BlockView:
    row, exceptions = _usual_row(twins)
    return BlockView(
        row=row,
        members=tuple(twin.block for twin in twins),
        name=merged_name([twin.name for twin in twins]),
        path=merged_name([twin.name.removeprefix(prefix) for twin in twins]),
        sharded=roles_text(row.strategy),
        exceptions=exceptions,
        moves=merged_moves(row.moves),
    )


def _usual_row(twins: Sequence[PlanRow]) -> tuple[PlanRow, tuple[str, ...]]:
    """Finds a block with the collectives of most, and the others' in words.

    Others are the first of a stack, say. Small differences in size are those of
    tensors that belong to no block for sure.
    """
    kinds: dict[str, list[PlanRow]] = {}
    for twin in twins:
        text = words.moves_text(twin.moves)
        kinds.setdefault(_SIZE.sub("", text), []).append(twin)
    common, *others = sorted(
        kinds.values(), key=lambda group: (-len(group), -group[-1].segment)
    )
    spans = [span_text([row.segment for row in group]) for group in others]
    texts = [words.moves_text(group[0].moves) for group in others]
    return common[len(common) // 2], tuple(
        f"but in segment {span}: {'none' if text == '-' else text}"
        for span, text in zip(spans, texts, strict=True)
    )


def _segment(plan: Plan, indices: list[int], blocks: list[BlockView]) -> SegmentView:
    segment: PlanSegment = plan.segments[indices[0]]
    moves = [move for one in blocks for move in one.row.moves]
    return SegmentView(
        indices=tuple(indices),
        span=span_text(indices),
        names=" to ".join(dict.fromkeys([blocks[0].name, blocks[-1].name])),
        parameters=words.storage_text(segment),
        time_ms=segment.time_ms,
        collectives_ms=sum(move.time_ms or 0.0 for move in moves),
        blocks=tuple(blocks),
        choice=choice_of(plan, indices[0]),
    )


def choice_of(plan: Plan, segment: int) -> ChoiceView:
    """Explains the choice for a segment, with the runner-up."""
    figures, why = plan.figures, words.unsearched_text(plan)
    if figures is None or why:
        return ChoiceView(why=why)
    known = words.known_how(plan)
    taken = figures.taken(segment)
    if taken is None:
        how = words.won_how(plan)
        return ChoiceView(why=f"{how}; this strategy was not {known} by itself")
    options = figures.kinds[figures.segment_kinds[segment]].options
    runner = words.runner_up(options, taken, figures.budget_bytes)
    if runner is None:
        why = f"it is the only strategy that was {known}"
        return ChoiceView(why=why, taken=taken)
    # A runner-up that does not fit is the best of those: no other fits.
    too_large = words.too_large_text(runner, figures.budget_bytes)
    surprise = "" if too_large else words.surprise_text(plan, taken, runner)
    is_first = all(taken.step_ms <= one.step_ms + words.SAME_MS for one in options)
    place = "the fastest" if is_first else "the fastest that fits"
    tie = ", in a tie with the runner-up" * _is_tie(taken, runner)
    return ChoiceView(
        why=surprise or f"{place} of {len(options)} {known}{tie}",
        taken=taken,
        runner_up=runner,
        too_large=too_large,
    )


def _is_tie(taken: OptionFigures, runner: OptionFigures) -> bool:
    """True if two options have the same figures, as far as these are shown."""
    sizes = {format_bytes(one.memory_bytes) for one in (taken, runner)}
    return abs(taken.step_ms - runner.step_ms) <= words.SAME_MS and len(sizes) == 1


# --------------------------------------------------------------------------------- race

_UNMEASURED = {"measured": "Predictions", "estimated": "Estimates"}


def _place(row: RaceRow) -> tuple[bool, float, float]:
    """Sort key: rows that could not win come last, though they may have a time."""
    times = (row.time_ms, row.predicted_ms)
    first, second = (float("inf") if ms is None else ms for ms in times)
    return bool(row.note), first, second


def _base(row: RaceRow) -> str:
    """The name of the candidate that a row is a variant of."""
    return row.name.partition(", ")[0]


def _race(plan: Plan) -> RaceView:
    """Takes each candidate's fastest variant, and each program once.

    A variant's name is the candidate's, a comma, and in what it differs. Candidates
    that came out as one program stand there once, under the winner's name if they won.
    """
    best: dict[str, RaceRow] = {}
    for row in sorted(plan.race, key=lambda r: (r.name != plan.winner, *_place(r))):
        best.setdefault(_base(row), row)
    programs: dict[object, list[RaceRow]] = {}
    for row in best.values():
        programs.setdefault(row.samples_ms or row.name, []).append(row)
    rows = sorted(programs.values(), key=lambda twins: _place(twins[0]))
    notes = {twins[0].note for twins in rows}
    shared = notes.pop() if len(rows) > 1 and len(notes) == 1 else ""
    candidates = []
    for row, *twins in rows:
        others = tuple(twin.name for twin in sorted(twins, key=_place))
        same = f"the same program as {', '.join(others)}" if others else ""
        few = row.time_ms is None or len(row.samples_ms) < _SPREAD_SAMPLES
        candidates.append(
            CandidateView(
                row=row,
                won=row.name == plan.winner,
                others=others,
                spread_ms=None if few else interquartile_range(row.samples_ms) / 2,
                note="" if shared else row.note or same,
            )
        )
    ran = words.has_raced(plan)
    able = [row for row, *_ in rows if not row.note]
    times = {row.name: row.time_ms for row in able if row.time_ms is not None}
    figures = times or {row.name: row.predicted_ms for row in able}
    own = figures.get(plan.winner)
    hidden = [row for row in plan.race if best[_base(row)] is not row]
    ran_all = not any(row.note for row in hidden)
    kind = "slower variant" if ran_all else "variant"
    variants = f"and {counted(len(hidden), kind, f'{kind}s')} of these"
    title = _UNMEASURED[plan.rung] if candidates else "Candidates"
    return RaceView(
        title="Race" if ran else title,
        ran=ran,
        candidates=tuple(candidates),
        shared_note=shared,
        slower=variants + ", slower or not run" * (not ran_all) if hidden else "",
        is_tie=own is not None and any(ms < own for ms in figures.values() if ms),
        has_rungs=any(row.rung != "measured" for row in plan.race),
    )


def _without_options(plan: Plan, rival: str) -> str:
    """Compares a plan with a rival that did not run with its compiler options.

    What has the memory limit did not run, or did not fit, without options.
    """
    if MEMORY_SHARE in plan.options:
        return ""
    plain, _, option = plan.winner.rpartition(", ")
    times_ms = {row.name: row.time_ms for row in plan.race if not row.note}
    own_ms = times_ms.get(plain)
    if not plan.options or own_ms is None or rival.endswith(f", {option}"):
        return ""
    return f"; the plan without its own compiler options: {own_ms:.3f} ms"


def _reasons(plan: Plan, race: RaceView) -> tuple[str, str]:
    """Explains how a plan was chosen: briefly, and in sentences, if it was searched."""
    rung = plan.rung
    ran = [c for c in race.candidates if c.row.time_ms is not None and not c.row.note]
    own = next((one for one in ran if one.won), None)
    twins = " and ".join(own.others) if own else ""
    same = f", the same program as {twins}" if twins else ""
    also = f"; {twins} gave the same program" if twins else ""
    place = "as fast as the fastest" if race.is_tie else "the fastest"
    others = [one for one in ran if not one.won]
    some_over = any(row.note and row.time_ms is not None for row in plan.race)
    and_fit = " and fit" * some_over
    if others:
        name, time_ms = others[0].row.name, others[0].row.time_ms
        then, own_ms = "", own.row.time_ms if own else None
        if time_ms and own_ms and time_ms * (1.0 + ALIKE) < own_ms:
            # In earlier turns, at other clocks, in which the winner was faster still.
            place, then = "the fastest, timed again,", " in earlier turns"
        against = f", against {own.row.time_ms:.3f} ms" if own else ""
        names = " or ".join([name, *others[0].others])
        plain = _without_options(plan, name)
        return (
            f"{place} of {len(ran)}{' that fit,' * some_over} raced on the whole step"
            f"{same}; next, {name}: {time_ms:.3f} ms{then}{plain}",
            f"Why: it is {place} of {len(ran)} programs that were timed{and_fit}"
            f"{also}. Next: {names}, {time_ms:.3f} ms{then}{against}{plain}.",
        )
    if ran:
        alone = "of those timed on the whole step the only one that fits"
        return (
            f"{alone if some_over else 'timed on the whole step, by itself'}{same}",
            f"Why: no other program was timed{and_fit}{also}.",
        )
    why = ""
    if plan.predicted_ms is not None:
        best = "as good as the best" if race.is_tie else "the best"
        why = f"Why: it is {best} by prediction; no whole step was timed."
    if plan.predicted_ms is not None and rung == "estimated":
        chosen = "by estimates; nothing was measured or compiled"
    elif plan.predicted_ms is not None:
        chosen = "by prediction, without a race"
    else:
        chosen = "by its name"
    return chosen, why

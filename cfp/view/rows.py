"""Tables of a plan, made once for text and page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from math import inf
from typing import Any

from cfp.plan.parts import MoveFigure, PlanRow, roles_text
from cfp.plan.plan import Plan
from cfp.printable import counted, few, format_bytes, merged_name, span_text
from cfp.profiling.runner import interquartile_range
from cfp.race.programs import NOT_RUN, SAME_AS, TOO_LARGE, RaceRow
from cfp.settings import ALIKE
from cfp.view import words
from cfp.view.console import Rows, row_of

_SIZE = re.compile(r" [\d.]+ (B|[KMG]iB)")
# Least number of samples to show their spread.
_SPREAD_SAMPLES = 4


def ms_text(value: float | None, form: str = ".3f") -> str:
    """Formats milliseconds, without the unit; a dash for None."""
    return "-" if value is None else format(value, form)


# ----------------------------------------------------------------------------- segments


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """The same block of several segments that are alike.

    Attributes:
        row: a block with the most frequent collectives; the first and last segments may
            have others.
        members: the block's index in the plan, for each of the segments.
        name: merged name: ``Net/layer_0-3/up``.
        path: the name without the module that contains all blocks.
        sharded: text on the dims that each axis shards.
        source: lines of the anchors; "" if unknown.
        arguments: names of the arguments that the blocks read.
        exceptions: texts on other collectives of some segments.
    """

    row: PlanRow
    members: tuple[int, ...]
    name: str
    path: str
    sharded: str
    source: str
    arguments: tuple[str, ...]
    exceptions: tuple[str, ...]

    @property
    def collectives(self) -> str:
        """Text on the most frequent collectives, and the exceptions."""
        return "; ".join([words.moves_text(self.row.moves), *self.exceptions])


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentView:
    """Alike segments: one of each repeat of a run of segments.

    Attributes:
        indices: the segments' numbers.
        parameters: text on storage, kernels and rematerialization.
        time_ms: time of each segment; None if unknown.
        ends: True for the last segment of a run, which may occur once.
    """

    indices: tuple[int, ...]
    parameters: str
    time_ms: float | None
    blocks: tuple[BlockView, ...]
    ends: bool


def segments_of(plan: Plan) -> tuple[SegmentView, ...]:
    """Groups alike segments of runs that repeat back to back, in order.

    Segments of one kind are alike if all their choices are equal.
    """
    parts = [[*rows] for _, rows in groupby(plan.rows, key=lambda row: row.segment)]
    segments = [plan.segments[rows[0].segment] for rows in parts]
    texts = [words.storage_text(plan, rows[0].segment) for rows in parts]
    marks = [
        (segment.kind, text, *((row.op, row.strategy) for row in rows))
        for segment, text, rows in zip(segments, texts, parts, strict=True)
    ]
    first = {row.name.partition("/")[0] for row in plan.rows}
    has_one = len(first) == 1 and all("/" in row.name for row in plan.rows)
    prefix = f"{first.pop()}/" if has_one else ""
    at, found = 0, []
    while at < len(parts):
        period, count = _longest_repeat(marks, at)
        for place in range(at, at + period):
            twins = parts[place : at + period * count : period]
            found.append(
                SegmentView(
                    indices=tuple(rows[0].segment for rows in twins),
                    parameters=texts[place],
                    time_ms=segments[place].time_ms,
                    blocks=tuple(
                        _block(column, prefix) for column in zip(*twins, strict=True)
                    ),
                    ends=place == at + period - 1,
                )
            )
        at += period * count
    return tuple(found)


def _longest_repeat(marks: Sequence[tuple], at: int) -> tuple[int, int]:
    """Returns (marks in the period, count) of the longest repeat at `at`, or (1, 1)."""
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
    """Merges the same block of several segments; compares collectives without sizes.

    A collective's size may differ a little, since some tensors belong to no one block.
    """
    kinds: dict[str, list[PlanRow]] = {}
    for twin in twins:
        text = words.moves_text(twin.moves)
        kinds.setdefault(_SIZE.sub("", text), []).append(twin)
    common, *others = sorted(
        kinds.values(), key=lambda group: (-len(group), -group[-1].segment)
    )
    row = common[len(common) // 2]
    exceptions = []
    for group in others:
        text = words.moves_text(group[0].moves)
        span = span_text([one.segment for one in group])
        exceptions.append(f"but in segment {span}: {'none' if text == '-' else text}")
    return BlockView(
        row=row,
        members=tuple(twin.block for twin in twins),
        name=merged_name([twin.name for twin in twins]),
        path=merged_name([twin.name.removeprefix(prefix) for twin in twins]),
        sharded=roles_text(row.strategy),
        source=few([one.source for one in twins if one.source]),
        arguments=tuple(name for twin in twins for name in twin.arguments),
        exceptions=tuple(exceptions),
    )


def update_texts(updates: Sequence[BlockView]) -> tuple[str, str, str]:
    """Describes an optimizer update's blocks together.

    Returns:
        Texts: a name, the number of blocks that each axis shards, and collectives.
    """
    axes = Counter(one.axis for block in updates for one in block.row.strategy)
    parts = [f"{axis}: {n} of {len(updates)}" for axis, n in sorted(axes.items())]
    moves = merged_moves(move for block in updates for move in block.row.moves)
    many = counted(len(updates), "block", "blocks")
    name = f"optimizer update ({many} that no product reads)"
    return name, "; ".join(parts) or "replicated", words.moves_text(moves)


def blocks_rows(segments: Sequence[SegmentView]) -> Rows:
    """Tabulates blocks; alike segments, equal neighbours, and updates share rows."""
    rows = []
    for segment in segments:
        count, time_ms = len(segment.indices), segment.time_ms
        first = span_text([*segment.indices]) + f" ({count} x)" * (count > 1)
        times = f"{count} x " * (count > 1 and time_ms is not None)
        plain = [block for block in segment.blocks if not block.row.updates]
        cells = [(one.path, one.sharded, one.collectives) for one in plain]
        if updates := [block for block in segment.blocks if block.row.updates]:
            cells.append(update_texts(updates))
        made, last = [], (segment.parameters, times + ms_text(time_ms, ".3g"))
        for path, sharded, moved in merge_neighbours(cells):
            made.append(row_of(first, path, sharded, last[0], moved, last[1]))
            first, last = "", ("", "")
        made[0] = replace(made[0], bar=None if time_ms is None else count * time_ms)
        made[-1] = replace(made[-1], ends=segment.ends)
        rows += made
    headings = ("segment", "block", "sharded", "parameters", "collectives")
    return Rows(title="Blocks", headings=(*headings, "segment ms"), rows=rows)


def merge_neighbours(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Merges neighbours (name, ...) that differ in the name after ``#`` alone."""
    keyed = ((row[0].partition("#")[0], *row[1:], row[0]) for row in rows)
    for (_, *rest), same in groupby(keyed, lambda row: row[:-1]):
        yield merged_name([row[-1] for row in same]), *rest


def merged_moves(moves: Iterable[MoveFigure]) -> tuple[MoveFigure, ...]:
    """Sums collectives by kind and axes, most bytes first; a time is None if one is."""
    found: dict[tuple[str, tuple[str, ...]], MoveFigure] = {}
    for move in moves:
        if (sum_ := found.get((move.kind, move.axes))) is not None:
            times = sum_.time_ms, move.time_ms
            move = replace(
                move,
                count=sum_.count + move.count,
                total_bytes=sum_.total_bytes + move.total_bytes,
                time_ms=None if None in times else sum(filter(None, times)),
            )
        found[move.kind, move.axes] = replace(move, turns=1)
    every = found.values()
    return tuple(sorted(every, key=lambda move: (-move.total_bytes, move.kind)))


# --------------------------------------------------------------------------------- race


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateView:
    """A program of the race, with all its names.

    Attributes:
        row: the row of the winner, or else of the program's first variant by `_place`.
        won: True for the plan's program.
        others: names of other candidates with the same program.
    """

    row: RaceRow
    won: bool
    others: tuple[str, ...]


def _place(row: RaceRow) -> tuple[bool, float, float]:
    """Sort key: by measured, then predicted time; rows with a note last."""
    return bool(row.note), row.time_ms or inf, row.predicted_ms or inf


def candidates_of(plan: Plan) -> tuple[CandidateView, ...]:
    """Lists each candidate's winning or else first variant, sorted by `_place`.

    A variant's name is the candidate's, a comma, and its difference. Candidates with
    the same program share a row, under the winner's name if they won.
    """
    best: dict[str, RaceRow] = {}
    for row in sorted(plan.race, key=lambda r: (r.name != plan.winner, *_place(r))):
        best.setdefault(row.name.partition(", ")[0], row)
    programs: dict[object, list[RaceRow]] = {}
    for row in best.values():
        twin = row.note.partition(SAME_AS)[2]
        programs.setdefault(row.samples_ms or twin or row.name, []).append(row)
    return tuple(
        CandidateView(
            row=row,
            won=row.name == plan.winner,
            others=tuple(twin.name for twin in sorted(twins, key=_place)),
        )
        for row, *twins in sorted(programs.values(), key=lambda t: _place(t[0]))
    )


def chosen_text(plan: Plan) -> str:
    """Describes how a plan was chosen: by a race, prediction, estimates or name."""
    every = candidates_of(plan)
    ran = [o for o in every if o.row.time_ms is not None and not o.row.note]
    own = next((one for one in ran if one.won), None)
    twins = [name for one in every if one.won for name in one.others]
    same = f", {SAME_AS}{' and '.join(twins)}" if twins else ""
    some_over = any(row.note and row.time_ms is not None for row in plan.race)
    if len(ran) > 1:
        rival = next(one for one in ran if not one.won)
        own_ms = (own or ran[0]).row.time_ms or 0.0
        rival_ms, then, place = rival.row.time_ms or 0.0, "", "the fastest"
        if rival_ms * (1.0 + ALIKE) < own_ms:
            # Its time is of earlier turns, at other clocks; the winner was faster then.
            place, then = "the fastest, timed again,", " in earlier turns"
        elif rival_ms < own_ms:
            place = "as fast as the fastest"
        names = " or ".join([rival.row.name, *rival.others])
        raced = f"of {len(ran)}{' that fit,' * some_over} raced on the whole step"
        return f"{place} {raced}{same}; next, {names}: {rival_ms:.3f} ms{then}"
    if ran and some_over:
        return f"of those timed on the whole step the only one that fits{same}"
    if ran:
        return f"timed on the whole step, by itself{same}"
    if plan.predicted_ms is None:
        unknown = "the only program known to fit; its time is unknown"
        return "the given preset" if words.unsearched_text(plan) else unknown
    if plan.rung == "estimated":
        rivals = [r.row for r in every if not r.won and r.row.note in ("", NOT_RUN)]
        what = "run" if plan.peak_bytes else "run or compiled"
        was_searched = any(row.name.startswith("planned") for row in plan.race)
        how = "by estimates" if was_searched else "the given preset"
        times = [(row.predicted_ms, row.name) for row in rivals if row.predicted_ms]
        then = "; next, {1}: {0:.3f} ms".format(*min(times)) if times else ""
        return f"{how}{same}; nothing was {what}{then}"
    return "by prediction, without a race"


def race_rows(plan: Plan) -> Rows:
    """Tabulates `candidates_of` a plan, raced or not; notes count other variants."""
    found = candidates_of(plan)
    notes = {one.row.note for one in found}
    shared = notes.pop() if len(found) > 1 and len(notes) == 1 else ""
    rows = []
    for one in found:
        row, same = one.row, f"{SAME_AS}{', '.join(one.others)}" * bool(one.others)
        spread = "-"
        if row.time_ms is not None and len(row.samples_ms) >= _SPREAD_SAMPLES:
            spread = f"{interquartile_range(row.samples_ms) / 2:.2g}"
        bar = row.predicted_ms if row.time_ms is None else row.time_ms
        sizes = [format_bytes(row.peak_bytes) if row.peak_bytes else "-", "-"]
        if row.note not in (NOT_RUN, TOO_LARGE):  # These are not compiled.
            sizes.reverse()
        rows.append(
            row_of(
                *("*" if one.won else "", row.name, ms_text(row.predicted_ms)),
                *(ms_text(row.time_ms), spread, *sizes),
                "; ".join(filter(None, ["" if shared else row.note, same])),
                won=one.won,
                bar=bar,
            )
        )
    shown = {name for one in found for name in (one.row.name, *one.others)}
    hidden = [row for row in plan.race if row.name not in shown]
    more = f"and {counted(len(hidden), 'variant', 'variants')} of these"
    below = [f"Each: {shared}"] * bool(shared) + [more] * bool(hidden)
    title = {"measured": "Predictions", "estimated": "Estimates"}[plan.rung]
    how = words.predicted_how(plan)
    headings = (" ", "plan", f"{how} ms", "measured ms", "+-", f"{how} memory")
    return Rows(
        title="Race" if any(row.samples_ms for row in plan.race) else title,
        headings=(*headings, "compiled memory", "note"),
        rows=rows,
        notes=below,
    ).filled()


def variants_rows(plan: Plan) -> Rows:
    """Tabulates the compared meshes and microbatches by step time, then estimate."""
    figures = plan.figures
    every = figures.variants if figures else ()
    rows = [
        row_of(
            *("*" if one.taken else "", one.name, ms_text(one.estimated_ms)),
            *(ms_text(one.step_ms), one.note),
            won=one.taken,
            bar=one.step_ms or one.estimated_ms,
        )
        for one in sorted(
            every, key=lambda v: (v.step_ms is None, v.step_ms or v.estimated_ms or inf)
        )
    ]
    headings = (" ", "variant", "estimated before ms", "step ms", "note")
    alone = "Step times: from each plan's own race or prediction."
    raced = "Step times: the fastest plan of each, timed in turn in one race."
    note = raced if figures and figures.variants_raced else alone
    title = "Meshes and microbatches compared"
    return Rows(title=title, headings=headings, rows=rows, notes=(note,)).filled()


# -------------------------------------------------------------- more, on a page alone


def more_rows(plan: Plan) -> Iterator[Rows]:
    """Makes the page's last tables: memory, collectives, strategies, arguments, ..."""
    yield memory_rows(plan)
    moves = merged_moves(move for row in plan.rows for move in row.moves)
    yield Rows(
        title="Collectives of all blocks",
        headings=("collective", "axes", "times", "bytes", "ms"),
        rows=[
            row_of(
                *(move.kind, ", ".join(move.axes), str(move.count)),
                *(format_bytes(move.total_bytes), ms_text(move.time_ms)),
                bar=move.total_bytes,
            )
            for move in moves
        ],
        notes=(
            "Collectives of the plan; the compiler may merge some. Milliseconds: each "
            "launched alone.",
        ),
    )
    kinds = plan.figures.kinds if plan.figures else ()
    yield from (strategies_rows(plan, kind) for kind in range(len(kinds)))
    arguments = zip(
        *(plan.arg_names, plan.arg_types, plan.arg_specs, plan.donated), strict=True
    )
    yield Rows(
        title="Arguments",
        headings=("path", "tensor", "donated"),
        rows=[
            row_of(*(path, words.tensor_text(kind, spec)), "yes" if donated else "no")
            for path, kind, spec, donated in arguments
        ],
    )
    options = {f"compiler option {name}": v for name, v in plan.options.items()}
    made_with = {"program": plan.fingerprint[:12], **plan.environment, **options}
    yield Rows(
        title="Made with",
        headings=("what", "which"),
        rows=[row_of(*pair) for pair in made_with.items()],
    )


def strategies_rows(plan: Plan, kind: int) -> Rows:
    """Tabulates a kind's used strategies, and others smaller than all faster ones."""
    figures, sizes = plan.figures, list[int]()
    assert figures is not None
    rows, budget, every = [], figures.budget_bytes, figures.kinds[kind].options
    for one in sorted(every, key=lambda one: (one.step_ms, one.memory_bytes)):
        if not one.taken and any(size <= one.memory_bytes for size in sizes):
            continue
        sizes.append(one.memory_bytes)
        rows.append(
            row_of(
                "*" if one.taken else "",
                *(one.name, words.strategy_text(one.strategy)),
                *(ms_text(one.step_ms), format_bytes(one.memory_bytes)),
                *(ms_text(one.segment_ms), str(one.taken)),
                "does not fit" * (budget is not None and one.memory_bytes > budget),
                bar=one.step_ms,
                won=bool(one.taken),
            )
        )
    notes = ["Time and memory of the whole step if these segments take the strategy."]
    notes += ["A strategy of the plan was not measured alone."] * (not figures.picks)
    more = counted(n := len(every) - len(rows), *words.STRATEGIES) + " not shown"
    notes += [f"{more}: no faster, in no less memory (all: --json)."] * (n > 0)
    memory = f"{words.predicted_how(plan)} memory"
    headings = ("strategy", "what it does", "step ms", memory, "segment ms")
    return Rows(
        title=f"Strategies {words.known_how(plan)}: {figures.kinds[kind].name}",
        headings=(" ", *headings, "taken by", "note"),
        rows=rows,
        notes=notes,
    ).filled()


def memory_rows(plan: Plan) -> Rows:
    """Tabulates known memory: predicted parts of the peak, compiled memory, budget."""
    figures, parts = plan.figures, {}
    if figures and figures.picks:
        taken = [figures.kinds[k].options for k in figures.segment_kinds]
        options = [ways[pick] for ways, pick in zip(taken, figures.picks, strict=True)]
        kept = accumulate(one.residual_bytes for one in options)
        temps = (one.temp_bytes for one in options)
        residual, temp = max(zip(kept, temps, strict=True), key=sum)
        parts = {
            "needed by every choice": figures.fixed_bytes,
            "parameters and optimizer state": sum(one.state_bytes for one in options),
            "residuals, kept for backward": residual,
            "temporaries": temp,
        }
        parts[f"together, {words.predicted_how(plan)}"] = sum(parts.values())
    parts["the program, compiled"] = plan.peak_bytes or 0
    parts["budget"] = (figures and figures.budget_bytes) or 0
    return Rows(
        title="Memory of each device",
        headings=("at the peak", "bytes"),
        rows=[
            row_of(name, format_bytes(size), bar=size)
            for name, size in parts.items()
            if size
        ],
    )

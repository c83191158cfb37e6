"""Remarks on a plan: what it does not shard, keep or know, and what it gains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

from cfp.devices.device_kind import memory_of
from cfp.plan.figures import (
    GIVEN_SECONDS,
    UNPLANNED,
    VARIANTS_SECONDS,
    Figures,
    VariantFigures,
)
from cfp.plan.parts import INDIVISIBLE, NOT_CHOSEN
from cfp.plan.plan import Plan
from cfp.printable import counted, merged_alike
from cfp.program.fp8 import TAKEN
from cfp.race.programs import TOO_LATE
from cfp.search.requests import UNMEASURED_STRATEGIES
from cfp.settings import Dimension, defaults_of
from cfp.units import format_bytes, overtime_text
from cfp.view import words
from cfp.view.words import few

_WORTH_DONATING = 0.02  # of the memory that a plan needs
# Of a GPU's memory what JAX takes by default, and what the driver leaves of that.
_USUAL_SHARE = 0.70, 0.76


def remarks(plan: Plan) -> Iterator[str]:
    """Lists what a plan does not shard, keep or know, though users may expect it."""
    search, figures = plan.search, plan.figures
    if unplanned := unplanned_text(plan):
        yield unplanned
    given = search.get(GIVEN_SECONDS)
    took = search.get(VARIANTS_SECONDS, search.get(words.ALL_SECONDS, 0.0))
    if given is not None and (
        overtime := overtime_text("planning", took - given, given)
    ):
        yield overtime
    if unmeasured := search.get(UNMEASURED_STRATEGIES):
        yield (
            "time was too short to measure "
            f"{counted(unmeasured, 'strategy', 'strategies')}: a longer --time-budget, "
            "or PlannerSettings(seconds=...), has time for them, and what was measured "
            "is kept"
        )
    late = sum(row.note == TOO_LATE for row in plan.race)
    if late and len({row.samples_ms for row in plan.race if row.samples_ms}) == 1:
        others = "the other" if late == 1 else f"any of {late} others"
        yield (
            f"no comparison: time was over before {others} was compiled; "
            "a longer --time-budget, or PlannerSettings(seconds=...), has time for them"
        )
    yield from _whole_remarks(plan)
    if crossing := plan.environment.get("crosses_hosts"):
        yield f"goes from host to host: {crossing}"
    if words.is_mostly_launches(plan):
        yield (
            f"below {words.SHORT_STEP_MS:g} ms launches of kernels and collectives, "
            "which estimates mostly leave out, take most of a step: expect more"
        )
    yield from plan.site_checks
    loops = [text for text in plan.uncounted if text.startswith("while")]
    if loops:
        yield (
            "counted as one iteration, in predictions too, since the program does not "
            f"say how many: {few(loops)}"
        )
    if branches := [text for text in plan.uncounted if text not in loops]:
        yield (
            "timed with the branch that was taken meanwhile, and predicted with all: "
            f"a step with another branch may take longer: {few(branches)}"
        )
    if words.known_how(plan) == "estimated" and plan.rung == "measured":
        raced = sum(bool(row.samples_ms) for row in plan.race)
        alone = "nothing" if plan.measured_ms is None else "only the plan's own step"
        timed = f"{'only the race' if raced > 1 else alone} was timed"
        if words.WAS_DESCRIBED in search:
            yield f"predictions are estimates of described devices; {timed}"
        else:
            chosen = (
                "they choose what is raced, and the timed race the plan"
                if raced > 1
                else f"they choose the plan; {timed}"
            )
            yield (
                f"predictions are estimates: on virtual devices {chosen} "
                "(measure=True, --measure: more)"
            )
    if ties := search.get("ties", 0):
        others = "others were" if ties > 1 else "other was"
        within = f"{search.get('tie_spread', 0.0):.1%}"
        yield (
            f"a tie: {ties:.0f} {others} as fast, within {within}; the simplest of "
            "them is the plan"
        )
    undonated = search.get("undonated_bytes", 0)
    if undonated > _WORTH_DONATING * (plan.peak_bytes or plan.predicted_bytes or 0):
        roots = dict.fromkeys(plan.arg_names[i].split("/")[0] for i in plan.undonated)
        yield (
            f"the state is there twice: donate {few([*roots]) or 'it'} "
            f"(donate_argnums, --donate), and {format_bytes(undonated)} of each device "
            "are free"
        )
    yield from _budget_remarks(plan)
    if remat_untried(plan):
        yield "rematerialization: not tried, the plan fits by prediction without it"
    if plan.in_host:
        yield _in_host_text(plan)
    if plan.uneven:
        yield f"whole, since the mesh does not divide it: {few(plan.uneven)}"
    if plan.replicated_ops:
        ops = few(plan.replicated_ops)
        yield f"every device runs in full, with its share of all bytes made: {ops}"
    foreign = [text for text in plan.replicated_ops if text.startswith("custom_")]
    if not all(INDIVISIBLE in text or NOT_CHOSEN in text for text in foreign):
        yield (
            "a kernel is sharded by a rule that it brings: custom_partitioning with "
            "sharding_rule=, or shard_map; see docs/performance.md"
        )
    if figures and figures.kernels:
        yield f"kernels that are sharded: {few(figures.kernels)}"
    if plan.host_callbacks_skipped:
        yield f"not called while it was measured: {few(plan.host_callbacks_skipped)}"
    yield from _replaced_remarks(plan)
    if figures is not None:
        yield from _worth_remarks(plan)
        refused = [f"by {o.kernel}: {o.reason}" for o in figures.left if o.kernel]
        as_written = [one for one in figures.left if not one.kernel]
        reasons = [one.reason for one in as_written]
        if refused:  # They say it of each kernel.
            reasons = [one for one in reasons if one != words.NONE_CAN]
        if reasons:
            yield f"attention as written: {few(reasons, '; ')}"
        if refused:
            yield f"attention not {few(refused, '; ')}"
    if text := words.unscattered_text(plan):
        yield text
    if count := search.get("constraints_left_out", 0):
        what = f"{count:.0f} of the step's own sharding constraints"
        yield f"left out: {what}, since the plan decides"
    if plan.products:
        yield precision_text(plan)
    if count := search.get("wide_sums", 0):
        what = counted(count, "scatter", "scatters")
        yield (
            f"summed in float32 instead of 16 bits: {what} (gradients of lookups, sums "
            "of segments)"
        )


def precision_text(plan: Plan) -> str:
    """Says how many products are computed in FP8, and why the others are not."""
    taken = plan.products.get(TAKEN, 0)
    left = [f"{n} ({why})" for why, n in plan.products.items() if why != TAKEN]
    text = f"computed in FP8: {taken} of {sum(plan.products.values())} 16-bit products"
    return f"{text}; as written: {', '.join(left)}" if left else text


def unplanned_text(plan: Plan) -> str:
    """Describes the variants that there was no time to plan; "" if there are none."""
    every = plan.figures.variants if plan.figures else ()
    late = [one for one in every if one.note.startswith(UNPLANNED)]
    if not late:
        return ""
    own = next((one.estimated_ms for one in every if one.taken), None)

    def estimate(one: VariantFigures) -> str:
        if one.estimated_ms is None:
            return f"{one.name}, not estimated"
        is_tie = own is not None and abs(one.estimated_ms - own) <= words.SAME_MS
        text = f"{one.name}, estimated at {one.estimated_ms:.3f} ms"
        return text + " like this one" * is_tie

    texts = [*map(estimate, late)]
    if (more := len(late) - words.MOST_NAMES) > 0:
        texts[words.MOST_NAMES :] = [counted(more, "other variant", "other variants")]
    if own is not None and any(one.estimated_ms not in (None, own) for one in late):
        texts.append(f"this one, before it was planned, at {own:.3f} ms")
    return (
        f"time was over before {counted(len(late), 'variant', 'variants')} of "
        f"{len(every)} could be planned: {'; '.join(texts)}; a longer "
        "--time-budget, or PlannerSettings(seconds=...), has time for them"
    )


def _whole_remarks(plan: Plan) -> Iterator[str]:
    """Says of a plan that has all blocks on every device that this gains little."""
    devices = prod(size for _, size in plan.mesh_axes)
    is_whole = devices > 1 and plan.arg_specs and not words.is_sharded(plan)
    if not is_whole and not words.runs_whole(plan):
        return
    others = [
        f" (the best with all blocks data parallel: {one.without_ms:.3f} ms, this one "
        f"{one.with_ms:.3f}, {'measured' if one.is_measured else 'predicted'})"
        for one in (plan.figures.worth if plan.figures else ())
        if one.name == Dimension.SHARDING and one.without_ms is not None
    ]
    slow = f"{devices} devices are no faster than one for this step{''.join(others)}"
    instead = ": use one, or a larger batch"
    if is_whole:
        yield (
            f"nothing is sharded: {slow}, and every device runs in full what one "
            f"would{instead}"
        )
    else:
        yield (
            f"all blocks run whole on each of the {devices} devices: but for the "
            f"update of what is stored in parts, {slow}{instead}"
        )


def remat_untried(plan: Plan) -> bool:
    """True if a search under a memory limit had no need to rematerialize anything."""
    figures = plan.figures
    if figures is None or figures.budget_bytes is None or words.unsearched_text(plan):
        return False
    if figures.chosen and Dimension.REMAT not in figures.chosen:
        return False
    options = [one for kind in figures.kinds for one in kind.options]
    return (
        not any(one.rematerialized for one in plan.segments)
        and not any(one.strategy.rematerialized for one in options)
        and any(one.taken for one in options)
        and all(
            one.memory_bytes <= figures.budget_bytes for one in options if one.taken
        )
    )


def _budget_remarks(plan: Plan) -> Iterator[str]:
    """Describes the share of a device's memory that a plan may use."""
    budget = plan.figures.budget_bytes if plan.figures else None
    if budget is None:
        return
    whole = memory_of(plan.environment.get("device_kind", ""))
    text, kept = f"a plan may use {format_bytes(budget)} of ", reserve_text(plan)
    if whole is None or budget > whole:
        yield f"{text}each device{kept}"
        return
    by_default = _USUAL_SHARE[0] <= budget / whole <= _USUAL_SHARE[1]
    why = ", what JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
    why = kept or why * by_default
    yield f"{text}the {format_bytes(whole)} of each device{why}"


def reserve_text(plan: Plan) -> str:
    """Describes what of a budget is not for the plan; "" if nothing is held back."""
    budget = plan.figures.budget_bytes if plan.figures else None
    reserve = round(plan.search.get(words.RESERVE_BYTES, 0.0))
    if budget is None or not reserve:
        return ""
    asked, kept = map(format_bytes, (budget + reserve, reserve))
    return f": the budget of {asked} less {kept} that the allocator may add"


def _in_host_text(plan: Plan) -> str:
    """Describes what a plan keeps in the memory of the host, and its cost.

    What that frees is on each device; the time is what copies take one after another.
    """
    names = few(merged_alike([plan.arg_names[i] for i, _ in plan.in_host]))
    size = plan.search.get("host_bytes")
    text = f"in the memory of the host between steps: {len(plan.in_host)} arguments"
    if size is not None:
        text += f", {format_bytes(round(size))} for each device"
    text += f" ({names})" + (", without which nothing fits" if size is not None else "")
    if (moved_ms := plan.search.get("host_ms")) is not None:
        text += f"; to move it and back takes up to {moved_ms:.3f} ms, estimated"
    if (unfit_ms := plan.search.get("unfit_ms")) is not None:
        text += f"; the fastest that does not fit: {unfit_ms:.3f} ms, predicted"
    return text


_PLURALS = {"attention": "attentions"}
_RINGS = {"ring", "zigzag"}


def _replaced_remarks(plan: Plan) -> Iterator[str]:
    """Describes what the plan replaces in the step."""
    ops = {(one.name, one.op): one.functions.how for one in plan.constraints.replaced}
    counts = Counter((name, _way_words(how)) for (name, _), how in ops.items())
    if not counts:
        return
    parts = [
        f"{count} {name if count == 1 else _PLURALS.get(name, name)} {how}"
        for (name, how), count in counts.items()
    ]
    yield (
        f"replaced, in the same dtypes: {', '.join(parts)}; as written by "
        "--attention none, or PlannerSettings(attention=())"
    )


def _way_words(how: Sequence[str]) -> str:
    first, *roles = how
    rings = {role.rpartition("=")[2] for role in roles} & _RINGS
    return f"by {first}{''.join(f' in a {ring}' for ring in sorted(rings))}"


def _worth_remarks(plan: Plan) -> Iterator[str]:
    """Describes what a plan was chosen among, and the gain of each kind of choice."""
    figures = plan.figures
    assert figures is not None
    if figures.chosen and len(figures.chosen) < len(Dimension):
        what = ", ".join(figures.chosen)
        yield f"chosen among {what} alone, as choose= (--choose) asks"
    elif figures.variants and (untried := _untried(plan, figures)):
        yield f"not tried: {'; '.join(untried)}"
    own_ms, how = plan.measured_ms, "in its own race" * figures.variants_raced
    if words.VERIFIED in plan.search:
        how = "as verified"
    own = f"; {own_ms:.3f} ms {how}" if how and own_ms else ""
    for one in figures.variants:
        if one.note.startswith(UNPLANNED):
            continue
        this = f" (this one{own})" if one.taken else ""
        yield f"variant {one.name}: {_variant_text(one, figures.variants_raced)}{this}"
    for how, is_measured in (("as measured", True), ("by prediction", False)):
        parts = []
        for one in figures.worth:
            of_variants = one.name in (Dimension.MESH, Dimension.MICROBATCHES)
            is_noise = is_measured and words.is_rough(plan) and not of_variants
            if one.is_measured is not is_measured or is_noise:
                continue
            is_sharding = one.name == Dimension.SHARDING
            if is_sharding and (words.runs_whole(plan) or not words.is_sharded(plan)):
                continue
            if one.without_ms is None:
                parts.append(f"{one.name}, without which nothing fits")
            elif abs(one.without_ms - one.with_ms) >= words.SAME_MS:
                plain = ", against all blocks data parallel" * is_sharding
                gain_ms = one.without_ms - one.with_ms
                parts.append(f"{one.name} {gain_ms:.3f} ms{plain}")
        if parts:
            yield f"worth {how}: {'; '.join(parts)}"


def _untried(plan: Plan, figures: Figures) -> list[str]:
    """Lists kinds of choices that devices have none of, or for which there was no need.

    None where nothing was searched. `remat_untried` is a remark of its own.
    """
    platform = plan.environment.get("platform", "")
    tried = [one.strategy for kind in figures.kinds for one in kind.options]
    if not tried or words.WAS_DESCRIBED in plan.search:
        return []
    usual = defaults_of(platform)
    has_kernels = usual.replacing.attention or any(one.kernels for one in tried)
    has_options = usual.compiler_options or plan.options
    none = ["kernels"] * (not has_kernels) + ["compiler options"] * (not has_options)
    found = [f"{' and '.join(none)} (none by default on {platform})"] if none else []
    if (
        has_options
        and not plan.options
        and prod(size for _, size in plan.mesh_axes) == 1
    ):
        found.append("compiler options (for collectives, of which one device has none)")
    if figures.budget_bytes is None and not any(one.rematerialized for one in tried):
        found.append("rematerialization (without a memory budget)")
    if not plan.in_host:
        found.append("host memory (only where nothing fits)")
    return found


def _variant_text(one: VariantFigures, raced: bool) -> str:
    """A variant's time, and its estimate before it was planned: of another plan."""
    where = " in the race of the variants" * raced
    time = [] if one.step_ms is None else [f"{one.step_ms:.3f} ms{where}"]
    if one.estimated_ms not in (None, one.step_ms):
        time.append(f"its best by estimate, before planning, {one.estimated_ms:.3f} ms")
    return ", ".join(time) or one.note or "not timed"

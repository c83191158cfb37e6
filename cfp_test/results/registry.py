"""Every page of docs/results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cfp_test.bench import (
    call_overhead,
    chosen_page,
    one_as_n,
    one_as_n_page,
    one_gpu,
    planned_on_one_page,
    planning_time_page,
    played_four_page,
    played_links_page,
    played_page,
    worth,
)
from cfp_test.proving import page as proved
from cfp_test.random_steps import page as random_page
from cfp_test.results import (
    attention,
    budgets,
    building,
    by_hand,
    checked,
    doctor,
    mechanisms,
    memory,
    on_ray,
    operator_plans,
    operators,
    planning,
    ranges,
    scatters,
    schedules,
    seeds,
    several,
    side_by_side,
    soak,
)
from cfp_test.results.pages import RESULTS, Figures, Page, fixed, noted, table
from cfp_test.results.plans import Saved, section
from cfp_test.scripts import (
    curves_page,
    export_times,
    hostile_files,
    house,
    planning_ahead,
    plans_checked,
    prediction_page,
    same_plans,
    same_plans_gpu,
)


def _plans(nvlink: Mapping[str, Any], off: Mapping[str, Any]) -> Figures:
    """Saved plans: with NVLink, and without peer-to-peer access."""
    titles = ("NVLink", "NCCL_P2P_DISABLE=1 (as over PCIe)")
    lines = [
        line
        for title, data in zip(titles, (nvlink, off), strict=True)
        for line in section(title, Saved.from_json(data))
    ]
    return {"plans": "\n".join(lines)}


def _curves(*titles: str) -> Callable[..., Figures]:
    def figures(*data: Mapping[str, Any]) -> Figures:
        lines = [
            line
            for title, one in zip(titles, data, strict=True)
            for line in curves_page.section(title, curves_page.rates_of(one), 450.0)
        ]
        return {"curves": "\n".join(lines)}

    return figures


def _call_overhead(data: dict[str, Any]) -> Figures:
    return {"page": call_overhead.page(data)}


def _doctor(data: dict[str, Any]) -> Figures:
    return {"page": doctor.page(data)}


def _hostile(data: dict[str, Any]) -> Figures:
    return {"page": hostile_files.page(data)}


def _house(data: dict[str, Any]) -> Figures:
    return {"page": house.page(data)}


def _same_plans(data: dict[str, Any]) -> Figures:
    return {"page": same_plans.page(data)}


def _same_plans_h100(data: dict[str, Any]) -> Figures:
    return {"page": same_plans_gpu.page(data, "same_plans_h100_202611")}


def _same_plans_h200(data: dict[str, Any]) -> Figures:
    return {"page": same_plans_gpu.page(data, "same_plans_h200_202611")}


def _one_as_four(data: dict[str, Any]) -> Figures:
    return {"page": "\n".join(one_as_n_page.lines(data))}


def _seeds(data: dict[str, Any], *, name: str, devices: str) -> Figures:
    return {"page": seeds.page(data, name, devices)}


def _ray_builds(data: dict[str, Any]) -> Figures:
    return {"page": on_ray.builds(data)}


def _ray_kills(data: dict[str, Any]) -> Figures:
    return {"page": on_ray.kills(data)}


def _planned_on_one(data: dict[str, Any]) -> Figures:
    return {"page": planned_on_one_page.page(data)}


def _planning_ahead(data: dict[str, Any]) -> Figures:
    return {"page": planning_ahead.page(data)}


def _planning_time(data: dict[str, Any]) -> Figures:
    return {"page": planning_time_page.page(data)}


def _predictions(*runs: dict[str, Any]) -> Figures:
    missed = [
        plan["predicted_ms"] / plan["measured_ms"] - 1.0
        for run in runs
        for plan in run["plans"]
        if plan.get("measured_ms")
    ]
    return {
        "runs": "\n".join(
            line for run in runs for line in prediction_page.summary(run)
        ),
        "worst": f"{100 * max(missed, key=abs):+.1f}%",
    }


_GPT = tuple(f"gpt_h200x4_202611_{links}.json" for links in ("nvlink", "p2p_off"))
_GPT4 = tuple(f"gpt4_h200x4_202611_{links}.json" for links in ("nvlink", "p2p_off"))
_PLANNED = ("planning_h200x2_202611.json", "planning_budget_h200x2_202611.json")


# Of pages made before one device's computation ran on real numbers.
_TOO_SHORT = (
    "**Times of one GPU that plays several are too short on this page.** Their\n"
    "collectives did nothing, and what these left was soon NaN, at which a GPU keeps\n"
    "a higher clock: on real numbers fully sharded steps of GPT and LLaMA compute\n"
    "14 to 22 % longer ([measured](played_h200x2_202611.md)). What was predicted from\n"
    "such times has constants that made up for it. Memory, and what programs send,\n"
    "hold; the times were not measured again."
)


def _page(
    name: str, figures: Callable[..., Figures], *sources: str, note: str = ""
) -> Page:
    sources = sources or (f"{name}.json",)
    return Page(name=name, sources=sources, figures=figures, note=note)


_NOT_ITS_BEST = "moe, NCCL_P2P_DISABLE=1"
_OF_CELLS = {
    _NOT_ITS_BEST: "does not count: expert parallelism, whose activations were not "
    "constrained; by hand they were, for 59.6 ms, and the plan's 59.5 are 0.998 of it",
    "bert, 60%, NCCL_P2P_DISABLE=1": "at most 0.904 of the form that was not timed",
    "llama, NCCL_P2P_DISABLE=1": "the other form of the preset was not timed; by hand "
    "it is, for 154.9 ms, of which the plan takes 0.880",
    "bert, NCCL_P2P_DISABLE=1": "the other form of fully_sharded was not timed; by "
    "hand it is, for 132.7 ms in two samples, of which the plan takes 0.873",
    "llama, 100%, NCCL_P2P_DISABLE=1": "the other form was the faster in one race, "
    "176.2 and 178.6 ms: of it the plan may take 0.96",
}


def _with_noted(name: str, figures: Callable[..., Figures], *sources: str) -> Page:
    found = sources or (f"{name}.json",)
    return _page(name, figures, *found, f"{name}_noted.json")


# A page for each file that cfp_test/scripts/operators_gpu.py wrote.
_OPERATORS = tuple(
    Page(
        name=file.stem,
        sources=(file.name,),
        figures=operators.operators,
        has_text=False,
    )
    for file in sorted(RESULTS.glob("operators_*.json"))
)


_RESTART = ("definitions", "load", "devices", "restored", "restart")


def _tutorial(data: Mapping[str, Any]) -> Figures:
    """The tutorial's training on some machines, by the seconds of its parts."""
    rows, curves = [], []
    for run in data["runs"]:
        train, restart = run["train"], run["restart"]
        one, two = train["one_losses"], train["losses"]
        apart = max(abs(a - b) / a for a, b in zip(one, two, strict=True))
        rows.append(
            [
                f"two {train['kind']}",
                run["commit"],
                f"{apart:.1e}",
                fixed(statistics.median(train["one_ms"])),
                fixed(statistics.median(train["ms"])),
                fixed(train["plan_seconds"], 1),
                *(fixed(restart.get(f"{part}_seconds"), 1) for part in _RESTART),
            ]
        )
        curves += [
            [f"two {train['kind']}", step, fixed(one[step], 3), fixed(two[step], 3)]
            for step in range(0, len(one), 20)
        ]
    head = "devices | commit | losses off by | one, ms | two, ms | planned in s"
    head += (
        " | definitions s | plan loaded s | devices ready s | restored s | first step s"
    )
    curve = table("devices | step | loss on one | under the plan", curves)
    return {"times": table(head, rows), "curves": curve}


PAGES: tuple[Page, ...] = (
    *(
        Page(
            name=f"{name}_202611",
            sources=(f"{name}_202611.json",),
            figures=worth.page,
            has_text=False,
        )
        for name in ("worth_described_8xh100", "worth_h100x2")
    ),
    *(
        Page(
            name=f"{name}_202611",
            sources=(f"{name}_202611.json",),
            figures=side_by_side.page,
            has_text=False,
        )
        for name in (
            "suite_h200x2",
            "suite_again_h200x2",
            "suite_h100x2",
            "suite_slow_h200x2",
            "suite_budgets_h100x2",
            "suite_budgets_h200x2",
            "suite_cost_model_h200x2",
            "suite_cold_h100x2",
            "suite_cold_h200x2",
        )
    ),
    *_OPERATORS,
    *(
        Page(
            name=f"{name}_202611",
            sources=(f"{name}_202611.json",),
            figures=partial(_seeds, name=f"{name}_202611", devices=devices),
            has_text=False,
        )
        for name, devices in (
            ("seeds_h200x2", "two H200"),
            ("seeds_again_h200x2", "two H200"),
            ("seeds_h100x2", "two H100"),
            ("seeds_rings_h200x2", "two H200"),
            ("seeds_zigzag_h200x2", "two H200"),
            ("seeds_batches_h200x2", "two H200"),
            ("seeds_batches_h100x2", "two H100"),
        )
    ),
    _page("analysis_cpu_202611", checked.analysis),
    *(
        Page(
            name=f"rules_cpu_{month}",
            sources=tuple(
                file.name for file in sorted(RESULTS.glob(f"rules_*_{month}.json"))
            ),
            figures=proved.figures,
            has_text=False,
        )
        for month in sorted(
            {file.stem.split("_")[-1] for file in RESULTS.glob("rules_*.json")}
        )
    ),
    Page(
        name="attention_matrix_cpu_202611",
        sources=("attention_matrix_cpu_202611.json",),
        figures=attention.matrix,
        has_text=False,
    ),
    Page(
        name="attention_h200_202611",
        sources=("attention_h200_202611.json",),
        figures=attention.gpu,
        has_text=False,
    ),
    Page(
        name="attention_steps_h100_202611",
        note=_TOO_SHORT,
        sources=("attention_steps_h100_202611.json",),
        figures=attention.steps,
        has_text=False,
    ),
    Page(
        name="by_hand_h100x2_202611",
        sources=("by_hand_h100x2_202611.json",),
        figures=by_hand.by_hand,
        has_text=False,
    ),
    Page(
        name="attention_pair_h100x2_202611",
        sources=("attention_pair_h100x2_202611.json",),
        figures=attention.pair,
        has_text=False,
    ),
    Page(
        name="memory_estimated_h200_202611",
        sources=("memory_estimated_h200_202611.json",),
        figures=memory.estimated,
        has_text=False,
    ),
    Page(
        name="attention_planned_h200_202611",
        note=_TOO_SHORT,
        sources=("attention_planned_h200_202611.json",),
        figures=attention.planned,
        has_text=False,
    ),
    _page(
        "budgets_h200x2_202611",
        budgets.budgets,
        "budgets_h200x2_202611.json",
        "budgets_recompute_h200x2_202611.json",
        "budgets_likely_h200x2_202611.json",
        "budgets_named_h200x2_202611.json",
    ),
    _page("building_h200x2_202611", building.building),
    _page("tuning_h200x2_202611", building.tuning),
    Page(
        name="suite_cells_gpux2_202611",
        sources=tuple(
            f"suite_{name}_202611.json"
            for name in (
                "h200x2",
                "h100x2",
                "again_h200x2",
                "cost_model_h200x2",
                "slow_h200x2",
                "budgets_h200x2",
                "budgets_h100x2",
                "cold_h100x2",
                "cold_h200x2",
            )
        ),
        figures=partial(
            side_by_side.cells_page, notes=_OF_CELLS, left_out=(_NOT_ITS_BEST,)
        ),
    ),
    Page(
        name="planning_parts_gpux2_202611",
        sources=tuple(
            f"suite_{name}_202611.json"
            for name in (
                "again_h200x2",
                "slow_h200x2",
                "budgets_h100x2",
                "budgets_h200x2",
                "cost_model_h200x2",
            )
        ),
        figures=building.planning_parts,
    ),
    _page("full_models_kernels_h200x2_202611", building.whole_models),
    _page("full_models_defaults_h200x2_202611", building.whole_models),
    _page("schedules_h200x2_202611", schedules.schedules),
    _page("scatters_h200_202611", scatters.scatters),
    _page("check_margin_cpu_202611", checked.margin),
    _page("check_kernels_cpu_202611", checked.kernels),
    Page(
        name="call_overhead_cpu_202611",
        sources=("call_overhead_cpu_202611.json",),
        figures=_call_overhead,
        has_text=False,
    ),
    _page("checks_cpu_202611", checked.checks),
    _page("checks_budget_cpu_202611", checked.within_budgets),
    _page("checks_budget_h100x2_202611", checked.within_budgets),
    _page(
        "curves_h200x2_202611", _curves("NVLink"), "curves_h200x2_202611_nvlink.json"
    ),
    _page(
        "curves_h200x4_202611",
        _curves("NVLink", "NCCL_P2P_DISABLE=1"),
        "curves_h200x4_202611_nvlink.json",
        "curves_h200x4_202611_p2p_off.json",
    ),
    Page(
        name="doctor_202611",
        sources=("doctor_202611.json",),
        figures=_doctor,
        has_text=False,
    ),
    Page(
        name="export_h200_202611",
        note=_TOO_SHORT,
        sources=("export_h200_202611.json",),
        figures=export_times.figures,
        has_text=False,
    ),
    _with_noted("full_models_h200x2_202611", building.full_models),
    _page("gpt4_h200x4_202611", _plans, *_GPT4),
    _page("gpt_h200x4_202611", _plans, *_GPT),
    _page("guided_cpu_202611", checked.guided),
    Page(
        name="hostile_files_202611",
        sources=("hostile_files_202611.json",),
        figures=_hostile,
        has_text=False,
    ),
    Page(
        name="random_steps_cpu_202611",
        sources=("random_steps_cpu_202611.json",),
        figures=random_page.figures,
        has_text=False,
    ),
    Page(
        name="house_202611",
        sources=("house_202611.json",),
        figures=_house,
        has_text=False,
    ),
    Page(
        name="mechanisms_cpu_202611",
        sources=("mechanisms_cpu_202611.json",),
        figures=mechanisms.figures,
    ),
    Page(
        name="soak_cpu_202611",
        sources=("soak_cpu_202611.json", "soak_one_arena_cpu_202611.json"),
        figures=soak.figures,
    ),
    Page(
        name="same_plans_cpu_202611",
        sources=("same_plans_cpu_202611.json",),
        figures=_same_plans,
        has_text=False,
    ),
    Page(
        name="same_plans_h100_202611",
        note=_TOO_SHORT,
        sources=("same_plans_h100_202611.json",),
        figures=_same_plans_h100,
        has_text=False,
    ),
    Page(
        name="same_plans_h200_202611",
        note=_TOO_SHORT,
        sources=("same_plans_h200_202611.json",),
        figures=_same_plans_h200,
        has_text=False,
    ),
    _page("moe_h200x4_202611", checked.moe),
    Page(
        name="one_as_four_h200_202611",
        note=_TOO_SHORT.replace(
            "the times were not measured again.",
            "[the times on real numbers](one_as_four_again_h200_202611.md) are a page "
            "of\ntheir own.",
        ),
        sources=("one_as_four_h200_202611.json",),
        figures=_one_as_four,
        has_text=False,
    ),
    _page("miscompiled_h200_202611", building.miscompiled),
    Page(
        name="one_gpu_h100_202611",
        sources=(
            "one_gpu_h100_202611.json",
            "one_gpu_jax012_h100_202611.json",
            "one_gpu_cost_model_h100_202611.json",
        ),
        figures=one_gpu.figures,
    ),
    Page(
        name="operator_plans_h200_202611",
        note=_TOO_SHORT,
        sources=("operator_plans_h200_202611.json",),
        figures=operator_plans.operator_plans,
        has_text=False,
    ),
    _page("overwritten_h200_202611", building.overwritten),
    _page("host_memory_h200_202611", memory.in_host),
    _page("called_kernel_h100x2_202611", by_hand.with_turns),
    _page("called_kernel_h200x2_202611", by_hand.with_kernel),
    _page("chosen_on_one_gpux2_202611", chosen_page.figures),
    _page(
        "gpu_checks_h100x2_202611",
        lambda data: {name: noted(data, name) for name in ("checks", "one", "planted")},
    ),
    _page("tutorial_gpux2_202611", _tutorial),
    _page("planned_on_one_h200_202611", _planned_on_one, note=_TOO_SHORT),
    _page("one_as_four_again_h200_202611", one_as_n.again_figures),
    _page("played_h200x2_202611", played_page.figures),
    _page("played_links_h200x2_202611", played_links_page.figures),
    _page("played_four_h200x4_202611", played_four_page.figures),
    Page(
        name="ray_builds_cpu_202611",
        sources=("ray_builds_cpu_202611.json",),
        figures=_ray_builds,
        has_text=False,
    ),
    Page(
        name="ray_kills_cpu_202611",
        sources=("ray_kills_cpu_202611.json",),
        figures=_ray_kills,
        has_text=False,
    ),
    Page(
        name="planning_ahead_cpu_202611",
        sources=("planning_ahead_cpu_202611.json",),
        figures=_planning_ahead,
        has_text=False,
    ),
    _page("planning_depth_cpu_202611", planning.depth_cpu),
    _with_noted("planning_depth_h200x2_202611", planning.depth_gpu),
    Page(
        name="planning_time_cpu_202611",
        sources=("planning_time_cpu_202611.json",),
        figures=_planning_time,
        has_text=False,
    ),
    _with_noted("planning_h200x2_202611", planning.planning_2, *_PLANNED),
    _with_noted("planning_h200x4_202611", planning.planning_4),
    _page(
        "prediction_h200x2_202611",
        _predictions,
        "prediction_moe_h200x2_202611_nvlink.json",
    ),
    _page(
        "prediction_h200x4_202611",
        _predictions,
        "prediction_gpt_h200x4_202611_nvlink.json",
        "prediction_moe_h200x4_202611_nvlink.json",
    ),
    _page(
        "ranges_h200_202611",
        ranges.ranges,
        *_GPT,
        *_GPT4,
        "moe_h200x4_202611.json",
        *_PLANNED,
        "planning_h200x4_202611.json",
        "full_models_h200x2_202611.json",
    ),
    _page("programs_cpu_202611", checked.programs),
    _page("recompute_compiled_h200_202611", building.compiled),
    _page("recompute_h200x4_202611", building.recompute),
    _page("plans_checked_h200x2_202611", plans_checked.figures),
    _page("plans_checked_h100x2_202611", plans_checked.figures),
    _page("several_cpu_202611", several.processes),
    _page("several_gpus_h200x2_202611", several.processes_on_gpus),
    _page("slow_link_cpu_202611", several.slow_link),
)

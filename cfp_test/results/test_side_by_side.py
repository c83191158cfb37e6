"""The aims of plans beside other ways, from samples with known medians."""

import pytest

from cfp_test.results.side_by_side import cells_page, page


def way(group, ms, **more):
    samples = [ms - 0.1, ms, ms + 0.1]
    return {"group": group, "status": "ok", "samples_ms": samples, **more}


def piece(model, kind, ways, **more):
    return {
        "piece": f"{model}:{kind}" if kind else model,
        "model": model,
        "kind": kind,
        "date": "2026-11-26",
        "environment": {"device_kind": "NVIDIA H100", "jax_version": "0.11.2"},
        "planning": {
            "planning_s": 50.0,
            "winner": "planned",
            "predicted_ms": 98.0,
            "counts": {"profile_seconds": 30.0, "race_seconds": 15.0},
        },
        "ways": ways,
        **more,
    }


WAYS = {
    "planned": way("planned", 100.0, candidate="planned"),
    "preset fully_sharded": way("preset", 110.0, candidate="fully_sharded"),
    "cost model, fitted": way("cost_model", 200.0),
    "cost model, fitted, kernels": way("cost_model", 120.0),
    "by hand, largest": way("hand", 101.0),
    "by hand, fsdp": way("hand", 99.0, note="out after 2 rounds"),
    "by hand, megatron_tp": {
        "group": "hand",
        "status": "failed",
        "reason": "XlaError: a|b",
        "samples_ms": [],
    },
}
TORCH = [{"name": "PyTorch FSDP2", "status": "ok", "samples_ms": [125.0, 125.0]}]


def lines_of(*pieces):
    return page({"name": "suite", "pieces": pieces})["page"].splitlines()


def row_of(lines, *parts):
    [found] = [line for line in lines if all(part in line for part in parts)]
    return found


def test_each_aim_is_said_to_hold_or_not_with_its_figure():
    lines = lines_of(piece("gpt", "off", WAYS, pytorch=TORCH))
    assert "| gpt | 2.00 | yes |" in row_of(lines, "as written, P2P off")
    assert "| gpt | 1.20 | **no** |" in row_of(lines, "with kernels, P2P off")
    assert "| 1 cells | none is above | yes |" in row_of(lines, "in all cells")
    assert "| 1 of 1 | gpt, NCCL_P2P_DISABLE=1: 0.909 | yes |" in row_of(
        lines, "below 0.95"
    )
    # What was left out after two rounds is not the best by hand.
    assert "| gpt | 0.990 (by hand, largest) | yes |" in row_of(lines, "best by hand")
    assert "| gpt | 0.800 | yes |" in row_of(lines, "of PyTorch")
    assert row_of(lines, "megatron_tp").endswith("| XlaError: a/b |")


@pytest.mark.parametrize(
    ("ms", "more", "holds"),
    [
        (99.95, {}, "yes"),  # Noise hides the difference.
        (95.0, {}, "**no**"),
        (95.0, {"is_the_plan": True}, "yes"),
    ],
)
def test_plan_behind_a_preset_is_said_unless_it_is_noise_or_that_preset(
    ms, more, holds
):
    ways = {**WAYS, "preset zero1": way("preset", ms, **more)}
    row = row_of(lines_of(piece("gpt", "", ways)), "in all cells")
    assert row.endswith(f"| {holds} |")


def test_budgets_are_cells_and_what_does_not_fit_says_so():
    ways = {
        "100%: planned": way("planned", 100.0),
        "100%: preset zero1": way("preset", 100.0),
        "75%: planned": way("planned", 110.0),
        "60%: planned": way("planned", 120.0),
        "50%: planned": way("planned", 130.0),
        "50%: preset zero1": {"status": "failed", "reason": "over the memory budget"},
    }
    too_large = [{"name": "zero1", "note": "over the memory budget"}]
    too_slow = [{"name": "zero1", "note": "predicted too far behind to be raced"}]
    made = {"bytes": 2**32, "winner": "planned", "planning_s": 9.0}
    budgets = {
        "100%": {**made, "race": []},
        "75%": {**made, "race": too_slow},
        "60%": {**made, "race": too_large},
        # Too far behind to race, and compiled afterwards.
        "50%": {**made, "race": too_slow},
        "45%": {"bytes": 2**31, "least_bytes": 2**31 + 2**30},
    }
    lines = lines_of(
        piece("gpt", "", WAYS), piece("gpt", "budgets", ways, budgets=budgets)
    )
    assert "| 4 cells | none is above | yes |" in row_of(lines, "in all cells")
    assert "| 3 of 4 |" in row_of(lines, "below 0.95")
    assert "nothing fits; 3.0 GiB would do" in row_of(lines, "| 45% |")
    assert "no preset fits" in row_of(lines, "| 60% |")
    assert "no preset fits" in row_of(lines, "| 50% |")
    assert "no preset timed" in row_of(lines, "| 75% |")


def test_budgets_without_peer_to_peer_access_are_cells_of_their_own():
    ways = {
        "75%: planned": way("planned", 90.0),
        "75%: preset zero1": way("preset", 100.0),
    }
    made = {"bytes": 2**32, "winner": "planned", "planning_s": 9.0, "race": []}
    slow = piece("gpt", "off_budgets", ways, budgets={"75%": made})
    lines = lines_of(slow)
    assert "## Under budgets, NCCL_P2P_DISABLE=1" in lines
    assert "## Under budgets, NVLink" not in lines
    said = "| 1 of 1 | gpt, 75%, NCCL_P2P_DISABLE=1: 0.900 | yes |"
    assert said in row_of(lines, "below 0.95")


def test_preset_counts_under_each_budget_that_it_fits_in():
    ways = {
        "100%: planned": way("planned", 90.0),
        "100%: preset zero1": way("preset", 100.0, peak_bytes=30, is_the_plan=True),
        "75%: planned": way("planned", 92.0),
        "75%: preset zero1": way("preset", 98.0, peak_bytes=30),
        "60%: planned": way("planned", 95.0),
        "60%: preset fsdp": way("preset", 97.0, peak_bytes=20),
    }
    made = {"winner": "planned", "planning_s": 9.0, "race": []}
    sizes = {"100%": 40, "75%": 35, "60%": 25}
    budgets = {share: {**made, "bytes": size} for share, size in sizes.items()}
    lines = lines_of(piece("gpt", "budgets", ways, budgets=budgets))
    # Each beside the fastest, of a preset's times that of the same turns.
    assert "| fsdp | 97.00 | 0.928 |" in row_of(lines, "| 100% |")
    assert "| fsdp | 97.00 | 0.948 |" in row_of(lines, "| 75% |")
    assert "| fsdp | 97.00 | 0.979 |" in row_of(lines, "| 60% |")
    del ways["60%: preset fsdp"]
    lines = lines_of(piece("gpt", "budgets", ways, budgets=budgets))
    assert "| zero1 | 100.00 | 1.000 |" in row_of(lines, "| 100% |")
    assert "| zero1 | 98.00 | 0.939 |" in row_of(lines, "| 75% |")
    assert "no preset timed" in row_of(lines, "| 60% |")


def test_of_each_cell_the_newest_counts_unless_it_is_left_out():
    old = piece("gpt", "", WAYS)
    new = piece("gpt", "", {**WAYS, "planned": way("planned", 104.0)})
    other = piece("gpt", "off", {**WAYS, "planned": way("planned", 90.0)})
    suites = [
        {"pieces": [{**new, "date": "2026-11-27"}, other]},
        {"pieces": [old]},
    ]
    off, left = "gpt, NCCL_P2P_DISABLE=1", []
    for left_out in ((), (off,)):
        notes = dict.fromkeys(left_out, "not its best")
        found = cells_page(*suites, notes=notes, left_out=left_out)
        assert "| gpt, NVLink | 0.945 | fully_sharded | H100 | 2026-11-27 |" in str(
            found["cells"]
        )
        left.append(str(found["aims"]))
    assert "| 2 of 2 |" in left[0]
    assert "| 1 of 1 |" in left[1]
    assert "not its best" in str(found["cells"])

"""Pieces, rounds and files of plans beside other ways, without compiling anything."""

import json

import pytest

from cfp_test.bench.pages import RESULTS
from cfp_test.bench.side_by_side import (
    PIECES,
    Piece,
    rows_of,
    torch_command,
)


def test_pieces_are_read_by_name_and_have_files_of_their_own():
    pieces = [Piece.of(name) for name in PIECES]
    assert len({piece.file for piece in pieces}) == len(PIECES)
    off = Piece.of("llama4k:off")
    assert (off.zoo_model, off.kind) == ("llama", "off")
    assert off.options(tiny=False)["seq"] == 4096
    assert off.slow and not off.under_budgets
    under = [Piece.of("gpt:budgets"), Piece.of("gpt:off_budgets")]
    assert [one.slow for one in under] == [False, True]
    assert all(one.under_budgets for one in under)
    with pytest.raises(ValueError, match="got 'gpt:slow'"):
        Piece.of("gpt:slow")


def test_pytorch_gets_the_sizes_that_the_plan_is_for(tmp_path):
    piece = Piece.of("moe")
    words = torch_command(piece, tmp_path / "x", 8, tiny=False)
    given = dict(zip(words[words.index("--model") :: 2], words[8::2], strict=False))
    sizes = piece.options(tiny=False)
    for name in ("batch", "hidden", "experts", "seq", "dtype"):
        assert given[f"--{name}"] == str(sizes[name])


def test_rows_are_those_of_the_page():
    def way(group, *samples, **more):
        return {"group": group, "status": "ok", "samples_ms": samples, **more}

    piece = {
        **{"model": "gpt", "p2p_disabled": True, "commit": "abc", "date": "2026-11-29"},
        "environment": {"device_kind": "NVIDIA H200"},
        "budgets": {"60%": {"planning_s": 41.6}},
        "ways": {
            "60%: planned": way("planned", 9.0, 11.0, candidate="planned 2"),
            "60%: preset zero1": way("preset", 12.5, candidate="zero1"),
            "60%: preset other": way("preset", 12.0, note="out after 2 rounds"),
            "75%: preset other": way("preset", 1.0),
            "60%: cost model, kernels": way("cost_model", 20.0, peak_bytes=2**30),
        },
    }
    plan, preset, modelled = rows_of(piece)
    columns = json.loads((RESULTS / "suite_gpux2.json").read_text())
    assert len(plan) == len(columns["tables"]["steps"]["columns"])
    assert plan[:6] == ["gpt", "P2P off", "60%", "plan", "planned 2", "10.00"]
    assert plan[6:] == ["9.50 to 10.50", 2, None, None, "42", "H200", *plan[-2:]]
    assert preset[3:6] == ["best preset", "zero1", "12.50"] and preset[8] == "0.800"
    assert modelled[3] == "cost model, plan's kernels" and modelled[9] == "1.0"

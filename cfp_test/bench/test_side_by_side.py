"""Pieces, rounds and files of plans beside other ways, without compiling anything."""

import json
import time

import pytest

from cfp_test.bench import side_by_side
from cfp_test.bench.pages import RESULTS
from cfp_test.bench.side_by_side import (
    PIECES,
    Piece,
    Record,
    joined,
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


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Times ways of known speeds; returns the record, and whether all rounds ran."""

    def run(speeds, rounds=4, end=float("inf")):
        order = []

        def sample(one, loss_at, warm_up):
            order.append(one)
            return speeds[one], [1.0]

        monkeypatch.setattr(side_by_side, "sample", sample)
        record = Record(tmp_path / "gpt.json")
        record.data["ways"] = {
            name: {"group": name.split()[0], "status": "ok", "samples_ms": []}
            for name in speeds
        }
        made = {name: name for name in speeds}
        whole = side_by_side.time_in_turn(made, 0, record, rounds=rounds, end=end)
        return json.loads(record.path.read_text())["ways"], whole, order

    return run


def test_what_is_behind_the_best_of_its_kind_is_out_after_two_rounds(timed):
    speeds = {"planned": 50.0, "hand a": 10.0, "hand b": 10.2, "hand c": 10.25}
    speeds |= {"cost a": 9.0, "cost b": 9.5, "cost c, kernels": 12.0}
    rows, whole, order = timed(speeds)
    assert whole
    counts = {name: len(row["samples_ms"]) for name, row in rows.items()}
    # Two of a kind at most, and none that is far behind.
    out = {"hand c", "cost b"}
    assert counts == {name: 2 if name in out else 4 for name in speeds}
    assert {name for name, row in rows.items() if row.get("note")} == out
    # Each begins a round in its turn.
    assert order[: len(speeds) + 1] == [*speeds, "hand a"]


def test_nothing_is_timed_when_time_is_over_and_the_piece_is_not_whole(timed):
    rows, whole, order = timed({"planned": 1.0}, end=time.monotonic() - 1)
    assert (whole, order, rows["planned"]["samples_ms"]) == (False, [], [])


def test_pieces_have_the_rows_of_pytorch(tmp_path):
    for name in ("gpt.json", "gpt_off.json"):
        (tmp_path / name).write_text(json.dumps({"file": name}))
    (tmp_path / "torch_gpt.jsonl").write_text('{"name": "PyTorch FSDP2"}\n')
    gpt, off = joined(tmp_path)
    assert gpt == {"file": "gpt.json", "pytorch": [{"name": "PyTorch FSDP2"}]}
    assert off == {"file": "gpt_off.json"}


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

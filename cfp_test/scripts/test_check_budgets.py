"""Errors as the check within budgets reads them, and how it goes on from them."""

import pytest

from cfp_test.scripts import check_budgets


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (
            "error: The plan, compiled, needs 777.52 KiB on each device; the budget",
            796180,
        ),
        (
            "Of 10 compiled plans the smallest, fully_sharded, needs 2.00 GiB on",
            2 * 2**30,
        ),
        ("would do is about 3.00 MiB, by prediction.", 3 * 2**20),
        ("error: There is no such platform.", None),
    ],
)
def test_what_an_error_says_is_needed(error, size):
    assert check_budgets.needed_bytes(error) == size


def test_a_check_goes_on_from_what_errors_name(monkeypatch):
    asked = []

    def run(words, budget_bytes):
        asked.append(budget_bytes)
        if budget_bytes < 1100:
            return None, "error: The plan, compiled, needs 1.20 KiB on each device"
        return {"steps": [], "passed": True, "rematerialized": [2, 0]}, ""

    monkeypatch.setattr(check_budgets, "run", run)
    row = check_budgets.check(["gpt"])
    assert asked == [1024, row["budget_bytes"]] and row["too_small_bytes"] == [1024]
    assert row["passed"] and row["rematerialized"] == [2, 0]
    monkeypatch.setattr(check_budgets, "run", lambda words, size: (None, "error: no"))
    row = check_budgets.check(["gpt"])
    assert not row["passed"] and row["error"] == "error: no"

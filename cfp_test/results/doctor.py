"""The page of what `cfp doctor` says of machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def page(data: Mapping[str, Any]) -> str:
    """A table for each machine, a row for each check."""
    lines = [
        "# What the doctor says, November 2026",
        "",
        f"`{data['command']}`, {data['date']}; a table for each machine.",
    ]
    for machine in data["machines"]:
        checks = machine["checks"]
        counts = ", ".join(
            f"{sum(check['status'] == status for check in checks)} {status}"
            for status in ("PASS", "FAIL", "ABSENT")
        )
        lines += [
            "",
            f"## {machine['title']}",
            "",
            f"{machine['system']}, Python {machine['python']}: {counts}.",
            "",
            "| check | | reason | remedy |",
            "|---|---|---|---|",
            *(
                f"| {check['name']} | {check['status']} | {_cell(check['reason'])} | "
                f"{_cell(check['remedy'])} |"
                for check in checks
            ),
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

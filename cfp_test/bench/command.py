"""Runs `cfp bench`, once its words are parsed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from cfp.errors import CfpError
from cfp.models.options import Scalar
from cfp.planner_settings import PlannerSettings
from cfp.targets import parse_options
from cfp_test.bench import clock
from cfp_test.bench.compete import SuiteOptions
from cfp_test.bench.competitors import GROUPS
from cfp_test.bench.configs import SUITES, configs
from cfp_test.bench.journal import Journal
from cfp_test.bench.rows import changes
from cfp_test.bench.suite import run_suite
from cfp_test.bench.tables import print_changes, print_configuration


def bench(
    suite: str,
    models: Sequence[str],
    words: Sequence[str],
    meshes: Sequence[Mesh],
    *,
    settings: PlannerSettings,
    workdir: Path,
    journal: Journal,
    groups: Sequence[str],
    handwritten: Sequence[str],
    rounds: int,
    quick: bool,
    budget_bytes: int | None,
    pytorch: Path | None,
    compare: Path | None,
    json_file: Path | None,
    trace: bool,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Runs a suite, prints it, and returns its results.

    What the journal has is neither run nor printed again.

    Raises:
      CfpError: there is no such suite, model, option, group or file.
    """
    if suite not in SUITES:
        raise CfpError(f"There is no suite {suite!r}. There are: {', '.join(SUITES)}.")
    wanted = list(models or SUITES[suite])
    for model in wanted:
        if model not in SUITES[suite]:
            raise CfpError(
                f"The suite {suite} has no model {model!r}. It has: "
                f"{', '.join(SUITES[suite])}."
            )
    for group in groups:
        if group not in GROUPS:
            raise CfpError(
                f"There are no competitors {group!r}. There are: {', '.join(GROUPS)}."
            )
    before = None if compare is None else read_results(compare)
    torch_rows = [] if pytorch is None else read_rows(pytorch)
    made = configs(suite, wanted, _overrides(wanted, words), meshes[0].size)
    workdir.mkdir(parents=True, exist_ok=True)
    options = SuiteOptions(
        workdir=workdir,
        settings=settings,
        rounds=rounds,
        timing=clock.QUICK_TURN if quick else clock.TURN,
        groups=groups or GROUPS,
        only=handwritten,
        budget_bytes=budget_bytes,
        pytorch=torch_rows,
        trace=trace,
        tell=tell,
        journal=journal,
    )

    def keep(results: dict[str, Any]) -> None:
        print_configuration(results["configurations"][-1])
        if json_file is not None:
            json_file.write_text(json.dumps(results, indent=1) + "\n")

    results = run_suite(suite, made, meshes, options, keep)
    if before is not None:
        print_changes(changes(before, results))
    return results


def _overrides(models: Sequence[str], words: Sequence[str]) -> dict[str, Scalar]:
    """Options of models from `--layers 2 --dtype float32`, for all that have them.

    Raises:
      CfpError: none of the models has an option, or its value is none.
    """
    errors = []
    for model in models:
        try:
            return parse_options(model, words)
        except CfpError as error:
            errors.append(error)
    raise errors[0]


def read_results(path: Path) -> Mapping[str, Any]:
    """Reads what an earlier run wrote.

    Raises:
      CfpError: the file is none.
    """
    try:
        data = json.loads(path.read_text())
        if data["format"] == 1 and "configurations" in data:
            return data
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CfpError(f"Cannot read results from {path}: {error}") from error
    raise CfpError(f"{path} does not hold results of cfp bench.")


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """Reads the rows of JSON, one on each line, that PyTorch's runs wrote.

    Raises:
      CfpError: the file holds none.
    """
    try:
        lines = path.read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        for row in rows:
            row["model"], row["options"], row["devices"], row["name"], row["status"]
        return rows
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CfpError(f"Cannot read PyTorch's rows from {path}: {error}") from error

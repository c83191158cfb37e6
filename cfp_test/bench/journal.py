"""Results of a comparison so far, kept for the next process if this one dies."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cfp.profiling.in_flight import write_whole
from cfp_test.bench.rows import Row


class Journal:
    """Finished configurations, and how far the one at work is.

    What is compiled cannot be kept, and is compiled again.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Reads what an earlier process of the same command kept.

        Args:
          path: the file, which need not exist; None to keep nothing.
        """
        self._path = path
        self._data: dict[str, Any] = {"steps": 0, "finished": [], "at_work": _begin()}
        if path is not None and path.exists():
            self._data = json.loads(path.read_text())

    @property
    def steps(self) -> int:
        """Number of times something was kept."""
        return self._data["steps"]

    @property
    def finished(self) -> list[dict[str, Any]]:
        """Results of configurations."""
        return self._data["finished"]

    def finish(self, configuration: Mapping[str, Any]) -> None:
        """Keeps the results of the configuration at work; the next one begins."""
        self.finished.append(dict(configuration))
        self._data["at_work"] = _begin()
        self._write()

    def planning_began(self, mesh: str) -> float:
        """Start of the first planning for a mesh, as of `time.monotonic`."""
        began = self._data["at_work"]["began"]
        if mesh not in began:
            began[mesh] = time.monotonic()
            self._write()
        return began[mesh]

    def planned(self, mesh: str, counts: Mapping[str, float]) -> dict[str, float]:
        """Seconds of planning for a mesh; once it is done, those it took then."""
        planning = self._data["at_work"]["planning"]
        if mesh not in planning:
            planning[mesh] = dict(counts)
            self._write()
        return planning[mesh]

    def row(self, key: str) -> tuple[Row | None, int]:
        """The row of a competitor at work, if it was checked, and its turns so far."""
        kept = self._data["at_work"]["rows"].get(key)
        return (None, 0) if kept is None else (Row.of(kept["row"]), kept["turns"])

    def keep(self, key: str, row: Row, turns: int = 0) -> None:
        """Keeps the row of a competitor at work, and how many turns it has had."""
        kept = {"row": row.data(), "turns": turns}
        self._data["at_work"]["rows"][key] = kept
        self._write()

    def _write(self) -> None:
        self._data["steps"] += 1
        if self._path is not None:
            write_whole(self._path, self._data)


def _begin() -> dict[str, Any]:
    return {"began": {}, "planning": {}, "rows": {}}

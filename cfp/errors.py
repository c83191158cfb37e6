"""Every error that a user of cfp can mend.

`except CfpError` catches all of them and none of our own bugs, which stay
`AssertionError`, `ValueError` and the like. Inside a search a failure is a
value (a `ProfileRecord` with a status); it becomes one of these at the edge.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Mapping
from copy import copy
from difflib import get_close_matches
from operator import itemgetter
from pathlib import Path, PurePath

_OWN = Path(__file__).resolve().parent
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
# Wherever they are: a user's own, and others on PYTHONPATH.
_INSTALLED = {"site-packages", "dist-packages"}

_MOST_SUMMARY = 200  # characters
_MOST_NAMES = 24


def known_names(
    name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None
) -> str:
    """Lists known names: ``Did you mean 'fully_sharded'? There are: ...``.

    Args:
      name: a name that is not among them.
      aliases: other words for known names.
    """
    by_plain = {_plain(one): one for one in known}
    other = (aliases or {}).get(_plain(name))
    near = [other] if other in by_plain.values() else []
    near = near or [
        by_plain[one] for one in get_close_matches(_plain(name), by_plain, 1, 0.5)
    ]
    names = [*by_plain.values()]
    more = f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES)
    listed = f"There are: {', '.join(names[:_MOST_NAMES]) or 'none'}{more}."
    return f"Did you mean {near[0]!r}? {listed}" if near else listed


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("-", "_")


def is_installed(path: str | PurePath) -> bool:
    """True if a file is of an installed package."""
    return not _INSTALLED.isdisjoint(PurePath(path).parts)


def place_of(error: BaseException) -> str:
    """Finds the line of the user's code that raised an exception; "" if there is none.

    The line is in the innermost frame outside of cfp and installed packages.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_foreign(frame.filename) or is_installed(frame.filename):
            continue
        code = f": {frame.line}" if frame.line else ""
        return f"\n  at {frame.filename}:{frame.lineno}, in {frame.name}{code}"
    return ""


def _is_foreign(filename: str) -> bool:
    """True if a file is of cfp or of Python's library, or is none."""
    parents = Path(filename).resolve().parents
    return filename.startswith("<") or _OWN in parents or _STDLIB in parents


def warn(text: str) -> None:
    """Warns at the innermost line outside of cfp and of Python's library."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and _is_foreign(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def summary_of(error: BaseException) -> str:
    """Returns an exception's type and the first line of its text, shortened."""
    text = str(error).strip().partition("\n")[0]
    kind = type(error).__name__
    return f"{kind}: {text}"[:_MOST_SUMMARY] if text else kind


class CfpError(Exception):
    """Base of all errors that a user can mend; the text has cause and remedy."""


class OptionError(CfpError, TypeError):
    """An option is unknown, or contradicts another."""


class StepNotTraceable(CfpError):
    """JAX cannot trace the step with these arguments."""


class PlanMismatch(CfpError):
    """Arguments, program, mesh or versions do not fit a saved plan."""


class ProcessError(CfpError):
    """A process differs from the others, has failed, or is gone."""


class MemoryBudgetError(CfpError):
    """No plan fits the memory budget of a device.

    Attributes:
      smallest_feasible_bytes: memory of the smallest plan on one device.
      contributors: (name, bytes) of its largest parts, largest first.
    """

    def __init__(
        self,
        message: str,
        *,
        # Has a value, so that pickle makes the error of its message and attributes.
        smallest_feasible_bytes: int = 0,
        contributors: Iterable[tuple[str, int]] = (),
    ):
        super().__init__(message)
        self.smallest_feasible_bytes = smallest_feasible_bytes
        self.contributors = sorted(contributors, key=itemgetter(1), reverse=True)

    def with_line(self, line: str, *, behind_first: bool = False) -> MemoryBudgetError:
        """Returns the error with one more line in its message.

        Args:
          line: the line, by default the last one.
          behind_first: True puts the line behind the first.
        """
        first, *rest = str(self).split("\n")
        rest.insert(0 if behind_first else len(rest), f"  {line}")
        found = copy(self)
        found.args = ("\n".join([first, *rest]),)
        return found

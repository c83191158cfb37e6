"""Every error that a user of cfp can mend.

`except CfpError` catches all of them and none of our own bugs, which stay
`AssertionError`, `ValueError` and the like. Inside a search a failure is a
value (a `ProfileRecord` with a status); it becomes one of these at the edge.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path, PurePath

_OWN = Path(__file__).resolve().parent
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
# Wherever they are: a user's own, and others on PYTHONPATH.
_INSTALLED = {"site-packages", "dist-packages"}

_MOST_SUMMARY = 200  # characters
# What stands before what to try, in every message of `compose`.
ATTEMPT = "\n  try: "


def compose(summary: str, *, expected: str, got: str, attempt: str) -> str:
    """Writes an error message that says what to do next."""
    return f"{summary}\n  expected: {expected}\n  got: {got}{ATTEMPT}{attempt}"


def nearest(
    name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None
) -> str:
    """Suggests the nearest names: ``did you mean 'fully_sharded'? ``, or ``""``.

    Args:
      name: that there is not.
      aliases: what else these are called.
    """
    by_plain = {_plain(one): one for one in known}
    other = (aliases or {}).get(_plain(name))
    found = [other] if other in by_plain.values() else []
    close = get_close_matches(_plain(name), by_plain, 1, 0.5)
    found = found or [by_plain[one] for one in close]
    return f"did you mean {found[0]!r}? " if found else ""


def what_there_is(
    name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None
) -> str:
    """The names that there are, behind the nearest of them; see `nearest`."""
    names = [*known]
    near = nearest(name, names, aliases)
    return f"{near}{'There' if near else 'there'} are: {', '.join(names)}."


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("-", "_")


def is_installed(path: str | PurePath) -> bool:
    """True if a file is of an installed package."""
    return not _INSTALLED.isdisjoint(PurePath(path).parts)


def place_of(error: BaseException) -> str:
    """Finds the line of the user's code that an exception left; empty if none.

    The innermost frame that is neither of an installed package nor of cfp.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        own = _OWN in path.parents or frame.filename.startswith("<")
        if own or _STDLIB in path.parents or is_installed(path):
            continue
        code = f": {frame.line}" if frame.line else ""
        return f"\n  at {frame.filename}:{frame.lineno}, in {frame.name}{code}"
    return ""


def summary_of(error: BaseException) -> str:
    """An exception's type and the first line of its text, not too long."""
    text = str(error).strip().partition("\n")[0]
    kind = type(error).__name__
    return f"{kind}: {text}"[:_MOST_SUMMARY] if text else kind


class CfpError(Exception):
    """Base of all errors that a user can mend.

    Args:
      summary: the message, or its beginning, where the others are given.
      expected, got, attempt: as of `compose`; the last may stand alone.
      commands: what to attempt instead where a command was typed.
    """

    def __init__(
        self,
        summary: str,
        *,
        expected: str = "",
        got: str = "",
        attempt: str = "",
        commands: str = "",
    ):
        if expected or got:
            summary = compose(summary, expected=expected, got=got, attempt=attempt)
        elif attempt:
            summary += f"{ATTEMPT}{attempt}"
        super().__init__(summary)
        self._commands = commands

    def for_commands(self) -> str:
        """The message for who typed a command."""
        text = str(self)
        before = text.rpartition(ATTEMPT)[0] if ATTEMPT in text else text
        return f"{before}{ATTEMPT}{self._commands}" if self._commands else text


class OptionError(CfpError, TypeError):
    """There is no such option, or it does not go with the others."""


class StepNotTraceable(CfpError):
    """The step function cannot be traced to a program with these arguments."""


class PlanMismatch(CfpError):
    """Arguments, program, mesh or versions do not fit a saved plan."""


class ProcessError(CfpError):
    """The processes of a program differ, or one of them has failed, or is gone."""


class MemoryBudgetError(CfpError):
    """No plan fits the memory budget of a device.

    Attributes:
      smallest_feasible_bytes: what the leanest plan needs on one device.
      contributors: (name, bytes) of what takes most of it, largest first.
      fastest_ms: predicted step time of the fastest plan, which does not fit, or None.
    """

    fastest_ms: float | None = None

    def __init__(
        self,
        message: str,
        *,
        smallest_feasible_bytes: int,
        contributors: Iterable[tuple[str, int]] = (),
    ):
        super().__init__(message)
        self.smallest_feasible_bytes = smallest_feasible_bytes
        self.contributors = sorted(
            contributors, key=lambda contributor: contributor[1], reverse=True
        )

    def with_line(self, line: str, *, behind_first: bool = False) -> MemoryBudgetError:
        """Returns the same error with a line more.

        Args:
          line: to add at the end of the message.
          behind_first: whether it goes behind its first line.
        """
        first, *rest = str(self).split("\n")
        rest.insert(0 if behind_first else len(rest), f"  {line}")
        found = MemoryBudgetError(
            "\n".join([first, *rest]),
            smallest_feasible_bytes=self.smallest_feasible_bytes,
            contributors=self.contributors,
        )
        found.fastest_ms = self.fastest_ms
        return found

    def __reduce__(self):
        # The default rebuilds an exception from `args` alone, which fails for
        # required keywords: and errors do travel between processes.
        make = partial(
            type(self),
            smallest_feasible_bytes=self.smallest_feasible_bytes,
            contributors=self.contributors,
        )
        return make, self.args, self.__dict__

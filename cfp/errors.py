"""Errors that a user of cfp can mend, and helpers for their messages.

`except CfpError` catches all of them. A class is also Python's type of the mistake, if
there is one, such as `FileNotFoundError`. Bugs of cfp itself stay `AssertionError`,
`ValueError` and the like. During a search, a failed measurement is a `ProfileRecord`
with a status, and raises nothing.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from difflib import get_close_matches
from functools import wraps
from operator import itemgetter
from pathlib import Path, PurePath
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_OWN = Path(__file__).resolve().parent
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
# Names of folders of installed packages, anywhere on PYTHONPATH.
_INSTALLED = {"site-packages", "dist-packages"}

_MOST_SUMMARY = 300  # characters of a line
_MOST_NAMES, _FEW_NAMES = 24, 5  # All names of a list; else the first.


def known_names(
    name: str,
    known: Iterable[str],
    aliases: Mapping[str, str] | None = None,
    types: Mapping[str, str] | None = None,
) -> str:
    """Returns ``Did you mean 'b'? There are: a, b.`` for an unknown `name`.

    More than 24 known names are cut to the similar ones, or without any to five.

    Args:
      aliases: {other word, as by `plain_name`: known name to suggest}.
      types: {known name: text to list behind it}.
    """
    names, plain = [*known], plain_name(name)
    by_plain = {  # Of paths the ends, too; the shortest path of an end counts.
        plain_name("/".join(one.split("/")[start:]).removesuffix("/value")): one
        for one in sorted(names, key=len, reverse=True)
        for start in range(one.count("/") + 1)
    }
    other = (aliases or {}).get(plain)
    close = get_close_matches(plain, by_plain, _FEW_NAMES, 0.5)
    near = [other] if other in names else [by_plain[one] for one in close]
    some = [*dict.fromkeys(near)] or names[:_FEW_NAMES]
    first = names if len(names) <= _MOST_NAMES else some
    more = f" and {len(names) - len(first)} more" * (len(names) > len(first))
    first = [f"{one} {types[one]}" if types else one for one in first]
    listed = f"There are: {', '.join(first) or 'none'}{more}."
    return f"Did you mean {near[0]!r}? {listed}" if near else listed


def plain_name(name: str) -> str:
    """Returns a name as names are compared: lower case, ``--a-b`` as ``a_b``."""
    return name.lower().lstrip("-").replace("-", "_")


def is_installed(path: str | PurePath) -> bool:
    """True if a path has a folder named site-packages or dist-packages."""
    return not _INSTALLED.isdisjoint(PurePath(path).parts)


def place_of(error: BaseException) -> str:
    r"""Returns "\n  at FILE:LINE, in NAME: CODE" of the user's innermost frame, or "".

    Frames of cfp, of installed packages and of Python's library are not the user's.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_foreign(frame.filename) or is_installed(frame.filename):
            continue
        code = f": {frame.line}" if frame.line else ""
        return f"\n  at {frame.filename}:{frame.lineno}, in {frame.name}{code}"
    return ""


def _is_foreign(filename: str) -> bool:
    """True for files in the folders of cfp and Python's library, and ``<string>``."""
    parents = Path(filename).resolve().parents
    return filename.startswith("<") or _OWN in parents or _STDLIB in parents


def warn(text: str) -> None:
    """Issues a UserWarning at the innermost line outside cfp and Python's library."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and _is_foreign(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def summary_of(error: BaseException, lines: int = 1) -> str:
    """Returns ``TYPE: TEXT``: first `lines` with text, each cut to 300 characters."""
    found = [line[:_MOST_SUMMARY] for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *filter(None, ["\n".join(found[:lines])])])


class CfpError(Exception):
    """Base of all errors that a user can mend; the text names cause and remedy."""


def brief(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a function: its CfpErrors omit inner frames if CFP_TRACEBACK is not set."""

    @wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return fn(*args, **kwargs)
        except CfpError as error:
            if os.environ.get("CFP_TRACEBACK"):
                raise
            raise error.with_traceback(None) from error.__cause__

    return call


class OptionError(CfpError, TypeError):
    """An option or argument name is unknown or misplaced, or options contradict."""


class StepNotTraceable(CfpError):
    """JAX or cfp cannot trace, lower or shard the step with these arguments."""


class PlanMismatch(CfpError):
    """A plan is unreadable, or is for another step, arguments, devices or versions."""


class NotBound(PlanMismatch, AttributeError):
    """A loaded plan has no step yet, or a step no plan yet; `hasattr` is then False."""


class NoSuchFile(CfpError, FileNotFoundError):
    """The file of a plan, a target or a described cluster does not exist."""


class ProcessError(CfpError):
    """JAX processes differ or cannot join, or one of them failed or is gone."""


class MemoryBudgetError(CfpError):
    """No plan was found that fits the memory budget of a device.

    Attributes:
      smallest_feasible_bytes: least budget found, or predicted, to be enough.
      contributors: (part, bytes) of that budget, such as "temporaries"; largest first.
    """

    def __init__(
        self,
        message: str,
        *,
        # Defaults let pickle make the error from its message, then set attributes.
        smallest_feasible_bytes: int = 0,
        contributors: Iterable[tuple[str, int]] = (),
    ):
        super().__init__(message)
        self.smallest_feasible_bytes = smallest_feasible_bytes
        self.contributors = sorted(contributors, key=itemgetter(1), reverse=True)

    def with_line(self, line: str, *, behind_first: bool = False) -> MemoryBudgetError:
        """Returns a copy with an indented line at the end, or behind the first line."""
        first, *rest = str(self).split("\n")
        rest.insert(0 if behind_first else len(rest), f"  {line}")
        found = copy(self)
        found.args = ("\n".join([first, *rest]),)
        return found

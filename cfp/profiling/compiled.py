"""Compiles programs, and refuses compiled programs that compute something else.

XLA's rematerialization may have a program read values that it has overwritten by then
(:mod:`cfp.profiling.overwritten`). A program in which something was rematerialized is
used only if its text proves that this did not happen. A text that cannot be read counts
as no proof: the program is compiled again without rematerialization, which needs more
memory, and is right by the way it was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from cfp.errors import CfpError
from cfp.profiling.hlo import called_by
from cfp.profiling.hlo_text import Module, modules_in
from cfp.profiling.overwritten import has_rematerialized, read_after_overwritten

_OFF = "xla_disable_hlo_passes"
_PASS = "rematerialization"
_SCHEDULED = "is_scheduled=true"


def compile_right(
    lowered: jax.stages.Lowered, options: Mapping[str, Any]
) -> tuple[jax.stages.Compiled, str]:
    """Compiles a program so that it computes what it says.

    Where that cannot be proved with XLA's rematerialization, it is compiled without,
    and needs more memory.

    Returns:
        The compiled program and its text, if there is one.

    Raises:
        CfpError: it is wrong nevertheless.
    """
    compiled = lowered.compile(compiler_options=dict(options) or None)
    text = compiled.as_text() or ""
    if miscompile_reason(text) is None:
        return compiled, text
    off = filter(None, [options.get(_OFF), _PASS])
    compiled = lowered.compile(compiler_options={**options, _OFF: ",".join(off)})
    text = compiled.as_text() or ""
    if has_rematerialized(text) and (found := miscompile_reason(text)):
        raise CfpError(
            "XLA compiled a program that computes something else than it should: "
            f"{found}. Install another version of jaxlib, or plan with more memory."
        )
    return compiled, text


def miscompile_reason(hlo_text: str) -> str | None:
    """Returns the reason why a compiled program may be wrong; None if it is right.

    Args:
        hlo_text: the program; "" if it has no text.
    """
    if not hlo_text.strip():
        return "it has no text"
    if not has_rematerialized(hlo_text):
        return None  # As the compiler means it to be.
    modules = [
        m for m in modules_in(hlo_text) if m.header or any(m.computations.values())
    ]
    for module in modules:
        if not module.header or not module.entry:
            return "instructions that belong to no program"
        if _SCHEDULED not in module.header:
            return "its text does not say in which order it runs"
        if module.unread:
            return f"a line that cannot be read: {module.unread[0].strip()[:100]}"
        absent = _called(module) - module.computations.keys()
        if absent:
            return f"it calls a computation that it does not contain: {min(absent)}"
    if not modules:
        return "there is no program in its text"
    try:
        return read_after_overwritten(hlo_text)
    except (AssertionError, LookupError, RecursionError, ValueError) as error:
        # The text has a form that is not known here.
        return f"its text cannot be followed ({type(error).__name__}: {error})"


def _called(module: Module) -> set[str]:
    """Names of the computations that a module's instructions refer to."""
    every = [one for found in module.computations.values() for one in found]
    return {name for one in every for name in called_by(one) if name}

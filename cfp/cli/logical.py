"""Rules for logical names, as Flax and MaxText read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax.core.meta import AxisMetadata
from jax.tree_util import keystr, tree_flatten_with_path

from cfp.export.logical import Names, Rules, names_by_path
from cfp.models import MODELS, logical_names
from cfp.plan.plan import Plan
from cfp.plan.text import headline
from cfp.printable import printable
from cfp.targets import Target, parse_options


def names_of(plan: Plan, target: Target, words: Sequence[str]) -> dict[str, Names]:
    """The names of the dims of a target's arguments, by path.

    A model of the zoo knows them. Other arguments have them as Flax keeps them: in
    boxes such as `nn.LogicallyPartitioned`.

    Args:
        plan: of the target.
        target: the target.
        words: the options that followed its name.
    """
    if target.name in MODELS:
        options = parse_options(target.name, words)
        return names_by_path(plan, logical_names(target.name, **options))
    return boxed_names(plan, target)


def boxed_names(plan: Plan, target: Target) -> dict[str, Names]:
    """Names of dims from the boxes in a target's arguments."""
    roots = dict.fromkeys(path.partition("/")[0] for path in plan.arg_names)
    dynamic = [a for i, a in enumerate(target.args) if i not in target.static]
    found: dict[str, Names] = {}
    for root, tree in zip(roots, dynamic, strict=False):
        boxes = tree_flatten_with_path(tree, is_leaf=_is_box)[0]
        for path, box in boxes:
            names: Any = getattr(box, "names", None) if _is_box(box) else None
            if names is not None:
                rest = keystr(path, simple=True, separator="/")
                found[f"{root}/{rest}/value" if rest else f"{root}/value"] = names
    return found


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, AxisMetadata)


def flax_text(plan: Plan, rules: Rules) -> str:
    """A Python module with the rules, for `flax.linen.logical_to_mesh_sharding`."""
    lines = [
        f"    ({name!r}, {_flax_axes(axes)}),  # {'sharded' if axes else 'whole'}"
        for name, axes in rules
    ]
    return "\n".join(
        [
            '"""Rules from logical names of dims to axes of the mesh.',
            "",
            printable(headline(plan)).replace("\\", "\\\\").replace('"""', "'''"),
            "",
            "    specs = nn.get_partition_spec(state)",
            "    nn.logical_to_mesh_sharding(specs, mesh, RULES)",
            '"""',
            "",
            f"MESH_AXES = {dict(plan.mesh_axes)!r}",
            "# In order of precedence.",
            "RULES = (",
            *lines,
            ")",
            "",
        ]
    )


def _flax_axes(axes: tuple[str, ...]) -> str:
    if not axes:
        return "None"
    return repr(axes[0] if len(axes) == 1 else axes)


def maxtext_text(plan: Plan, rules: Rules) -> str:
    """The rules in YAML, as a configuration of MaxText has them."""
    lines = [f"  [{_quoted(name)}, [{_list(axes)}]]," for name, axes in rules]
    axes = [name for name, _ in plan.mesh_axes]
    return "\n".join(
        [
            f"# {printable(headline(plan))}",
            f"mesh_axes: [{_list(axes)}]",
            "# In order of precedence.",
            "logical_axis_rules: [",
            *lines,
            "]",
            "",
        ]
    )


def _list(words: Sequence[str]) -> str:
    return ", ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """A word in single quotes, as YAML reads them."""
    return "'" + printable(word).replace("'", "''") + "'"

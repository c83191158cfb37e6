"""Counts the house, at some commits: its size, and how much there is to hold in mind.

    python cfp_test/scripts/house.py --at a7637be --at HEAD [--json FILE] [--page FILE]

Modules, lines and public names of each room; the longest import chain and file; numbers
that decide, and how many of them stand in settings.py; classes that change; and the
functions that admit candidates to a race or keep them out. The page is made from the
JSON. Needs no device, and imports nothing of what it counts.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

Sources = Mapping[str, str]

# The half that decides: what finds a plan from what was measured. Rooms then and now.
DECIDING = (
    *("settings", "search", "budgets"),
    *("planner", "planner_parts", "contest", "entries", "whole", "raced", "shortage"),
    *(
        "context",
        "planner_settings",
        "solution",
        "race",
        "passes",
        "compose",
        "pipeline",
    ),
)
# Of that half, and now in rooms with other things.
ELSEWHERE = ("plan/compose.py", "runtime/raced.py", "runtime/executables.py")
# What estimates a choice's time and memory: in search/ at first, in cost/ since.
_ESTIMATES = (
    *("choice", "chunks", "costs", "estimate", "fusion", "kept", "memory", "orders"),
    *("temporaries", "terms", "transitions"),
)
ESTIMATES = tuple(f"{room}/{n}.py" for room in ("search", "cost") for n in _ESTIMATES)
# What admits candidates to a race, or keeps them out: functions and classes.
MECHANISMS = (
    *("in_reach", "computed_again", "nearly_fitting", "leanest_of", "by_size"),
    *("told_of_budget", "known_to_fit", "one_by_one", "let_down", "first_that_fits"),
    *("squeezed", "shorten", "first_whole", "Answer"),
    *("enough_that_fit", "rematerialized", "last_resort", "truncate"),
    *("compile_until_enough_fit", "smaller", "attempts", "sieve"),
)
_WHERE_THEY_STAND = ("contest", "entries", "whole", "planner", "race")
_OF_THE_SEARCH = ("race", "squeeze", "shortened", "answers")  # Before they had a room.
_QUESTIONS = (
    *("What", "Whether", "Which", "Of", "How", "Where", "Who", "Why", "When", "Whose"),
)
_UNCHANGING = ("Exception", "Error", "Enum", "Protocol", "NamedTuple", "TypedDict")


def sources_at(commit: str, root: Path) -> dict[str, str]:
    """The package's modules at a commit: path from the package's folder -> text."""
    listed = _git(root, "ls-tree", "-r", "--name-only", commit, "cfp/").splitlines()
    files = [name for name in listed if name.endswith(".py")]
    return {name[4:]: _git(root, "show", f"{commit}:{name}") for name in files}


def count(files: Sources) -> dict[str, Any]:
    """All that is counted of a package."""
    rooms: dict[str, dict[str, int]] = {}
    for file, text in files.items():
        room = rooms.setdefault(room_of(file), {"modules": 0, "lines": 0, "public": 0})
        room["modules"] += 1
        room["lines"] += len(text.splitlines())
        room["public"] += len(public_names(text))
    deciding = {
        file: text
        for file, text in files.items()
        if room_of(file) in DECIDING or file in (*ELSEWHERE, *ESTIMATES)
    }
    estimating = sum(len(files.get(file, "").splitlines()) for file in ESTIMATES)
    numbers = {file: deciding_numbers(text) for file, text in deciding.items()}
    longest = max(files, key=lambda file: len(files[file].splitlines()))
    chain = longest_chain(files)
    found = [
        name
        for name in MECHANISMS
        for file, text in deciding.items()
        if _may_admit(file) and name in defined(text)
    ]
    return {
        "modules": len(files),
        "lines": sum(len(text.splitlines()) for text in files.values()),
        "commands": len(commands(files)),
        "question_docstrings": sum(question_docstrings(t) for t in files.values()),
        "rooms": dict(sorted(rooms.items())),
        "top_modules": sum("/" not in file for file in files),
        "deciding_lines": sum(len(t.splitlines()) for t in deciding.values()),
        "estimating_lines": estimating,
        "deciding_modules": len(deciding),
        "deciding_public": sum(len(public_names(t)) for t in deciding.values()),
        "longest_file": [longest, len(files[longest].splitlines())],
        "longest_chain": chain,
        "numbers": sum(map(len, numbers.values())),
        "numbers_in_settings": len(numbers.get("settings.py", ())),
        "mutable_classes": sum(len(mutable_classes(t)) for t in deciding.values()),
        "spread_arguments": sum(spread_arguments(t) for t in deciding.values()),
        "mechanisms": sorted(set(found)),
    }


def _may_admit(file: str) -> bool:
    parts = file.removesuffix(".py").split("/")
    return parts[0] in _WHERE_THEY_STAND or (
        parts[0] == "search" and parts[1] in _OF_THE_SEARCH
    )


def room_of(file: str) -> str:
    """'search/ilp.py' -> 'search'; 'api.py' -> 'api'."""
    return file.split("/")[0].removesuffix(".py")


def public_names(text: str) -> list[str]:
    """Lists names that a module defines at its top, and others may use."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    top = [node.name for node in ast.parse(text).body if isinstance(node, kinds)]
    return [name for name in top if not name.startswith("_")]


def commands(files: Sources) -> set[str]:
    """Names of the command line's commands: of `app.command`, and of tables."""
    found = set()
    for file, text in files.items():
        if room_of(file) != "cli":
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="app"), attr="command"),
                    args=[ast.Constant(value=str(name)), *_],
                ):
                    found.add(name)
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys))
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(keys=keys))
                ) if name.endswith("COMMANDS"):
                    found |= {
                        key.value for key in keys if isinstance(key, ast.Constant)
                    }
    return found


def question_docstrings(text: str) -> int:
    """Counts docstrings that open with a question word."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = (n for n in ast.walk(ast.parse(text)) if isinstance(n, kinds))
    return sum(
        (ast.get_docstring(node) or "").startswith(tuple(f"{w} " for w in _QUESTIONS))
        for node in found
    )


def defined(text: str) -> set[str]:
    """All functions and classes of a module, methods included."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)}


def deciding_numbers(text: str) -> list[str]:
    """Constants of a module that are numbers, or hold some; not those of texts."""
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        if isinstance(target, ast.Name) and target.id.isupper() and _has_number(value):
            found.append(target.id)
    return found


def _has_number(value: ast.expr) -> bool:
    numbers = (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
        for node in ast.walk(value)
    )
    return any(numbers)


def mutable_classes(text: str) -> list[str]:
    """Classes whose objects may change: not frozen, nor of a kind that never does."""
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and not any("frozen=True" in ast.unparse(d) for d in node.decorator_list)
        and not any(ast.unparse(base).endswith(_UNCHANGING) for base in node.bases)
    ]


def spread_arguments(text: str) -> int:
    """Calls with ``*x`` or ``**x``, that hide what is passed; literals do not."""
    found = 0
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        found += sum(word.arg is None for word in node.keywords)
        found += sum(
            isinstance(arg, ast.Starred) and isinstance(arg.value, ast.Name)
            for arg in node.args
        )
    return found


def longest_chain(files: Sources) -> list[str]:
    """The longest chain of modules each of which imports the next."""
    names = {_module(file): file for file in files}
    graph = {module: sorted(_imports(files[names[module]], names)) for module in names}
    open_now: set[str] = set()

    @cache
    def chain(module: str) -> tuple[str, ...]:
        open_now.add(module)
        behind = [chain(other) for other in graph[module] if other not in open_now]
        open_now.discard(module)
        return (module, *max(behind, key=len, default=()))

    return list(max((chain(module) for module in names), key=len))


def _module(file: str) -> str:
    parts = ["cfp", *file.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(text: str, names: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module in names:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# ------------------------------------------------------------------------- the page

_ROWS = (
    ("modules of `cfp/`", "modules"),
    ("lines of `cfp/`", "lines"),
    ("commands", "commands"),
    ("docstrings that open with a question word", "question_docstrings"),
    ("modules at the top of `cfp/`", "top_modules"),
    ("modules of the half that decides", "deciding_modules"),
    ("its lines", "deciding_lines"),
    ("of them, what estimates time and memory", "estimating_lines"),
    ("its public names", "deciding_public"),
    ("numbers that decide there", "numbers"),
    ("of them in `settings.py`", "numbers_in_settings"),
    ("classes there that change", "mutable_classes"),
    ("calls there with `*x` or `**x`", "spread_arguments"),
)


def page(data: Mapping[str, Any]) -> str:
    """The page of what was counted."""
    some = data["counts"]
    heads = [one["commit"][:7] for one in some]
    lines = [
        "# The house, counted",
        "",
        f"By `cfp_test/scripts/house.py` on {data['date']}, without a device.",
        "",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---:|' * len(some)}",
    ]
    for title, key in _ROWS:
        lines.append(f"| {title} | {' | '.join(f'{one[key]:,}' for one in some)} |")
    files = [f"{one['longest_file'][0]}, {one['longest_file'][1]}" for one in some]
    lines.append(f"| longest file, lines | {' | '.join(files)} |")
    chains = [str(len(one["longest_chain"])) for one in some]
    lines.append(f"| longest import chain, modules | {' | '.join(chains)} |")
    mechanisms = [", ".join(f"`{m}`" for m in one["mechanisms"]) for one in some]
    totals = [str(len(one["mechanisms"])) for one in some]
    lines.append(f"| mechanisms of the race | {' | '.join(totals)} |")
    lines.append(f"| which | {' | '.join(mechanisms)} |")
    lines += ["", "Modules, lines and public names by room:", ""]
    lines.append(f"| room | {' | '.join(heads)} |")
    lines.append(f"|---|{'---|' * len(some)}")
    for room in sorted({room for one in some for room in one["rooms"]}):
        cells = [_cell(one["rooms"].get(room)) for one in some]
        if len(set(cells)) > 1 or room in DECIDING:
            lines.append(f"| {room} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(room: Mapping[str, int] | None) -> str:
    if room is None:
        return ""
    return f"{room['modules']}, {room['lines']:,}, {room['public']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", action="append", metavar="COMMIT", required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    root = Path(__file__).parents[2]
    counts = [
        {
            "commit": _git(root, "rev-parse", commit).strip(),
            **count(sources_at(commit, root)),
        }
        for commit in options.at
    ]
    date = _git(root, "show", "-s", "--format=%cs", options.at[-1]).strip()
    data = {"date": date, "counts": counts}
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.page:
        options.page.write_text(page(data))
    print(page(data))


if __name__ == "__main__":
    main()

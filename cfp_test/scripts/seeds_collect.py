"""Puts what the seeds' commands left in a folder into one file for the results' page.

    python -m cfp_test.scripts.seeds_collect OUT.json FOLDER [FOLDER ...]

A later folder replaces what an earlier one has of the same name. `--about` adds words
on the devices, `--not_reached` on what is missing, `--commit` the commit that ran.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

# What is kept of the end of an output.
_TAIL = 400


def collected(
    folders: list[Path], about: str, commit: str, not_reached: str = ""
) -> dict[str, Any]:
    """Reads all files of the folders that commands wrote."""
    found: dict[str, Any] = {"about": about, "commit": commit}
    found["not_reached"] = not_reached
    commands: dict[str, Any] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            data = json.loads(path.read_text())
            if path.stem == "seeds":
                root = _root_of(data)
                commands |= {row["name"]: _short(row, root) for row in data}
            else:
                found[path.stem] = data
        for path in sorted(folder.glob("*.jsonl")):
            lines = path.read_text().splitlines()
            found[path.stem] = [json.loads(line) for line in lines]
        for path in sorted(folder.glob("check_qkv*.txt")):
            text = path.read_text()
            if text.startswith("{"):
                found[path.stem] = json.loads(text)
    return {**found, "commands": list(commands.values())}


def _short(row: dict[str, Any], root: str) -> dict[str, Any]:
    """Takes the folders of one machine out of a command."""
    command = row["command"]
    for word in command.split():
        if "/cfp_test/" in word:
            command = command.replace(word, word[word.index("cfp_test/") :])
        elif Path(word).is_absolute() and "python" in Path(word).name:
            command = command.replace(word, "python")
    if root:
        command = command.replace(f"{root}/", "")
    return {**row, "command": command, "tail": row["tail"][-_TAIL:]}


def _root_of(rows: list[dict[str, Any]]) -> str:
    """The folder that commands wrote to."""
    for row in rows:
        words = row["command"].split()
        for name in ("--json", "--dump"):
            if name in words:
                return str(Path(words[words.index(name) + 1]).parent)
    return ""


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--about", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--not_reached", default="", help="a sentence")
    args = parser.parse_args()
    found = collected(args.folders, args.about, args.commit, args.not_reached)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

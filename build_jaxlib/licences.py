"""Under which licence each wheel comes, with the texts that it brings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

from build_jaxlib.fetch import metadata

_TEXT = re.compile(r"(licen[cs]e|copying|notice|authors)", re.IGNORECASE)
_CLASSIFIER = "License :: "
_LONGEST = 60  # Some write the whole text into the field.


@dataclass(frozen=True, slots=True, kw_only=True)
class Licence:
    """A package's licence.

    Attributes:
        name, version: of the package.
        licence: an SPDX expression where the package gives one; "not stated" if none.
        texts: the files that the wheel brings, by path inside of it.
    """

    name: str
    version: str
    licence: str
    texts: tuple[str, ...]


def stated(described: Message) -> str:
    """The licence in a package's metadata, as short as it is said there."""
    if expression := described.get("License-Expression"):
        return expression.strip()
    classifiers = [
        text.split(" :: ")[-1]
        for text in described.get_all("Classifier", [])
        if text.startswith(_CLASSIFIER)
    ]
    named = [text for text in classifiers if text != "OSI Approved"]
    field = described.get("License", "").strip()
    if field and "\n" not in field and len(field) <= _LONGEST and field != "UNKNOWN":
        return field
    return ", ".join(named) or "not stated"


def licence_of(wheel: Path) -> Licence:
    """The licence of a wheel."""
    described = metadata(wheel)
    with ZipFile(wheel) as archive:
        texts = tuple(name for name in archive.namelist() if _is_text(name))
    return Licence(
        name=described["Name"],
        version=described["Version"],
        licence=stated(described),
        texts=texts,
    )


def _is_text(name: str) -> bool:
    path = PurePosixPath(name)
    inside = any(part.endswith(".dist-info") for part in path.parts)
    return inside and (_TEXT.match(path.name) is not None or "licenses" in path.parts)


def write_licences(wheels: list[Path], folder: Path) -> None:
    """Writes a table of all licences, and the texts beside it.

    Args:
        wheels: the wheels.
        folder: gets ``table.md``, and a folder of texts for each package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["| package | version | licence |\n", "|---|---|---|\n"]
    for wheel in sorted(wheels):
        found = licence_of(wheel)
        rows.append(f"| {found.name} | {found.version} | {found.licence} |\n")
        with ZipFile(wheel) as archive:
            for text in found.texts:
                if text.endswith("/"):
                    continue
                own = folder / found.name
                own.mkdir(exist_ok=True)
                # Folders of the wheel become part of the name.
                inner = text.split(".dist-info/", 1)[1].replace("/", "-")
                (own / inner).write_bytes(archive.read(text))
    (folder / "table.md").write_text("".join(rows))

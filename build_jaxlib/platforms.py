"""The platforms that a wheelhouse can be made for, and why not for others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cfp.errors import CfpError

CONSTRAINTS = Path(__file__).parent / "constraints"
PYTHONS = ("3.11", "3.12", "3.13")
ARCHITECTURES = ("x86_64", "aarch64")
# The newest manylinux that this can be asked for; the kernels of today's schedulers
# have glibc 2.28 (RHEL 8) or newer.
DEFAULT_GLIBC = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """What JAX runs on.

    Attributes:
        name: as on the command line.
        extra: of the package jax that brings its plugin; empty for none.
        architectures: of machines that all of its wheels are for.
        glibc: the least minor version of glibc 2 that its wheels need.
        why_not: why there are no wheels for other architectures.
    """

    name: str
    extra: str
    architectures: tuple[str, ...] = ARCHITECTURES
    glibc: int = DEFAULT_GLIBC
    why_not: str = ""

    @property
    def requirement(self) -> str:
        """What to install, as a line of requirements."""
        return f"jax[{self.extra}]" if self.extra else "jax"

    @property
    def constraints(self) -> Path:
        """The file with the versions that go together."""
        return CONSTRAINTS / f"{self.name}.txt"


ACCELERATORS = {
    each.name: each
    for each in (
        Accelerator(name="cpu", extra=""),
        Accelerator(name="cuda12", extra="cuda12"),
        Accelerator(name="cuda13", extra="cuda13"),
        # Without CUDA's own libraries, nine tenths of all: they are the machine's.
        Accelerator(name="cuda12-local", extra="cuda12-local"),
        Accelerator(name="cuda13-local", extra="cuda13-local"),
        Accelerator(
            name="rocm",
            extra="rocm7-local",
            architectures=("x86_64",),
            why_not="AMD builds its plugin for x86_64 only",
        ),
        Accelerator(
            name="tpu",
            extra="tpu",
            architectures=("x86_64",),
            glibc=31,
            why_not="libtpu is built for x86_64 only",
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A kind of machine to install on.

    Attributes:
        accelerator: what JAX runs on there.
        architecture: of its processors, as ``uname -m`` says it.
        python: version of its interpreter: "3.12".
        glibc: minor version of its glibc 2.
    """

    accelerator: Accelerator
    architecture: str
    python: str
    glibc: int

    @property
    def name(self) -> str:
        """Short, for folders."""
        digits = self.python.replace(".", "")
        return f"{self.accelerator.name}-{self.architecture}-py{digits}"

    @property
    def tags(self) -> tuple[str, ...]:
        """The platform tags of wheels that run there, newest first."""
        older = range(self.glibc, 4, -1)
        names = [f"manylinux_2_{minor}_{self.architecture}" for minor in older]
        legacy = ("2014", "2010", "1") if self.architecture == "x86_64" else ("2014",)
        names += [f"manylinux{name}_{self.architecture}" for name in legacy]
        return (*names, f"linux_{self.architecture}")


def platform_of(
    accelerator: str, architecture: str, python: str, glibc: int | None = None
) -> Platform:
    """The platform of these names.

    Args:
        accelerator: one of `ACCELERATORS`.
        architecture: as ``uname -m`` says it.
        python: version of the interpreter: "3.12".
        glibc: minor version of glibc 2; the least that the wheels need if None.

    Raises:
        CfpError: there are no wheels for it.
    """
    if architecture not in ARCHITECTURES:
        raise CfpError(
            f"jaxlib has no wheels for {architecture}, only for "
            f"{' and '.join(ARCHITECTURES)}. "
            "Build jaxlib there with --from_source, as docs/install/ppc64le.md says."
        )
    kind = ACCELERATORS[accelerator]
    if architecture not in kind.architectures:
        raise CfpError(
            f"There are no wheels for {accelerator} on {architecture}: {kind.why_not}. "
            f"Give --accelerator cpu, or one of {', '.join(kind.architectures)}."
        )
    if python not in PYTHONS:
        raise CfpError(
            f"cfp does not run on this version of Python, {python}. Give --python "
            f"with one of {', '.join(PYTHONS)}."
        )
    if glibc is not None and glibc < kind.glibc:
        raise CfpError(
            f"The wheels for {accelerator} need a newer glibc than 2.{glibc}: "
            f"2.{kind.glibc}. Run in a container with a newer system "
            "(docs/install/container.md)."
        )
    return Platform(
        accelerator=kind,
        architecture=architecture,
        python=python,
        glibc=glibc or kind.glibc,
    )

#!/usr/bin/env python3
"""Makes what cfp is installed from where there is no internet.

    python build_jaxlib/build.py                      # for this machine, CPUs
    python build_jaxlib/build.py --enable_cuda --python 3.12 --architecture aarch64
    python build_jaxlib/build.py --verify WHEELHOUSE  # where there is no internet
    python build_jaxlib/build.py --from_source JAX    # where jaxlib has no wheel

jaxlib is a stock wheel: cfp has no patches. See docs/install.md.
"""

from __future__ import annotations

import argparse
import json
import platform as host
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_jaxlib import fetch, source, verify
from build_jaxlib.licences import write_licences
from build_jaxlib.platforms import ACCELERATORS, Platform, platform_of
from build_jaxlib.resolve import locked, resolve
from build_jaxlib.tools import ROOT
from cfp.errors import CfpError

DIST = Path(__file__).resolve().parent / "dist"
_HERE = Path(__file__).resolve().parent


def main(words: list[str] | None = None) -> int:
    """Does what the words ask for; returns the exit code."""
    options = _parser().parse_args(words)
    try:
        if options.from_source is not None:
            return _from_source(options)
        if options.verify is not None:
            return _verify(options.verify.resolve(), options.environment)
        return _wheelhouse(options)
    except CfpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _wheelhouse(options: argparse.Namespace) -> int:
    platform = platform_of(
        options.accelerator, options.architecture, options.python, options.glibc
    )
    print(f"Resolving for {platform.name}, glibc 2.{platform.glibc} or newer ...")
    lock = resolve(platform, ("models", *options.extra), options.requirement)
    versions = locked(lock)
    shown = {n: v for n, v in versions.items() if n.startswith(("jax", "libtpu"))}
    print(
        f"{len(versions)} packages: {', '.join(f'{n} {v}' for n, v in shown.items())}"
    )
    folder = (options.output or DIST / platform.name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.lock_only:
        (folder / "lock.txt").write_text(lock)
        print(f"Wrote {folder / 'lock.txt'}, with the hashes of all wheels.")
        return 0
    wheels = _fill(folder, platform, lock)
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{folder}: {len(wheels)} wheels, {total / 2**20:.0f} MiB.")
    if options.dev_install:
        verify.install(sys.executable, folder)
        verify.try_out(sys.executable)
    print(f"On the other machine: sh {folder.name}/install.sh ENVIRONMENT")
    return 0


def _fill(folder: Path, platform: Platform, lock: str) -> list[Path]:
    """Puts together all that a wheelhouse holds; returns its wheels."""
    place = folder / "wheels"
    place.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        wanted = Path(made) / "lock.txt"
        wanted.write_text(lock)
        fetch.fetch(platform, wanted, place)
    fetch.build_cfp(place)
    wanted_names = {*locked(lock), "cfp"}
    for wheel in place.glob("*.whl"):
        if fetch.metadata(wheel)["Name"].lower().replace("_", "-") not in wanted_names:
            wheel.unlink()  # Of an earlier lock.
    wheels = sorted(place.glob("*.whl"))
    (folder / "lock.txt").write_text(fetch.exact_lock(wheels))
    write_licences(wheels, folder / "licences")
    _pack_sources(folder / "cfp-source.tar.gz")
    shutil.copy(_HERE / "install.sh", folder / "install.sh")
    described = {
        "accelerator": platform.accelerator.name,
        "architecture": platform.architecture,
        "python": platform.python,
        "glibc": f"2.{platform.glibc}",
        "packages": {
            fetch.metadata(w)["Name"]: fetch.metadata(w)["Version"] for w in wheels
        },
    }
    (folder / "wheelhouse.json").write_text(json.dumps(described, indent=2) + "\n")
    fetch.write_sums(folder)
    return wheels


def _pack_sources(archive: Path) -> None:
    """The clone as git knows it: tests, docs and `make demo` for the other machine."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False
    )
    if listed.returncode:
        print("Not a clone of git: the wheelhouse goes without sources.")
        return
    with tarfile.open(archive, "w:gz") as packed:
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).exists():
                packed.add(ROOT / name, f"cfp/{name}")


def _verify(wheelhouse: Path, environment: Path | None) -> int:
    described = json.loads((wheelhouse / "wheelhouse.json").read_text())
    here = (host.machine(), verify.this_python())
    meant = (described["architecture"], described["python"])
    if here != meant:
        raise CfpError(
            f"The wheelhouse is for {meant[0]} and Python {meant[1]}; this is "
            f"{here[0]} and Python {here[1]}. Verify it there, or with "
            f"python{meant[1]}."
        )
    with tempfile.TemporaryDirectory() as made:
        python = verify.create(environment or Path(made) / "venv", sys.executable)
        verify.install(python, wheelhouse)
        verify.try_out(python)
    return 0


def _from_source(options: argparse.Namespace) -> int:
    output = (options.output or DIST / "source").resolve()
    words = source.command(
        options.from_source.resolve(),
        output,
        options.accelerator,
        options.bazel_options,
        build_options=options.build_option,
        force=options.force,
    )
    print(" ".join(words))
    if options.lock_only:
        return 0
    code = source.build(words, options.from_source)
    if code:
        return code
    if options.dev_install:
        wheels = sorted(output.glob("*.whl"))
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall"]
        subprocess.run([*pip, *map(str, wheels)], check=True)
        verify.try_out(sys.executable)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--accelerator", choices=list(ACCELERATORS), default="cpu")
    kind.add_argument(
        "--enable_cuda",
        dest="accelerator",
        action="store_const",
        const="cuda13",
        help="the same as --accelerator cuda13",
    )
    add = parser.add_argument
    add(
        "--architecture",
        default=host.machine(),
        help="of the other machine, by its uname -m (default: %(default)s)",
    )
    add("--python", default=verify.this_python(), help="its version of Python")
    add("--glibc", type=int, metavar="N", help="its glibc is 2.N (ldd --version)")
    add(
        "--extra",
        action="append",
        default=[],
        help="of cfp, beside models: cluster, dev; may be given several times",
    )
    add(
        "--requirement",
        action="append",
        default=[],
        metavar="LINE",
        help="what else to put in, such as wandb",
    )
    add("--output", type=Path, metavar="DIR", help="in place of build_jaxlib/dist/...")
    add(
        "--lock_only",
        action="store_true",
        help="resolve only; with --from_source, print the command only",
    )
    add(
        "--dev_install",
        action="store_true",
        help="install into this Python's environment, too, and run a graft there",
    )
    add(
        "--verify",
        type=Path,
        metavar="WHEELHOUSE",
        help="install it into a fresh environment, without a network; run a graft",
    )
    add("--environment", type=Path, metavar="DIR", help="where --verify makes it; kept")
    add(
        "--from_source",
        type=Path,
        metavar="CHECKOUT",
        help="build jaxlib from this checkout of JAX",
    )
    add("--bazel_options", action="append", default=[], help="passed on to Bazel")
    add(
        "--build_option",
        action="append",
        default=[],
        help="passed on to JAX's build, such as --build_option=--bazel_path=/opt/bazel",
    )
    add("--force", action="store_true", help="build even where it is known to fail")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

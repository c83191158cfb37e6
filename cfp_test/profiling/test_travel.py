"""Measurements of one host that answer, or do not, on another."""

import json

import jax
import pytest

from cfp.profiling.record import ProfileKey, environment_parts, other_kind
from cfp.profiling.store import ProfileStore
from cfp_test.cli.cli_runner import run_batch
from cfp_test.profiling.conftest import profile


def renamed(parts, **changes):
    return tuple((name, changes.get(name, value)) for name, value in parts)


@pytest.fixture
def where():
    """Lists the facts that measurements depend on here."""
    return environment_parts(jax.devices()[:4])


def job_on(case, parts):
    return case.job(key=ProfileKey((("test", "travels"), *parts)))


def test_a_host_of_the_same_kind_is_answered_by_another_ones_file(
    case, tmp_path, where
):
    job = job_on(case, where)
    with ProfileStore(tmp_path / "one.sqlite") as store:
        first = profile(case, [job], store)
        assert store.export(tmp_path / "file") == 1
    with ProfileStore(tmp_path / "two.sqlite") as store:
        assert store.merge(tmp_path / "file") == 1
        again = profile(case, [job], store)
        assert again == first
        # The same on another processor is something else, and both are kept.
        other = job_on(case, renamed(where, processor="another, 4 cores"))
        assert profile(case, [other], store).keys() == {other.key.digest}
        assert len(store) == 2


def test_what_is_of_another_kind_is_named(where):
    assert other_kind((("test", "x"), *where), where) == ""
    elsewhere = renamed(where, device_kind="NVIDIA H200", devices="8")
    assert other_kind(elsewhere, where) == "device_kind: NVIDIA H200 there, cpu here"


def test_import_says_what_it_keeps_apart(case, tmp_path, where):
    parts = renamed(where, device_kind="NVIDIA H200")
    with ProfileStore(tmp_path / "there.sqlite") as store:
        jobs = [job_on(case, where), job_on(case, parts)]
        profile(case, jobs, store)
        store.export(tmp_path / "file")
    [done] = run_batch(
        [["profile", "--import", "file", "--workdir", "w"]],
        tmp_path,
        JAX_PLATFORMS="cpu",
    )
    assert done.code == 0, done.err + done.crash
    said = done.out.splitlines()
    assert said[0] == "2 measurements added from file"
    apart = [line for line in said if "kept apart" in line]
    assert apart == [
        "  1 of another kind of machine, kept apart: "
        "device_kind: NVIDIA H200 there, cpu here"
    ]
    kept = (tmp_path / "file").read_text().splitlines()
    assert {json.loads(line)["key"] for line in kept} == {
        job.key.digest for job in jobs
    }

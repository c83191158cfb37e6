"""Jobs that are compiled in another process than where they run."""

import pickle
from dataclasses import replace

import jax
import numpy as np
import pytest

from cfp.profiling import builder
from cfp.profiling.builder import BuildEnvironment, Built, build, compile_right
from cfp.profiling.inputs import input_kinds, make_inputs
from cfp.profiling.options import MeasureOptions
from cfp.profiling.record import ProfileRecord
from cfp.profiling.remote import RefusedElsewhere, compile_parcel
from cfp.profiling.runner import profile
from cfp.profiling.store import ProfileStore
from cfp.program.signature import WrongPlace, unpack
from cfp_test.profiling.conftest import QUICK


class Elsewhere:
    """Acts as another process, with all that travels written down and read."""

    at_once = 2

    def __init__(self, error=None):
        self.compiled = []
        self.kept = []
        self.error = error

    def compiles_for(self, platform):
        return platform == "cpu"

    def compile(self, parcel, options):
        if self.error is not None:
            raise self.error
        self.compiled.append(parcel)
        there = pickle.loads(pickle.dumps(parcel))
        assert there == parcel
        return pickle.loads(pickle.dumps(compile_parcel(there, options)))

    def keep(self, records, replace):
        self.kept += [(record.key, replace) for record in records]


def run(built, case, job):
    kinds = input_kinds(case.program, job.part, job.in_specs)
    inputs = make_inputs(kinds, case.mesh, job.donated)
    results = [np.asarray(one) for one in built.compiled(*inputs)]
    return results, [one.is_deleted() for one in inputs]


def test_what_is_compiled_elsewhere_is_the_same_program(case):
    job, remote = case.job(), Elsewhere()
    here = build(case.program, case.mesh, job)
    there = build(case.program, case.mesh, job, BuildEnvironment(remote=remote))
    assert isinstance(here, Built) and isinstance(there, Built)
    assert len(remote.compiled) == 1
    assert there.collectives == here.collectives != ()
    for name in ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes"):
        assert getattr(there, name) == getattr(here, name) > 0
    (one, gone), (other, gone_too) = run(here, case, job), run(there, case, job)
    assert gone == gone_too and any(gone)  # Donated there, too.
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)
    shardings = [str(s) for s in jax.tree.leaves(here.compiled.output_shardings)]
    assert shardings == [
        str(s) for s in jax.tree.leaves(there.compiled.output_shardings)
    ]


def test_what_is_refused_there_is_the_record_that_it_is_here(case):
    job = case.job(options=(("xla_no_such_option", "1"),))
    here = build(case.program, case.mesh, job)
    assert isinstance(here, ProfileRecord)
    error = RefusedElsewhere("JaxRuntimeError", "no such option", "compile_error")
    there = build(
        case.program, case.mesh, job, BuildEnvironment(remote=Elsewhere(error))
    )
    assert isinstance(there, ProfileRecord)
    assert there.status == here.status == "compile_error"
    assert there.reason == "JaxRuntimeError: no such option"
    dead = RefusedElsewhere("WorkerCrashedError", "it died", "crashed")
    record = build(
        case.program, case.mesh, job, BuildEnvironment(remote=Elsewhere(dead))
    )
    assert isinstance(record, ProfileRecord) and record.status == "crashed"


def test_where_a_remote_process_cannot_it_is_compiled_here(case, caplog, monkeypatch):
    here = []

    def compile_here(lowered, options):
        here.append(lowered)
        return compile_right(lowered, options)

    monkeypatch.setattr(builder, "compile_right", compile_here)
    remote = Elsewhere(WrongPlace("no cluster"))
    built = build(case.program, case.mesh, case.job(), BuildEnvironment(remote=remote))
    assert isinstance(built, Built) and len(here) == 1
    assert "whole is compiled here instead: no cluster" in caplog.text


def test_another_version_of_jax_does_not_read_a_program(case):
    remote = Elsewhere()
    build(case.program, case.mesh, case.job(), BuildEnvironment(remote=remote))
    [parcel] = remote.compiled
    assert parcel.mesh() == case.mesh
    with pytest.raises(WrongPlace, match=r"got one of jax 0\.1"):
        unpack(replace(parcel, jax_version="0.1"), case.mesh)
    with pytest.raises(WrongPlace, match="expected devices"):
        replace(parcel, devices=(0, 1, 2, 999)).mesh()


def test_jobs_are_compiled_in_the_remote_process_and_run_here(case, tmp_path):
    remote = Elsewhere()
    jobs = [case.job("a"), case.job("b", shard_batch=False)]
    with ProfileStore(tmp_path / "s.sqlite", copy=remote.keep) as store:
        how = {"timing": QUICK, "options": MeasureOptions(remote=remote)}
        found = profile(case.program, case.mesh, jobs, store, **how)
        assert found.measured == 2 and len(remote.compiled) == 2
        # All that is kept is kept there, too, and nothing more.
        assert {key for key, _ in remote.kept} == set(found.records)
        again = profile(case.program, case.mesh, jobs, store, **how)
    assert again.cached == 2 and len(remote.compiled) == 2

import dataclasses
import threading

import jax
import jax.numpy as jnp
import pytest

from cfp.analysis.analyze import analyze
from cfp.analysis.layout import Layout, Storage, constraints
from cfp.analysis.strategies import block_strategies
from cfp.profiling import builder
from cfp.profiling.builder import (
    BuildEnvironment,
    Built,
    Job,
    build,
    build_lowered,
    is_out_of_memory,
    reason_of,
)
from cfp.profiling.hlo import compile_right
from cfp.profiling.inputs import input_kinds, make_inputs
from cfp.profiling.record import ProfileKey, ProfileRecord
from cfp.program.part import cut_part

KEY = ProfileKey((("test", "builder"),))


# -------------------------------------------------------------------------------- jobs


def test_a_job_checks_that_it_fits_its_part(case):
    job = case.job()
    assert job.donated == tuple(put for put, _ in job.feedback)
    assert len(job.feedback) == 5  # Weights, speeds and the count.
    with pytest.raises(AssertionError):
        dataclasses.replace(job, in_specs=job.in_specs[1:])
    with pytest.raises(AssertionError):
        dataclasses.replace(job, out_specs=(*job.out_specs, ()))
    with pytest.raises(AssertionError, match="twice"):
        dataclasses.replace(job, feedback=(*job.feedback, job.feedback[0]))
    with pytest.raises(IndexError):
        dataclasses.replace(job, feedback=((0, 99),))


def test_feedback_must_be_sharded_like_what_it_replaces(case):
    job = case.job()
    _, got = next(pair for pair in job.feedback if job.in_specs[pair[0]])
    specs = list(job.out_specs)
    specs[got] = (("x",), ())
    with pytest.raises(AssertionError, match="feedback"):
        dataclasses.replace(job, out_specs=tuple(specs))


# ------------------------------------------------------------------------------- builds


def test_a_part_is_built(case):
    job = case.job()
    built = build(case.program, case.mesh, job)
    assert isinstance(built, Built)
    assert built.key == job.key
    # Weights and speeds of 512 bytes, a count, and a quarter of the batch.
    assert built.argument_bytes == 4 * 512 + 4 + 64
    assert built.output_bytes >= 4 * 512 + 8
    assert built.alias_bytes == 4 * 512 + 4
    assert built.build_seconds > 0
    # The gradients of both layers, and the loss, summed over the batch.
    assert {(c.kind, c.group_size) for c in built.collectives} == {("all-reduce", 4)}
    assert sum(c.bytes * c.count for c in built.collectives) == 2 * 512 + 4
    assert built.peak_bytes == (
        built.argument_bytes
        + built.output_bytes
        - built.alias_bytes
        + built.temp_bytes
        + built.code_bytes
    )
    assert built.record("timeout").peak_bytes == built.peak_bytes


def test_a_built_part_computes_what_the_step_does(case):
    job = case.job()
    built = build(case.program, case.mesh, job)
    assert isinstance(built, Built)
    kinds = input_kinds(case.program, job.part, job.in_specs)
    inputs = make_inputs(kinds, case.mesh, job.donated)
    by_name = {
        case.program.arg_names[case.program.args.index(value)]: jnp.asarray(
            jax.device_get(array)
        )
        for value, array in zip(job.part.inputs, inputs, strict=True)
    }
    outputs = dict(zip(job.part.outputs, built.compiled(*inputs), strict=True))
    loss = outputs[case.program.outputs[-1]]
    hidden = jnp.tanh(by_name["x"] @ by_name["state/weights/up"])
    expected = jnp.mean((hidden @ by_name["state/weights/down"]) ** 2)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_a_record_says_what_the_compiler_said(case):
    built = build(case.program, case.mesh, case.job())
    assert isinstance(built, Built)
    record = built.record("ok", samples_ms=[1.0, 2.0], run_seconds=0.5)
    assert (record.key, record.parts) == (built.key.digest, built.key.parts)
    assert (record.samples_ms, record.run_seconds) == ((1.0, 2.0), 0.5)
    assert record.temp_bytes == built.temp_bytes
    assert record.alias_bytes == built.alias_bytes
    assert record.collectives == built.collectives
    assert record.build_seconds == built.build_seconds
    assert ProfileRecord.from_json(record.to_json()) == record


def test_what_cannot_be_lowered_is_a_record(case):
    job = case.job()
    # Eight rows cannot be cut in two and then in four by the same axis.
    specs = tuple(("x", "x") if spec else spec for spec in job.in_specs)
    record = build(
        case.program, case.mesh, dataclasses.replace(job, in_specs=specs, feedback=())
    )
    assert isinstance(record, ProfileRecord)
    assert record.status == "compile_error"
    assert record.key == job.key.digest
    assert "Error" in record.reason


def test_what_the_compiler_refuses_is_a_record(case):
    job = case.job(options=(("xla_no_such_option", "1"),))
    record = build(case.program, case.mesh, job)
    assert isinstance(record, ProfileRecord)
    assert record.status == "compile_error"
    assert "xla_no_such_option" in record.reason
    assert record.build_seconds > 0


def test_parts_are_built_in_threads(case):
    outcomes = {}

    def work(name: str, shard_batch: bool) -> None:
        job = case.job(name, shard_batch=shard_batch)
        outcomes[name] = build(case.program, case.mesh, job)

    threads = [
        threading.Thread(target=work, args=(f"job {i}", i % 2 == 0)) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(outcome, Built) for outcome in outcomes.values())
    sent = {name: len(built.collectives) for name, built in outcomes.items()}
    assert all((sent[f"job {i}"] > 0) == (i % 2 == 0) for i in range(6))


# ------------------------------------------------------------------------------- errors


def test_too_little_memory_is_distinguished_from_other_errors():
    error = jax.errors.JaxRuntimeError
    assert is_out_of_memory(error("RESOURCE_EXHAUSTED: Out of memory allocating 9."))
    assert is_out_of_memory(error("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(error("INVALID_ARGUMENT: No such compile option"))
    assert not is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))


def test_reasons_are_cut():
    assert reason_of(ValueError("no")) == "ValueError: no"
    assert len(reason_of(ValueError("no" * 9999))) == 2000


# ------------------------------------------------------------------- build environments


def test_compiler_options_are_for_gpus_only(tmp_path):
    environment = BuildEnvironment.beside(tmp_path / "profiles.sqlite")
    assert environment.options("cpu") == {}
    assert environment.options("tpu") == {}
    assert not (tmp_path / "autotune").exists()
    expected = {"xla_gpu_per_fusion_autotune_cache_dir": str(tmp_path / "autotune")}
    assert environment.options("gpu") == expected
    assert environment.options("cuda") == expected
    assert BuildEnvironment().options("gpu") == {}
    assert (tmp_path / "autotune").is_dir()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_the_compiler_gets(case, tmp_path, monkeypatch, platform):
    passed = []

    def note(lowered, options):
        passed.append(dict(options))
        return compile_right(lowered, {})

    monkeypatch.setattr(builder, "compile_right", note)
    monkeypatch.setattr(
        BuildEnvironment,
        "options",
        lambda self, _: {"xla_gpu": "1", "mine": "2"} if platform == "gpu" else {},
    )
    job = case.job(options=(("mine", "3"),))
    build(case.program, case.mesh, job, BuildEnvironment(folder=tmp_path))
    # A job's own options go before those of the environment.
    assert passed == [
        {"xla_gpu": "1", "mine": "3"} if platform == "gpu" else {"mine": "3"}
    ]


def test_a_compiler_that_keeps_no_account(case):
    asked = []

    class Silent:
        def memory_analysis(self):
            return None

        def as_text(self):
            return None

    class Lowered:
        def compile(self, compiler_options):
            asked.append(compiler_options)
            return Silent()

    built = build_lowered(KEY, Lowered, {})  # type: ignore[arg-type]
    assert built.peak_bytes == 0
    assert built.collectives == ()
    # What has no text is not known to be right as it came first.
    assert asked == [None, {"xla_disable_hlo_passes": "rematerialization"}]


# ---------------------------------------------------------------------------- segments


def test_segments_under_several_layouts_are_built(mesh, case):
    axes = tuple(mesh.shape.items())
    analysis = analyze(case.program, axes)
    frame = analysis.frame
    for segment in analysis.segments:
        part = cut_part(case.program, segment.ops)
        for storage in Storage:
            layout = Layout(
                frame,
                {
                    index: block_strategies(
                        case.program, frame.blocks[index], frame.mesh
                    )[0]
                    for index in segment.blocks
                },
                dict.fromkeys(segment.groups, storage),
            )

            def spec(value: int, layout: Layout = layout):
                shape = case.program.values[value].shape
                return layout.spec(value) or ((),) * len(shape)

            job = Job(
                key=KEY,
                label=f"segment {segment.index}, {storage}",
                part=part,
                constraints=constraints(layout, frozenset(part.ops)),
                in_specs=tuple(spec(value) for value in part.inputs),
                out_specs=tuple(spec(value) for value in part.outputs),
            )
            assert isinstance(build(case.program, mesh, job), Built), job.label

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfp.profiling.record import ProfileKey, environment_parts, normalise_xla_flags


def key(**parts: str) -> ProfileKey:
    return ProfileKey(tuple(parts.items()))


def differing(one: ProfileKey, other: ProfileKey) -> set[str]:
    """Names of the parts that are not in both keys alike."""
    return {name for name, _ in {*one.parts} ^ {*other.parts}}


def test_digest_is_the_same_for_ever():
    # A change here throws away every user's cache: raise SCHEMA_VERSION instead.
    assert (
        key(segment="s", mesh="4").digest
        == "85e818338cc7a5a0af9f250bc94429157e7a9ccd888ce8a6f5847810aa792326"
    )


parts_lists = st.lists(
    st.tuples(st.text(), st.text()), max_size=4, unique_by=lambda part: part[0]
).map(tuple)


@settings(deadline=None)
@given(parts_lists, parts_lists)
def test_digests_are_equal_for_equal_parts_only(one, other):
    assert (ProfileKey(one).digest == ProfileKey(other).digest) == (one == other)


def test_digest_keeps_parts_apart_and_in_order():
    assert key(a="bc").digest != key(ab="c").digest
    assert key(a="1", b="2").digest != key(b="2", a="1").digest


def test_a_part_may_come_once_only():
    with pytest.raises(ValueError, match=r"\['a'\]"):
        ProfileKey((("a", "1"), ("b", "1"), ("a", "2")))


@pytest.mark.parametrize(
    ("flags", "normal"),
    [
        ("", ""),
        ("--xla_b=1  --xla_a=2\n", "--xla_a=2 --xla_b=1"),
        ("--xla_dump_to=/x --xla_dump_hlo_as_text --xla_a", "--xla_a"),
        ("--xla_force_host_platform_device_count=8", ""),
        ("--xla_cpu_collective_call_terminate_timeout_seconds=600", ""),
        ("--xla_gpu_per_fusion_autotune_cache_dir=/x --xla_a=1", "--xla_a=1"),
        ("--xla_gpu_autotune_level=0", "--xla_gpu_autotune_level=0"),
        ("--xla_a=1 --xla_a=1", "--xla_a=1"),
        # The last one counts: their order is part of what they mean.
        ("--xla_a=2 --xla_a=1", "--xla_a=2 --xla_a=1"),
        ("--xla_a=1 --xla_a=2", "--xla_a=1 --xla_a=2"),
        ("--xla_a='one two'", "'--xla_a=one two'"),
        ("--xla_a='unpaired", """'--xla_a='"'"'unpaired'"""),
    ],
)
def test_normalise_xla_flags(flags, normal):
    assert normalise_xla_flags(flags) == normal
    assert normalise_xla_flags(normal) == normal


def test_flags_from_a_file(tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_b=1\n--xla_a=2\n--xla_dump_to=/x\n")
    assert normalise_xla_flags(str(file)) == "--xla_a=2 --xla_b=1"
    assert normalise_xla_flags("no-such-file") == "no-such-file"


@pytest.fixture(scope="module")
def cpu() -> list[Any]:
    # Before any test sets flags that XLA does not know and would die of.
    return jax.devices("cpu")[:1]


def test_environment_of_this_machine(cpu, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_b --xla_a --xla_dump_to=/x")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    parts = dict(environment_parts(cpu))
    assert parts["platform"] == "cpu"
    assert parts["devices"] == parts["processes"] == "1"
    assert parts["jax_version"] == jax.__version__
    assert parts["jaxlib_version"] == metadata.version("jaxlib")
    assert parts["xla_flags"] == "--xla_a --xla_b"
    assert parts["processor"].endswith(" cores")
    assert "nccl" not in parts
    assert all(isinstance(value, str) for value in parts.values())
    assert environment_parts(cpu) == tuple(parts.items())


def test_settings_of_jax_are_parts(cpu):
    before = ProfileKey(environment_parts(cpu))
    with jax.default_matmul_precision("highest"):
        inside = ProfileKey(environment_parts(cpu))
    assert differing(inside, before) == {"matmul_precision"}
    with jax.enable_x64(dict(before.parts)["enable_x64"] == "False"):
        inside = ProfileKey(environment_parts(cpu))
    assert differing(inside, before) == {"enable_x64"}
    with jax.default_prng_impl("rbg"):
        inside = ProfileKey(environment_parts(cpu))
    assert differing(inside, before) == {"prng_impl"}
    assert dict(before.parts)["threefry_partitionable"] in ("True", "False", "absent")


def fake_gpu(
    process_index: int, device_kind: str = "NVIDIA H200", number: int = 0
) -> Any:
    return SimpleNamespace(
        id=number,
        process_index=process_index,
        platform="gpu",
        device_kind=device_kind,
        local_hardware_id=number,
        client=SimpleNamespace(platform_version="cuda 12090", process_index=lambda: 0),
    )


def test_environment_of_gpus(monkeypatch):
    devices = [fake_gpu(index // 2) for index in range(4)]
    for name in ("NCCL_P2P_DISABLE", "NCCL_ALGO", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    before = ProfileKey(environment_parts(devices))
    parts = dict(before.parts)
    assert (parts["devices"], parts["processes"]) == ("4", "2")
    assert parts["device_kind"] == "NVIDIA H200"
    assert parts["driver_version"] == "cuda 12090"
    assert "processor" not in parts

    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    after = ProfileKey(environment_parts(devices))
    assert differing(after, before) == {"nccl"}
    assert dict(after.parts)["nccl"] == "NCCL_ALGO=Ring NCCL_P2P_DISABLE=1"

    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5")
    assert differing(ProfileKey(environment_parts(devices)), after) == {"allocator"}


def test_mixed_kinds_are_named_once_each():
    devices = [fake_gpu(0, kind) for kind in ("b", "a", "b")]
    assert dict(environment_parts(devices))["device_kind"] == "a, b"


def test_the_order_of_devices_is_a_part():
    """Neighbours in two meshes over the same devices may be linked in another way."""

    def order(*numbers: int) -> str:
        devices = [fake_gpu(0, number=n) for n in numbers]
        return dict(environment_parts(devices))["order"]

    assert order(0, 1, 2, 3) == order(4, 5, 6, 7) == "0,1,2,3"
    assert order(0, 2, 1, 3) == "0,2,1,3"

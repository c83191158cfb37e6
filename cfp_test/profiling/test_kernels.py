"""Files of compiled kernels: one for each compile, and what one learnt others know."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier

import jax

from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.kernels import KernelFiles, kernel_files


def test_no_two_compiles_have_one_file(tmp_path):
    files = KernelFiles(tmp_path)
    together = Barrier(4)

    def compile_once(_: int) -> str:
        with files.lent() as path:
            together.wait(timeout=60)
            return path.name

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(compile_once, range(4)))) == 4
        # And there are no more of them than were needed at once.
        assert len(set(pool.map(compile_once, range(8)))) == 4


def test_the_one_in_use_last_is_lent_first(tmp_path):
    files = KernelFiles(tmp_path)
    with files.lent() as first, files.lent() as second:
        assert first != second
        assert not first.exists()
        first.write_bytes(b"a")
    with files.lent() as path:
        assert path == first  # It was given back last.


def test_a_new_file_begins_with_what_the_last_one_knew(tmp_path):
    files = KernelFiles(tmp_path)
    with files.lent() as path:
        path.write_bytes(b"kernels")
    with ExitStack() as stack:
        paths = [stack.enter_context(files.lent()) for _ in range(3)]
        assert [p.read_bytes() for p in paths] == [b"kernels"] * 3
        paths[1].write_bytes(b"kernels and more")
        assert paths[2].read_bytes() == b"kernels"


def test_a_failed_compile_gives_its_file_back(tmp_path):
    files = KernelFiles(tmp_path)
    try:
        with files.lent() as lost:
            raise RuntimeError
    except RuntimeError:
        pass
    with files.lent() as path:
        assert path == lost


def test_a_process_has_one_set_of_files(tmp_path):
    one = BuildEnvironment.beside(tmp_path / "profiles.sqlite")
    other = BuildEnvironment.beside(tmp_path / "other" / "profiles.sqlite")
    assert one.kernels is other.kernels is kernel_files()


def test_who_gets_a_file(tmp_path):
    environment = BuildEnvironment.beside(tmp_path / "profiles.sqlite")
    tuned = environment.options("gpu")
    with environment.lent_options("cpu") as options:
        assert options == {}
    with environment.lent_options("gpu") as options:
        path = options.pop("xla_gpu_kernel_cache_file")
        assert options == tuned
        with environment.lent_options("cuda") as others:
            assert others["xla_gpu_kernel_cache_file"] != path
    with BuildEnvironment(autotune_dir=tmp_path).lent_options("gpu") as options:
        assert list(options) == ["xla_gpu_per_fusion_autotune_cache_dir"]
    # What JAX keeps of compiled programs is found again only under the same options.
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        with environment.lent_options("gpu") as options:
            assert options == tuned
    finally:
        jax.config.update("jax_compilation_cache_dir", before)

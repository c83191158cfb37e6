"""Eight virtual CPU devices for all tests, set before JAX is imported; quick programs.

Times follow from what is compiled: no test is decided by how busy the machine is. Those
of timing itself, in `profiling/`, have a clock.
"""

import gc
import os
import tempfile
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings

from cfp_test.support.golden import check_golden
from cfp_test.support.quick_flags import QUICK_FLAGS

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("COLUMNS", None)  # Text is as wide as where nothing says it.
os.environ["XLA_FLAGS"] = (
    f"{QUICK_FLAGS} "
    + os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
)
# What one run of the tests has compiled is not there in the next.
_CACHE = tempfile.TemporaryDirectory(prefix="cfp_test_cache")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
# No example is refused for what it takes, or took to draw.
# In CI the examples are the same in each run: a change fails over its own faults only.
settings.register_profile(
    "unhurried",
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="CI" in os.environ,
)
settings.load_profile("unhurried")


# Files that take longest. With several processes they come first: what is left for the
# end is short, and no process waits for another. The very first are those that wait for
# others, too: in CI, other checks run meanwhile.
_LONGEST = """
    distributed/test_several cluster/test_ray profiling/test_faults api/test_planner
    race/test_race checks/test_check moe/test_moe_passes
    program/test_partitioned plan/test_keep cli/test_cli api/test_api
    models/test_models kernels/test_tools profiling/test_collectives
    analysis/test_presets kernels/test_replaced analysis/test_blocks
    kernels/test_called analysis/test_propagated api/test_variants
    proving/test_proving bench/test_scripts docs/test_docs
    analysis/test_communication analysis/test_segments race/test_remembered
    docs/test_tutorial api/test_estimated api/test_alone
""".split()


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write golden texts anew"
    )


@pytest.fixture
def golden(request):
    """Compares texts by name with a file in `golden/` beside the test."""
    update = request.config.getoption("--update-golden")
    folder = request.path.parent / "golden"
    return lambda name, texts: check_golden(folder / f"{name}.txt", texts, update)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keeps the garbage collector from what stays, and has it come less often.

    What is collected stays for all tests, and what they trace for a while: as Python
    sets it, the collector took a tenth of their time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        gc.enable()


def pytest_collection_modifyitems(items):
    """Puts the longest files first where tests are shared among processes."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {f"cfp_test/{name}.py": place for place, name in enumerate(_LONGEST)}
        items.sort(key=lambda item: places.get(item.location[0], len(places)))


@pytest.fixture(scope="module", autouse=True)
def steady_times():
    """Programs take the same time whenever and wherever they run."""
    from cfp_test.support.injected import hold_times

    with pytest.MonkeyPatch.context() as patch:
        hold_times(patch)
        yield


@pytest.fixture(scope="module")
def mesh():
    """Four devices along one axis."""
    import jax

    return jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder for what a module's tests store."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compiled_once():
    """Has XLA compile each program once in a module, whichever test asks for it.

    For modules whose tests plan one program again and again, each with a store of its
    own. Programs that differ in names and places of the source alone share the first
    one's. JAX's own persistent cache is not for tests, since XLA cannot run all that it
    has saved for a CPU.
    """
    from jax._src import compiler

    compile_anew, known = compiler.backend_compile_and_load, {}

    def compile_once(backend, module, devices, options, host_callbacks):
        asked = backend, module, devices, options, host_callbacks
        text = module.operation.get_asm(enable_debug_info=False)
        # What is called in this process is named by an address.
        if host_callbacks or "CustomSPMDPartitioning" in text:
            return compile_anew(*asked)
        key = backend, text, tuple(devices), options.SerializeAsString()
        if key not in known:
            known[key] = compile_anew(*asked)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "backend_compile_and_load", compile_once)
        yield


@pytest.fixture(scope="module")
def compared_on_one():
    """Has results compared on one device: a program for each shape, not each sharding.

    For modules that compare results of many shardings.
    """
    import jax

    def bring_to_one(*arrays):
        return tuple(jax.device_put(x, jax.devices()[0]) for x in arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cfp.checking.check.brought_together", bring_to_one)
        yield


@pytest.fixture(scope="module")
def analyzed_once():
    """Has each step traced and analysed once in a module, whichever test plans it.

    For modules whose tests plan one step again and again, and change nothing that
    tracing or analysing goes by.
    """
    from cfp import passes
    from cfp.program.calling import given_bytes

    analyze_anew, known = passes.analyze_step, []

    def analyze_once(step, mesh, pins=None):
        given = tuple(
            given_bytes(one, aval.dtype)
            for one, aval in zip(step.examples, step.avals, strict=False)
        )
        asked = step, given, mesh, pins or {}
        for before, found in known:
            if before == asked:
                vars(step).update(vars(before[0]))  # It is traced.
                return replace(found)
        known.append((asked, analyze_anew(step, mesh, pins)))
        return known[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cfp.variants.analyze_step", analyze_once)
        yield

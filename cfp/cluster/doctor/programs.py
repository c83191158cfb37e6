"""Checks that compile programs and run them."""

from __future__ import annotations

from cfp.cluster.doctor.ask import Answer, probe
from cfp.cluster.doctor.driver import NO_GPU
from cfp.cluster.doctor.machine import Machine
from cfp.cluster.doctor.result import Result, absent, failed, passed
from cfp.cluster.doctor.versions import installed, requirements

# Programs of the doctor are small: they need not take a device for themselves.
SMALL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_GRAFT_ERROR = 2e-2  # Devices multiply matrices in TF32.
_ATTENTION_ERROR = 2e-2  # bfloat16
_KERNEL_ERROR = 1e-4


def shardy(machine: Machine) -> Result:
    """jaxlib has Shardy's passes, and they write sharding rules."""
    answer = probe(machine, "shardy", variables={"JAX_PLATFORMS": "cpu"})
    versions = next((r.versions for r in requirements(machine) if r.name == "jax"), "")
    remedy = f"pip install 'jax{versions}' with its own jaxlib, or build that one"
    if answer.trouble:
        return failed("shardy", answer.trouble, remedy)
    missing = answer.data["missing"]
    if missing:
        return failed(
            "shardy",
            f"jaxlib lacks {len(missing)} of the {answer.data['needed']} pipelines "
            f"that cfp needs: {answer.data['reasons'][0]}",
            remedy,
        )
    if answer.data["rules"] == 0:
        return failed("shardy", "Shardy's passes write no sharding rules", remedy)
    return passed(
        "shardy", f"all {answer.data['needed']} pipelines are there and write rules"
    )


def graft(machine: Machine) -> Result:
    """A part of a program becomes a program, compiles, runs, and is right."""
    answer = probe(machine, "graft", variables=SMALL)
    if answer.trouble:
        return failed("graft", answer.trouble, _compile_remedy(answer))
    data = answer.data
    if data["difference"] > _GRAFT_ERROR:
        return failed(
            "graft",
            f"the result is off by {data['error']:.1e}",
            "the compiler or the device is faulty: run with JAX_PLATFORMS=cpu, then "
            "with another version of jaxlib; see ECC errors (nvidia-smi -q -d ECC)",
            difference=data["difference"],
        )
    return passed(
        "graft",
        f"compiled in {data['compile_s']:.1f} s, runs on {data['devices']} devices, "
        f"off by {data['difference']:.0e}",
        **data,
    )


def _compile_remedy(answer: Answer) -> str:
    if answer.timed_out:
        return (
            "compiling hangs: see that the machine has free cores and memory, and "
            "try --timeout 600"
        )
    if answer.signal == "SIGKILL":
        return "the system ended it for want of memory: see the row memory"
    if "RESOURCE_EXHAUSTED" in answer.trouble:
        return "free the device's memory: see the rows busy and device memory"
    return "install jax and jaxlib of one version again; see the rows jax and plugin"


def cudnn(machine: Machine) -> Result:
    """Attention of cuDNN, forward and backward, agrees with plain XLA."""
    if not machine.shows_nvidia:
        return absent("cudnn", NO_GPU)
    return _attention(
        machine,
        "cudnn",
        "pip install --upgrade nvidia-cudnn-cu13 (or -cu12), in the versions that the "
        "plugin asks for; cfp plans without it, and attention is XLA's then",
    )


def tokamax(machine: Machine) -> Result:
    """Tokamax's attention, forward and backward, agrees with plain XLA."""
    if installed(machine, "tokamax") is None:
        return absent(
            "tokamax",
            "Tokamax is not installed",
            "optional: pip install tokamax (Python 3.12 or newer)",
        )
    if not machine.shows_nvidia:
        return absent("tokamax", NO_GPU)
    return _attention(
        machine, "tokamax", "pip install --upgrade tokamax, or uninstall it"
    )


def _attention(machine: Machine, name: str, remedy: str) -> Result:
    answer = probe(machine, "attention", name, variables=SMALL)
    if answer.trouble:
        return failed(name, answer.trouble, remedy)
    worst = max(answer.data.values())
    said = ", ".join(f"{what} {value:.1e}" for what, value in answer.data.items())
    if not worst <= _ATTENTION_ERROR:  # Also if it is no number.
        return failed(name, f"differs from plain XLA: {said}", remedy, **answer.data)
    return passed(name, f"forward and backward; relative {said}", **answer.data)


def pallas(machine: Machine) -> Result:
    """A Pallas kernel compiles for the device and runs."""
    if not machine.shows_nvidia:
        return absent("pallas", NO_GPU)
    remedy = (
        "kernels need compute capability 8.0 or newer, and the plugin's own ptxas: "
        "take another CUDA's bin folder off the PATH"
    )
    answer = probe(machine, "pallas", variables=SMALL)
    if answer.trouble:
        return failed("pallas", answer.trouble, remedy)
    difference = answer.data["difference"]
    if not difference <= _KERNEL_ERROR:
        return failed("pallas", f"the kernel is off by {difference:.1e}", remedy)
    compiler = answer.data["compiler"]
    return passed(
        "pallas", f"a kernel compiles ({compiler}) and runs, off by {difference:.0e}"
    )


def mock(machine: Machine) -> Result:
    """One GPU plays one of four."""
    if not machine.shows_nvidia:
        return absent("mock topology", NO_GPU)
    remedy = "one GPU cannot stand for several with this jaxlib: plan on real devices"
    visible = machine.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    answer = probe(
        machine, "mock", variables={**SMALL, "CUDA_VISIBLE_DEVICES": visible}
    )
    if answer.trouble:
        return failed("mock topology", answer.trouble, remedy)
    data = answer.data
    if data["devices"] != 4 or data["local"] != 1 or not data["all_reduces"]:
        return failed(
            "mock topology",
            f"{data['devices']} devices, {data['local']} of them here, and "
            f"{data['all_reduces']} all-reduces",
            remedy,
        )
    return passed(
        "mock topology", "a program for 4 devices compiles and runs on one of them"
    )

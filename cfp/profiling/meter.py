"""Clocks and power of a GPU while something runs on it.

A GPU at its power limit lowers its clock, and how far depends on the numbers that it
multiplies. So a time says what a step takes only if the numbers were like a step's.
NVIDIA's driver says both through the library ``nvidia-ml-py``; without it, or on other
devices, nothing is known and nothing is refused.
"""

from __future__ import annotations

import importlib
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from cfp.profiling.key import GPU_PLATFORMS, Device
from cfp.profiling.topology import numbers_of

_SECONDS = 0.02
# An H100 idles at 345 MHz of 1,980 and at 70 W of 700, and runs steps at 1,590 to 1,700
# MHz. Others run below half of their clock, held back by a low limit of power.
_LEAST_SHARE = 0.5


@dataclass(slots=True)
class Meter:
    """Samples of a GPU's clock and power; empty where the driver does not say.

    Attributes:
        clocks_mhz: of the multiprocessors, as they were taken.
        powers_watts: what it took, likewise.
        most_mhz: the highest clock that the GPU has.
        most_watts: what it may take.
    """

    clocks_mhz: list[float] = field(default_factory=list)
    powers_watts: list[float] = field(default_factory=list)
    most_mhz: float = 0.0
    most_watts: float = 0.0

    @property
    def clock_mhz(self) -> float:
        """The median clock behind the warm-up; 0 if it is not known."""
        return self._usual(self.clocks_mhz)

    @property
    def power_watts(self) -> float:
        """The median power behind the warm-up; 0 if it is not known."""
        return self._usual(self.powers_watts)

    @property
    def refusal(self) -> str:
        """The reason why a time at this clock is no measurement; "" if it is one."""
        if not self.clocks_mhz or self.clock_mhz >= _LEAST_SHARE * self.most_mhz:
            return ""
        if self.power_watts > _LEAST_SHARE * self.most_watts:
            return ""
        return (
            f"ran at {self.clock_mhz:.0f} MHz of {self.most_mhz:.0f}, the clock of an "
            "idle GPU, or of one that is held back; expected at least "
            f"{_LEAST_SHARE * self.most_mhz:.0f}"
        )

    def _usual(self, samples: list[float]) -> float:
        """The median of the later half of some samples, which is behind a warm-up."""
        half = len(self.clocks_mhz) // 2
        return statistics.median(samples[half:]) if self.clocks_mhz else 0.0


@contextmanager
def metered(device: Device) -> Iterator[Meter]:
    """Samples the clock and the power of a device meanwhile, 50 times a second."""
    meter, over = Meter(), threading.Event()
    library = _library(device)
    if library is None:
        yield meter
        return

    def sample() -> None:
        with _handle(library, device) as gpu:
            if gpu is None:
                return
            meter.most_mhz, meter.most_watts = _limits(library, gpu)
            try:
                while not over.wait(_SECONDS):
                    watts = library.nvmlDeviceGetPowerUsage(gpu) / 1e3
                    meter.powers_watts.append(watts)
                    clock = library.nvmlDeviceGetClockInfo(gpu, library.NVML_CLOCK_SM)
                    meter.clocks_mhz.append(float(clock))
            except library.NVMLError:
                meter.clocks_mhz.clear()  # A GPU in pieces (MIG) has neither.

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        over.set()
        thread.join()


def limits_of(device: Device) -> tuple[float, float]:
    """A device's highest clock in MHz, and what it may take in watts; 0 if unknown."""
    library = _library(device)
    if library is None:
        return 0.0, 0.0
    with _handle(library, device) as gpu:
        return (0.0, 0.0) if gpu is None else _limits(library, gpu)


def _limits(library: Any, gpu: Any) -> tuple[float, float]:
    try:
        most_mhz = library.nvmlDeviceGetMaxClockInfo(gpu, library.NVML_CLOCK_SM)
        return float(most_mhz), library.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3
    except library.NVMLError:
        return 0.0, 0.0


@contextmanager
def _handle(library: Any, device: Device) -> Iterator[Any]:
    """The handle of a GPU while the library of its driver is open; None if unknown."""
    number = numbers_of([device.local_hardware_id])[0]
    try:
        library.nvmlInit()
    except library.NVMLError:
        yield None  # There is no such driver here.
        return
    gpu = None
    try:
        if number >= 0:
            with suppress(library.NVMLError):
                gpu = library.nvmlDeviceGetHandleByIndex(number)
        yield gpu
    finally:
        library.nvmlShutdown()


def _library(device: Device) -> Any:
    """NVIDIA's library, if it is installed and the device is a GPU."""
    if device.platform not in GPU_PLATFORMS:
        return None
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None

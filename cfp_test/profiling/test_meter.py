"""Clocks and power of a GPU, by a library that stands in for NVIDIA's."""

import sys
import time
from types import SimpleNamespace

import pytest

from cfp.profiling import meter
from cfp.profiling.meter import limits_of, metered


class Library:
    """Clocks and powers as they are given, the last one for ever."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        """As of the library."""

    def __init__(self, clocks, broken=False, watts=600):
        self.clocks, self.broken, self.watts = list(clocks), broken, watts
        self.opened = 0

    def nvmlInit(self):
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetMaxClockInfo(self, gpu, kind):
        return 1980

    def nvmlDeviceGetPowerUsage(self, gpu):
        if self.broken:
            raise self.NVMLError("not supported")
        return 1000 * self.watts

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu):
        return 700_000

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        return self.clocks.pop(0) if len(self.clocks) > 1 else self.clocks[0]


GPU = SimpleNamespace(platform="gpu", local_hardware_id=0)


@pytest.fixture
def library(monkeypatch):
    def use(clocks, broken=False, watts=600):
        made = Library(clocks, broken, watts)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        monkeypatch.setattr(meter, "numbers_of", lambda ordinals: [0])
        monkeypatch.setattr(meter, "_SECONDS", 0.0)
        return made

    return use


def waited(library):
    """The meter once the library's clocks were all read."""
    with metered(GPU) as found:
        while len(library.clocks) > 1 or len(found.clocks_mhz) < 4:
            time.sleep(0.001)
    return found


def test_the_later_half_counts(library):
    with metered(GPU) as found:
        pass
    found.clocks_mhz[:] = [345.0, 345.0, 1600.0, 1610.0, 1620.0]
    found.powers_watts[:] = [80.0, 90.0, 600.0, 610.0, 620.0]
    found.most_mhz = 1980.0
    assert (found.clock_mhz, found.power_watts) == (1610.0, 610.0)
    assert found.refusal == ""


def test_an_idle_clock_is_refused(library):
    used = library([345], watts=80)
    load = waited(used)
    assert (load.clock_mhz, load.most_mhz, load.power_watts) == (345, 1980, 80)
    assert load.refusal.startswith("ran at 345 MHz of 1980")
    assert used.opened == 0


def test_a_clock_under_load_is_not(library):
    assert waited(library([1590])).refusal == ""


def test_a_clock_that_a_limit_of_power_holds_down_is_not(library):
    assert waited(library([885], watts=690)).refusal == ""


def test_without_a_driver_nothing_is_known(library):
    used = library([1590])

    def fail():
        raise used.NVMLError("no driver")

    used.nvmlInit = fail
    with metered(GPU) as found:
        pass
    assert (found.clock_mhz, found.power_watts) == (0.0, 0.0)


def test_what_the_driver_does_not_say_is_not_refused(library):
    used = library([1590], broken=True)
    with metered(GPU) as found:
        time.sleep(0.01)
    assert (found.clock_mhz, found.power_watts, found.refusal) == (0.0, 0.0, "")
    assert used.opened == 0


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_without_the_library_nothing_is_known(monkeypatch, platform):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with metered(SimpleNamespace(platform=platform, local_hardware_id=0)) as found:
        pass
    assert (found.clock_mhz, found.power_watts) == (0.0, 0.0)


def test_the_limits_are_what_the_driver_says(library):
    made = library([1600.0])
    assert limits_of(GPU) == (1980.0, 700.0)
    assert made.opened == 0
    assert limits_of(SimpleNamespace(platform="cpu", local_hardware_id=0)) == (0.0, 0.0)


def test_without_the_library_no_limit_is_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert limits_of(GPU) == (0.0, 0.0)

from types import SimpleNamespace

import pytest

from cfp import platform


@pytest.mark.parametrize(("process", "devices"), [(0, 2), (1, 1)])
def test_joined_processes_share_virtual_devices(process, devices, monkeypatch):
    """Under a launcher, JAX finds the number of processes, not the environment."""
    channel = SimpleNamespace(process=process, count=2)
    joined = SimpleNamespace(channel=channel)
    monkeypatch.setattr(platform, "coordination", lambda: joined)
    assert platform._share(3) == devices

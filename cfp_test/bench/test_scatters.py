"""The benchmark of scatters, at sizes for a CPU."""

import json
import os

import jax
import numpy as np

from cfp_test.bench import scatters


def test_tokens_are_spread_as_they_say():
    rows, shape = 1000, (40, 500)
    counts = {
        spread: np.bincount(scatters.words(rows, shape, spread).ravel())
        for spread in ("evenly", "as words", "padded")
    }
    most = {spread: found[0] / 20_000 for spread, found in counts.items()}
    assert most["evenly"] < 0.003
    assert 0.04 < most["as words"] < 0.09
    assert 0.3 < most["padded"] < 0.37


def test_all_ways_of_all_steps_begin_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(scatters, "_WARM_SECONDS", 0.01)
    jax.devices()  # All of the tests' devices, before the script asks for one.
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    file = tmp_path / "scatters.json"
    scatters.main(["--out", str(file), "--tiny"])
    data = json.loads(file.read_text())
    gradients = [row for row in data["rows"] if row["what"] == "gradient"]
    assert len(gradients) == 6
    for row in gradients:
        assert row["off"]["in float32"] <= row["off"]["as written"]
        assert row["off"]["in float32"] <= 2**-8 * row["largest"]
    steps = [row for row in data["rows"] if row["what"] == "step"]
    assert len(steps) == 3
    assert all([*row["samples_ms"]] == [*scatters.WAYS] for row in steps)
    assert all(len(set(row["losses"].values())) == 1 for row in steps)

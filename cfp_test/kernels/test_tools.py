"""The seeds' tools and the GPU script, once through, at sizes for a CPU."""

import json
import struct
import subprocess

import numpy as np
import pytest

from cfp_test.cli.cli_runner import ROOT, environment
from cfp_test.kernels.decoder import init_params
from cfp_test.ring import checkpoint, lengths
from cfp_test.ring.__main__ import parse
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import GUARD_SECONDS
from cfp_test.ulysses import check_qkv

FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def run(folder, *words, code=0, **variables):
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**environment(XLA_FLAGS=FAST), "PYTHON": quick_python(), **variables},
        timeout=GUARD_SECONDS,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def ulysses(folder, mode):
    script = str(ROOT / "cfp_test/ulysses/run_ulysses.sh")
    words = ("sh", script, "6", mode, "--layers", "1", "--steps", "2")
    return json.loads(run(folder, *words))


def check(folder, one, other, code=0):
    script = str(ROOT / "cfp_test/ulysses/check_qkv.sh")
    return json.loads(
        run(folder, "sh", script, f"qkv/{one}", f"qkv/{other}", code=code)
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Two runs of seed 000's tool, and where they saved their arrays."""
    folder = tmp_path_factory.mktemp("ulysses")
    return folder, {mode: ulysses(folder, mode) for mode in ("compile", "ringattn")}


def test_ulysses_and_a_ring_train_alike(ran):
    folder, rows = ran
    one, other = rows["compile"], rows["ringattn"]
    assert np.allclose(one["losses"], other["losses"], rtol=1e-5)
    assert one["losses"][1] < one["losses"][0] and one["peak_bytes"] > 0
    assert "all-to-all" in one["bytes_by_collective"]
    assert "all-to-all" not in other["bytes_by_collective"]
    assert "collective-permute" in other["bytes_by_collective"]
    found = check(folder, "compile", "ringattn")
    # Q, K, V before, the output, and the gradients of Q, K, V; and those after.
    assert (found["compared"], found["exchanged"]) == (7, [3, 0])
    assert found["too_far"] == found["changed_by_exchange"] == {}


def test_what_an_exchange_changed_is_found(ran):
    folder, _ = ran
    arrays = check_qkv.whole(folder / "qkv" / "compile")
    assert check_qkv.changed_by_exchange(arrays) == []
    arrays["layer_0.k.after"] = np.nextafter(arrays["layer_0.k.after"], 1)
    assert check_qkv.changed_by_exchange(arrays) == ["layer_0.k.before"]


@pytest.mark.nightly
def test_all_ways_of_ulysses_agree(ran):
    folder, _ = ran
    for mode in ("eager", "deepcompile", "auto"):
        ulysses(folder, mode)
        assert check(folder, mode, "compile")["too_far"] == {}


def test_lengths_of_a_ring(tmp_path):
    script = str(ROOT / "cfp_test/ring/benchmark_ring.sh")
    options = "--lengths 16 --methods flash,zigzag,both --devices 4 --dtype float32"
    words = ("sh", script, *options.split(), "--repeats", "1", "--plot", "ring.png")
    *rows, first, second = run(tmp_path, *words).splitlines()
    found = [json.loads(row) for row in rows]
    assert [row["method"] for row in found] == ["flash", "zigzag", "both"]
    assert all(row["relative_l2"] < 1e-5 for row in found)
    assert all(row["peak_bytes"] > 0 and row["us_per_token"] > 0 for row in found)
    assert first.startswith("zigzag is faster than flash on one device ")
    assert second.startswith("both is faster than flash on one device ")
    assert (tmp_path / "ring.png").stat().st_size > 0


def test_attention_of_a_layer_alone_in_a_ring(tmp_path):
    script = str(ROOT / "cfp_test/ring/benchmark_ring.sh")
    options = "--alone --train --lengths 16 --methods flash,zigzag,ulysses --devices 2"
    words = ("sh", script, *options.split(), "--dtype", "float32", "--repeats", "1")
    rows = [json.loads(row) for row in run(tmp_path, *words).splitlines()[:3]]
    assert [row["method"] for row in rows] == ["flash", "zigzag", "ulysses"]
    assert [row["devices"] for row in rows] == [1, 2, 2]
    assert all(row["relative_l2"] < 1e-5 and row["alone"] for row in rows)


def test_crossovers_name_the_first_length():
    rows = [
        {"method": method, "tokens": tokens, "ms": ms, "status": "measured"}
        for method, tokens, ms in (
            ("flash", 8, 1.0),
            ("ring", 8, 2.0),
            ("flash", 16, 3.0),
            ("ring", 16, 2.5),
        )
    ]
    (said,) = lengths.crossovers(rows)
    assert said == "ring is faster than flash on one device from 16 tokens on"
    (said,) = lengths.crossovers(rows[:2])
    assert said.endswith("at none of these lengths")


def test_tokens_after_a_prompt_are_those_of_one_device(tmp_path):
    script = str(ROOT / "cfp_test/ring/run_inference.sh")
    words = ("--dtype", "float32", "--new", "2", "--devices", "2", "--prompt", "1,2")
    ring = json.loads(run(tmp_path, "sh", script, "--method", "zigzag", *words))
    options = parse(["inference", "--method", "xla", *words])
    assert ring["tokens"] == lengths.generate(options)["tokens"]
    assert ring["tokens"][:2] == [1, 2] and len(ring["tokens"]) == 4


def test_weights_come_from_safetensors(tmp_path):
    """Files with Hugging Face's names and shapes are read as they were written."""
    config = lengths.config_of(parse(["benchmark"]), 8)
    import jax

    params = jax.tree.map(np.asarray, init_params(config, jax.random.key(3)))
    _write(tmp_path / "model.safetensors", _as_theirs(params, config))
    loaded = checkpoint.load(tmp_path, config)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for mine, right in zip(
        jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True
    ):
        assert mine.shape == right.shape and (mine == right).all()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SystemExit, match="holds no"):
        checkpoint.load(tmp_path, config)


def _as_theirs(params, config):
    layer = params["layer_0"]
    at = "model.layers.0."
    named = {
        "model.embed_tokens.weight": params["embedding"],
        "model.norm.weight": params["final_norm"],
        "lm_head.weight": params["head"].T,
        f"{at}input_layernorm.weight": layer["attention_norm"],
        f"{at}post_attention_layernorm.weight": layer["mlp_norm"],
        f"{at}self_attn.o_proj.weight": layer["attention"]["out"]
        .reshape(config.hidden, config.hidden)
        .T,
    }
    for name in ("query", "key", "value"):
        kernel = layer["attention"][name].reshape(config.hidden, -1)
        named[f"{at}self_attn.{name[0]}_proj.weight"] = kernel.T
    for name in ("gate", "up", "down"):
        named[f"{at}mlp.{name}_proj.weight"] = layer["mlp"][name].T
    return named


def _write(path, arrays):
    head, data = {}, b""
    for name, array in arrays.items():
        start = len(data)
        data += np.ascontiguousarray(array, np.float32).tobytes()
        shape = list(array.shape)
        head[name] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [start, len(data)],
        }
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_the_gpu_script_on_a_cpu(tmp_path):
    """No time to measure: one row, written, and taken up by the next run."""
    words = (quick_python(), "-m", "cfp_test.bench.attention", "out.json", "--tiny")
    words += ("--seconds",)
    run(tmp_path, *words, "1", JAX_PLATFORMS="cpu")
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["rows"][0]["what"] == "matmul"
    assert data["rows"][0]["status"] == "measured"
    data["rows"].append(
        {"what": "kernel", "kernel": "xla", "tokens": 256, "status": "begun"}
    )
    (tmp_path / "out.json").write_text(json.dumps(data))
    said = run(tmp_path, *words, "0", JAX_PLATFORMS="cpu")
    assert "left for lack of time" in said
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["rows"][-1]["status"] == "the process ended while it ran"

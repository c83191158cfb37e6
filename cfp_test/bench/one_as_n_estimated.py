"""What is chosen without any GPU for the recorded programs of 4 H200.

    python -m cfp_test.bench.one_as_n_estimated

Adds what estimates say of each preset to ``docs/results/one_as_four_h200_202611.json``.
Without peer-to-peer access the description has the curves measured there.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jax

import cfp
from cfp.targets import resolve
from cfp_test.bench.one_as_n_data import FILE, RESULTS, write_page
from cfp_test.bench.recorded import GPT, MOE


def _description(folder: Path) -> str:
    """4 H200 whose links are those of the host's memory."""
    page = json.loads((RESULTS / "curves_h200x4_202611_p2p_off.json").read_text())
    curves: dict[str, list[list[float]]] = {}
    for one in page["collectives"]:
        point = [one["size_bytes"], one["time_ms"]]
        curves.setdefault(one["kind"], []).append(point)
    lines = ['kind = "h200"', "devices_per_host = 4", "[curves]", "devices = 4"]
    lines += [f"{kind} = {json.dumps(points)}" for kind, points in curves.items()]
    file = folder / "p2p_off.toml"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        clusters = {"NVLink": "4xh200", "P2P off": _description(Path(folder))}
        for text in (GPT, MOE):
            target = resolve(text.split()[0], text.split()[1:])
            for links, cluster in clusters.items():
                plan = cfp.plan(
                    target.step,
                    *target.args,
                    mesh=cfp.described(cluster, x=4),
                    donate_argnums=target.donate,
                    static_argnums=target.static,
                    cache_dir=folder,
                )
                times = {row.name: row.predicted_ms for row in plan.race}
                found.append({"target": text, "links": links, "estimated_ms": times})
                print(links, text, times)
    data = json.loads(FILE.read_text())
    write_page({**data, "estimated": found})


if __name__ == "__main__":
    main()

"""Choices made without any GPU for the recorded programs of 4 H200.

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
from cfp_test.bench.one_as_n import link_rates
from cfp_test.bench.one_as_n_data import FILE, write_page
from cfp_test.bench.recorded import GPT, MOE


def p2p_off(folder: Path) -> str:
    """A description of 4 H200 whose links are those of the host's memory."""
    rates = link_rates(json.loads(FILE.read_text()))[4, "P2P off"]
    curves = {kind: curve for (kind, _), curve in rates.curves.items()}
    lines = ['kind = "h200"', "devices_per_host = 4", "[curves]", "devices = 4"]
    lines += [f"{kind} = {json.dumps(curve)}" for kind, curve in curves.items()]
    file = folder / "p2p_off.toml"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        clusters = {"NVLink": "4xh200", "P2P off": p2p_off(Path(folder))}
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

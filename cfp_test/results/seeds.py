"""The page of the seeds' scripts, and of plans in practice, on two devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from cfp_test.results.pages import RESULTS, fixed, gib, table

_MODES = {
    "eager": "eager: all-to-alls in the model, op by op",
    "compile": "compile: the same, compiled",
    "deepcompile": "deepcompile: at constraints, by the compiler",
    "ringattn": "ringattn: a ring",
    "auto": "auto: as cfp plans the whole step",
}


def page(data: Mapping[str, Any], name: str, devices: str) -> str:
    """The page, of all parts that were reached.

    Args:
        data: what `cfp_test.scripts.seeds_collect` wrote.
        name: of the JSON file, without its suffix.
        devices: that it ran on, in words.
    """
    dates = sorted({row["date"][:10] for row in data["commands"]})
    lines = [
        f"# The seeds' scripts, and plans in practice, on {devices}",
        "",
        f"{data['about']} {', '.join(dates)}, commit {data['commit']}. Made by "
        f"`python -m cfp_test.scripts.seeds --devices 2`. All samples: "
        f"[JSON]({name}.json)",
        "",
        *([f"Not reached: {data['not_reached']}", ""] if data["not_reached"] else []),
    ]
    for part in (
        _ulysses,
        _long,
        _passes,
        partial(_enumerated, name=name),
        _several,
        _tutorial,
        _faults,
        _ring,
        _commands,
    ):
        lines += part(data)
    return "\n".join(lines).rstrip("\n") + "\n"


def _ulysses(data: Mapping[str, Any]) -> list[str]:
    rows = data.get("ulysses_all", [])
    if not rows:
        return []
    compared = [
        [
            mode,
            found["compared"],
            " and ".join(map(str, found["exchanged"])),
            f"{found['worst']:.1e}",
            f"{found['allowed']:.0e}",
            len(found["too_far"]),
            sum(map(len, found["changed_by_exchange"].values())),
        ]
        for mode in _MODES
        if (found := data.get(f"check_qkv_{mode}"))
    ]
    sizes = rows[0]
    head = (
        "with eager | arrays compared | exchanges | largest relative L2 distance | "
        "allowed | too far | changed by an exchange"
    )
    return [
        "## Ulysses: what is exchanged",
        "",
        f"`run_ulysses.sh {sizes['seq']} MODE`: {sizes['layers']} layers, "
        f"{sizes['heads']} heads, hidden {sizes['hidden']}, batch {sizes['batch']}, "
        f"{sizes['dtype']}, products with all bits. Q, K, V before and after the "
        "exchange, outputs and gradients of each rank, compared by `check_qkv.sh` with "
        "the mode whose exchange is in the model.",
        "",
        table(head, compared),
        "",
        table("mode | step ms | losses", [*map(_small, rows)]),
        "",
        "A step of this size is all launches; its times say nothing but that.",
        "",
    ]


def _small(row: Mapping[str, Any]) -> list[Any]:
    if row["status"] != "ok":
        return [_MODES[row["mode"]], "", row["status"]]
    losses = ", ".join(f"{loss:.6f}" for loss in row["losses"])
    return [_MODES[row["mode"]], fixed(row["step_ms"]), losses]


def _long(data: Mapping[str, Any]) -> list[str]:
    rows = data.get("ulysses_long", [])
    if not rows:
        return []
    rows = sorted(rows, key=lambda row: (row["seq"], list(_MODES).index(row["mode"])))
    first: dict[int, float] = {}
    cells = []
    for row in rows:
        if row["status"] != "ok":
            cells.append([row["seq"], row["mode"], "", "", "", "", row["status"]])
            continue
        first.setdefault(row["seq"], row["losses"][0])
        cells.append(
            [
                row["seq"],
                row["mode"],
                fixed(row["step_ms"]),
                _range(row["samples_ms"][1:]),
                gib(row.get("peak_bytes")),
                _sent(row["bytes_by_collective"]),
                f"{row['losses'][0]:.5f}",
            ]
        )
    size = rows[0]
    compared = [
        f"{mode}: {found['compared']} arrays, {found['worst']:.1e} at most"
        for mode in _MODES
        if (found := data.get(f"check_qkv_long_{mode}"))
    ]
    said = "Arrays of the shortest length beside those of compile, by `check_qkv.sh`: "
    return [
        "## Ulysses with a kernel, long sequences",
        "",
        f"{size['layers']} layers, {size['heads']} heads, hidden {size['hidden']}, "
        f"batch {size['batch']}, bfloat16, cuDNN's attention. Steps with "
        "gradients and an update, one after another; bytes are those that the "
        "compiled program names, per device.",
        "",
        table(
            "tokens | mode | step ms | quartiles | GiB as compiled | MiB by "
            "collective | first loss",
            cells,
        ),
        "",
        *_beside_others(rows),
        *([f"{said}{'; '.join(compared)}.", ""] if compared else []),
    ]


def _beside_others(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns cfp's own plans beside the fastest of the other ways, in words."""
    ran = [row for row in rows if row["status"] == "ok"]
    ratios = [
        f"{row['seq']} tokens {row['step_ms'] / min(others):.3f}"
        for row in ran
        if row["mode"] == "auto"
        and (
            others := [
                other["step_ms"]
                for other in ran
                if other["seq"] == row["seq"] and other["mode"] != "auto"
            ]
        )
    ]
    if not ratios:
        return []
    return [
        f"The plan's step over the fastest other way: {', '.join(ratios)}. The plan "
        "was timed in another process, some minutes later.",
        "",
    ]


def _range(samples: Sequence[float]) -> str:
    ordered = sorted(samples)
    count = len(ordered)
    return f"{ordered[count // 4]:.2f} to {ordered[(3 * count) // 4]:.2f}"


def _sent(found: Mapping[str, int] | None) -> str:
    if found is None:
        return "not one program"
    return ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in found.items())


def _passes(data: Mapping[str, Any]) -> list[str]:
    cells = []
    commands = {row["name"]: row for row in data["commands"]}
    for name, command in commands.items():
        if "functionality_check" not in name and "A100" not in name:
            continue
        rows = data.get(name, [])
        state = _state(command)
        if not rows:
            cells.append([name, state, f"{command['seconds']:.0f}", *[""] * 7])
        for row in rows:
            search = row["search"]
            cells.append(
                [
                    name,
                    state,
                    f"{command['seconds']:.0f}",
                    row["winner"],
                    fixed(1e3 * median(row["cost_seconds"])),
                    _range(row["samples_ms"]),
                    row["memory_gib"],
                    fixed(median(row["tflops"]) / row["devices"], 1),
                    search["strategies_measured"] + search["strategies_cached"],
                    row["dtype"],
                ]
            )
    if not cells:
        return []
    head = (
        "script and setting | it ended | seconds | chosen | step ms | quartiles | GiB "
        "| TFLOP/s a device | measured strategies | dtype"
    )
    return [
        "## Seed 001's scripts",
        "",
        "Analysis, profiling and search, as the scripts run them. A setting is layers "
        "x heads x batch size, layers x batch size, and of GPT batch size x layers.",
        "",
        table(head, cells),
        "",
    ]


def _state(command: Mapping[str, Any]) -> str:
    code = command["code"]
    if code is None:
        return "its time was over"
    return "well" if code == 0 else f"with exit code {code}"


def _enumerated(data: Mapping[str, Any], name: str) -> list[str]:
    lines: list[str] = []
    for model in ("gpt", "moe"):
        found = data.get(f"{model}_enum_benchmark_comm_comp")
        if not found:
            continue
        cells = []
        for row in sorted(found["rows"], key=lambda row: row["volume_bytes"]):
            trace = row.get("trace") or {}
            cost = row.get("cost_seconds")
            cells.append(
                [
                    gib(row["volume_bytes"]),
                    fixed(trace.get("communication_ms")),
                    fixed(trace.get("compute_ms")),
                    fixed(trace.get("overlapped_ms")),
                    fixed(trace.get("exposed_ms")),
                    fixed(1e3 * median(cost)) if cost else row["status"],
                    gib(row.get("memory_bytes")),
                ]
            )
        head = (
            "GiB by formula | ms in kernels that communicate | that compute | "
            "overlapped | exposed | step ms | GiB as compiled"
        )
        title = found["headline"].strip("= ")
        lines += [f"## Volume and time in kernels: {title}", "", *_order(found)]
        lines += [table(head, cells), ""]
        picture = f"{name}_{model}.png"
        if (RESULTS.parent / "pictures" / picture).exists():
            lines += [f"![volume and step time](../pictures/{picture})", ""]
    return lines


def _order(found: Mapping[str, Any]) -> list[str]:
    ran = [row for row in found["rows"] if row.get("trace")]
    if len(ran) < 2:
        return []
    pairs = [
        (a, b)
        for i, a in enumerate(ran)
        for b in ran[i + 1 :]
        if a["volume_bytes"] != b["volume_bytes"]
    ]
    wrong = sum(
        (a["volume_bytes"] - b["volume_bytes"])
        * (median(a["cost_seconds"]) - median(b["cost_seconds"]))
        < 0
        for a, b in pairs
    )
    return [
        f"{len(ran)} combinations of a layer's block strategies. Of {len(pairs)} pairs "
        f"the one that sends more is the faster one in {wrong}.",
        "",
    ]


def _several(data: Mapping[str, Any]) -> list[str]:
    rows = (data.get("several") or {}).get("rows", [])
    if not rows:
        return []
    cells = [
        [
            row["model"],
            "two, a GPU each" if "," in row["layout"] else "one",
            "yes" if len(set(row["plans"])) == 1 else "NO",
            ", ".join(sorted(set(row.get("shardings", [])))) or "-",
            row["choice"],
            f"{row['winner']} of {len(row['raced'])}",
            row["sharded_arguments"],
            fixed(row["predicted_ms"], 3),
            fixed(max(row["step_ms"])),
            f"{row['largest']:.1e}",
            f"{row['preset_largest']:.1e}",
            f"{sum(row['passed'])} of {len(row['passed'])}",
            f"{sum(map(bool, row['restored']))} of {len(row['restored'])}",
            f"{row['plan_seconds']:.0f}",
        ]
        for row in rows
    ]
    head = (
        "model | processes | all say the same plan | shardings | the plan's choice | "
        "chosen | "
        "sharded arguments | predicted ms | step ms | off by | fully sharded: off by | "
        "checks pass | restored | planned in s"
    )
    return [
        "## Several processes, a GPU each",
        "",
        "`several_processes.py --gpus`: planned by measuring, run for two steps, "
        "checked against one device, saved and restored under another plan. Shardings "
        "are a digest of those of arguments and results, the choice is one of "
        "constraints and compiler options, too. Each row begins with an empty store.",
        "",
        table(head, cells),
        "",
    ]


def _tutorial(data: Mapping[str, Any]) -> list[str]:
    found = data.get("tutorial")
    if not found:
        return []
    train, again = found["train"], found["restart"]
    one, many = train["one_losses"], train["losses"]
    saved = len(many) - len(again["resumed"])
    worst = max(abs(a - b) / a for a, b in zip(one, many, strict=True))
    resumed = max(
        abs(a - b) / a for a, b in zip(many[saved:], again["resumed"], strict=True)
    )
    half = max(
        abs(a - b) / a for a, b in zip(many[saved:], again["on_half"], strict=True)
    )
    count = train["devices"]
    shown = [0, 20, 40, 60, len(many) - 1]
    return [
        "## The tutorial",
        "",
        f"On {count} {train['kind']}. Losses on {count} devices and on one differ by "
        f"{worst:.1e} at most, those of the run that was resumed in a new process and "
        f"of the one that was not by {resumed:.1e}, those on half of the devices by "
        f"{half:.1e}.",
        "",
        table(
            "step | " + " | ".join(map(str, shown)),
            [
                ["one device", *(f"{one[i]:.4f}" for i in shown)],
                [f"{count} devices", *(f"{many[i]:.4f}" for i in shown)],
            ],
        ),
        "",
        table(
            "what | figure",
            [
                ["step on one device, ms", _middle(train["one_ms"])],
                [f"step on {count} devices, ms", _middle(train["ms"])],
                *(
                    [["the plan's shardings, by jax.jit, ms", _middle(train["jit_ms"])]]
                    if "jit_ms" in train
                    else []
                ),
                ["planned in s", fixed(train["plan_seconds"], 1)],
                ["chosen", f"{train['winner']} of {len(train['race'])}"],
                ["restart: definitions, s", fixed(again["definitions_seconds"], 1)],
                ["restart: plan loaded and bound, s", fixed(again["load_seconds"], 2)],
                *(
                    [["and first array there, s", fixed(again["devices_seconds"], 2)]]
                    if "devices_seconds" in again
                    else []
                ),
                ["and checkpoint restored, s", fixed(again["restored_seconds"], 2)],
                ["and first step done, s", fixed(again["restart_seconds"], 2)],
                ["adapted to half of the devices, s", fixed(again["adapt_seconds"], 2)],
            ],
        ),
        "",
    ]


def _middle(samples: Sequence[float]) -> str:
    return f"{median(samples):.2f} ({_range(samples)})"


def _faults(data: Mapping[str, Any]) -> list[str]:
    rows = (data.get("faults") or {}).get("rows", [])
    if not rows:
        return []
    cells = []
    for fault in dict.fromkeys(row["fault"] for row in rows):
        some = [row for row in rows if row["fault"] == fault]
        ended = [row for row in some if row.get("again") is not None]
        cells.append(
            [
                fault,
                len(some),
                sum(bool(row["met"]) for row in some),
                _from_to(row.get("stored") for row in some),
                len(ended),
                sum(row["again"] for row in ended),
                _from_to(row["more"] for row in ended),
                f"{max((row['off'] for row in ended), default=0.0):.1e}",
                _from_to(round(row["seconds"]) for row in some),
            ]
        )
    head = (
        "fault | trials | met it | records stored by then | planned again to the end | "
        "stored and measured again | measured then | results off by | seconds"
    )
    return [
        "## Killed, interrupted, out of memory",
        "",
        "`faults_gpu.py`: a planning meets a fault at one of its runs, and another "
        "process plans again with its store. Several trials share the devices.",
        "",
        table(head, cells),
        "",
    ]


def _from_to(values: Iterator[Any]) -> str:
    known = [value for value in values if value is not None]
    return f"{min(known)} to {max(known)}" if known else ""


def _ring(data: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    kinds = [
        (f"{name}_{what}", f"{title}: {what}")
        for name, title in (
            ("ring_alone", "One layer's attention alone"),
            ("ring", "LLaMA-2-7B's shapes, 4 layers"),
        )
        for what in ("inference", "training")
    ]
    for kind, title in kinds:
        rows = data.get(kind, [])
        if not rows:
            continue
        rows = sorted(rows, key=lambda row: row["tokens"])
        known = {
            (row["method"], row["tokens"]): row["ms"]
            for row in rows
            if row["status"] == "measured"
        }
        cells = []
        for row in rows:
            name, tokens = row["method"], row["tokens"]
            if row["status"] != "measured":
                cells.append([tokens, name, "", "", "", "", row["status"][:120]])
                continue
            base = known.get(("flash", tokens))
            part = base and 100 * base / row["devices"] / row["ms"]
            cells.append(
                [
                    tokens,
                    name,
                    row["devices"],
                    fixed(row["us_per_token"]),
                    gib(row["peak_bytes"]),
                    fixed(part, 1),
                    f"{row['relative_l2']:.1e}",
                ]
            )
        head = (
            "tokens | attention | devices | us per token | GiB as compiled | percent "
            "of the ideal | off by, or why not"
        )
        lines += [
            f"## {title}",
            "",
            "The ideal is flash on one device, divided by the devices. Off by: the "
            "relative L2 distance from the first method of that length.",
            "",
            table(head, cells),
            "",
        ]
    return lines


def _commands(data: Mapping[str, Any]) -> list[str]:
    rows = [
        [row["name"], f"`{row['command']}`", _state(row), f"{row['seconds']:.0f}"]
        for row in data["commands"]
    ]
    head = "name | command | it ended | seconds"
    return ["## Commands", "", table(head, rows), ""]

r"""Lists compiled programs that are not proved to be right, model by model, and why.

    python cfp_test/scripts/guard.py [--devices 2] [--platform cuda | --mock] \
        [MODEL OPTION ...]

Compiles presets of models, on GPUs with memory limits that make XLA rematerialize, and
says of each text whether something was rematerialized, whether that reads what is
overwritten, and whether it can be proved at all. A line of JSON each; nothing runs.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cfp import api, platform
from cfp.devices.described import mocked_mesh, play_one_of
from cfp.planner_settings import PlannerSettings
from cfp.profiling.compiled import miscompile_reason
from cfp.profiling.compiler_options import MEMORY_SHARE
from cfp.profiling.overwritten import has_rematerialized
from cfp.runtime import execute
from cfp.targets import resolve

MODELS = ("gpt", "moe", "bert", "llama")
PRESETS = ("data_parallel", "fully_sharded", "tensor_parallel")
SHARES = (None, "60", "30", "10", "3", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="*", help="a model, and its options")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--platform", default=None)
    parser.add_argument("--mock", action="store_true", help="one GPU plays the devices")
    options, more = parser.parse_known_args()
    names = options.model[:1] or MODELS
    axes = (("x", options.devices),)
    if options.mock:
        play_one_of(options.devices)
        mesh = mocked_mesh(axes)
    else:
        platform.select(options.platform, axes)
        mesh = platform.make_mesh(axes)
    on_gpu = mesh.devices.flat[0].platform != "cpu"
    compile_right = execute.compile_right
    row = {}

    def looked_at(lowered, compiler_options):
        compiled = lowered.compile(compiler_options=dict(compiler_options) or None)
        text = compiled.as_text() or ""
        why = miscompile_reason(text)
        print(json.dumps({**row, "remat": has_rematerialized(text), "doubt": why}))
        return compiled, text

    execute.compile_right = looked_at
    for name in names:
        target = resolve(name, [*options.model[1:], *more])
        for preset in PRESETS:
            plan = api.plan(
                target.step,
                *target.args,
                mesh=mesh,
                static_argnums=target.static,
                donate_argnums=target.donate,
                preset=preset,
                settings=PlannerSettings(race=False),
            )
            for share in SHARES if on_gpu else SHARES[:1]:
                row = {"model": name, "preset": preset, "share": share}
                limit = {MEMORY_SHARE: share} if share else {}
                replace(plan, options=limit, raced=None).compile_bound()
    execute.compile_right = compile_right


if __name__ == "__main__":
    main()

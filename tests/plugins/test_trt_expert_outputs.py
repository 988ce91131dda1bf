"""A graph of one `MoEExpertOutputs` node becomes a plan with its plugin, for any number of bound experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from engram_trt.plugins.tensorrt_api import TENSORRT_RTX, parser_environment

HELPERS = Path(__file__).parents[1] / "helpers"

BUILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from expert_graphs import expert_model
from engram_trt.plugins.moe_expert_outputs.spec import SPEC
from engram_trt.plugins.tensorrt_api import TENSORRT_RTX, load
from engram_trt.plugins.trt_registration import register_plugins

def extents(packed):
    half = 2 if packed else 1
    known = {"dim": 128, "inter": 96, "dim_stored": 128 // half, "inter_stored": 96 // half, "activated": 6}
    known |= {"dim_groups": 4, "inter_groups": 3}
    return {"rows": (1, 16, 64), "experts": (1, 8, 64)} | {name: (value,) * 3 for name, value in known.items()}

api = load(TENSORRT_RTX)
trt, host = api.module, register_plugins(api, sms=(120,))
builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
for dtype in ("float32", "bfloat16"):
    for packed in (True, False):
        attributes = {"swiglu_limit": 10.0, "activation_format": -1}
        model = expert_model(SPEC, attributes, packed=packed, dtype=dtype)
        del model.functions[:]
        definition, config = builder.create_network(0), builder.create_builder_config()
        parsed = trt.OnnxParser(definition, builder.logger).parse(model.SerializeToString())
        profile = builder.create_optimization_profile()
        for operand, index in zip(SPEC.inputs, range(definition.num_inputs)):
            shapes = zip(*(extents(packed)[symbol] for symbol in operand.shape))
            profile.set_shape(operand.name, *shapes)
        config.add_optimization_profile(profile)
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM120, 0)
        host.configured.clear()
        plan = builder.build_serialized_network(definition, config)
        output = definition.get_output(0)
        kind = definition.get_layer(definition.num_layers - 1).type.name
        found = [parsed, plan is not None, kind, api.dtype_name(output.dtype), len(output.shape), host.configured]
        print(json.dumps([dtype, packed, *found, host.refusals]))
"""


def test_one_node_becomes_a_plan(tmp_path: Path) -> None:
    environment = {**os.environ, **parser_environment(TENSORRT_RTX, tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", BUILD, str(HELPERS)], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr[-3000:]
    built = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert built == [
        [dtype, packed, True, True, "PLUGIN_V3", dtype, 3, [["MoEExpertOutputs", "experts"]], []]
        for dtype in ("float32", "bfloat16")
        for packed in (True, False)
    ]

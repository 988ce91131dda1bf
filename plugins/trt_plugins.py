"""Every op as a TensorRT plugin, and the identity of their interface."""

from __future__ import annotations

import hashlib
import json
from functools import cache

from engram_trt.plugins.cache_write.trt_plugin import PLUGIN as CACHE_WRITE
from engram_trt.plugins.engram_gather.trt_plugin import PLUGIN as ENGRAM_GATHER
from engram_trt.plugins.engram_hash.trt_plugin import PLUGIN as ENGRAM_HASH
from engram_trt.plugins.hyper_connection_mix.trt_plugin import PLUGIN as HYPER_CONNECTION_MIX
from engram_trt.plugins.indexer.trt_plugin import PLUGIN as INDEXER
from engram_trt.plugins.kernels.plan import TRAILING_POINTERS
from engram_trt.plugins.moe_expert_outputs.trt_plugin import PLUGIN as MOE_EXPERT_OUTPUTS
from engram_trt.plugins.moe_experts.trt_plugin import PLUGIN as MOE_EXPERTS
from engram_trt.plugins.quantize_dequantize.trt_plugin import PLUGIN as QUANTIZE_DEQUANTIZE
from engram_trt.plugins.sparse_attention.trt_plugin import PLUGIN as SPARSE_ATTENTION
from engram_trt.plugins.trt_contract import OpPlugin

OP_PLUGINS: tuple[OpPlugin, ...] = (
    CACHE_WRITE,
    ENGRAM_GATHER,
    ENGRAM_HASH,
    HYPER_CONNECTION_MIX,
    INDEXER,
    MOE_EXPERT_OUTPUTS,
    MOE_EXPERTS,
    QUANTIZE_DEQUANTIZE,
    SPARSE_ATTENTION,
)

KERNEL_TARGETS = tuple(sorted(set.intersection(*(set(plugin.spec.supported_sms) for plugin in OP_PLUGINS))))
"""Compute capabilities that every op has kernels for."""


def plugin_of(op_type: str) -> OpPlugin:
    """The plugin of one op. Raises KeyError for a name that is not ours."""
    return {plugin.spec.name: plugin for plugin in OP_PLUGINS}[op_type]


@cache
def plugin_abi(op_type: str) -> str:
    """Identity (hex) of what a built engine and this code must agree on: the op's tensors, attributes, aliases and
    version, and the arguments of every kernel it may launch."""
    plugin = plugin_of(op_type)
    spec = plugin.spec
    kernels = {
        sm: sorted((variant.label, variant.signature) for variant in plugin.planner.variants(sm))
        for sm in spec.supported_sms
    }
    document = {
        "version": spec.version,
        "inputs": [(operand.name, operand.dtype, operand.shape, operand.optional) for operand in spec.inputs],
        "outputs": [(operand.name, operand.dtype, operand.shape, operand.optional) for operand in spec.outputs],
        "attributes": [(attribute.name, attribute.kind) for attribute in spec.attributes],
        "aliases": dict(spec.aliases),
        "trailing_pointers": TRAILING_POINTERS,
        "kernels": kernels,
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

"""From a `PluginSpec` to ONNX: schema, translation of the torch op, and function bodies made by tracing references.

A node of domain `engram` carries `plugin_namespace` and `plugin_version`, by which TensorRT's parser finds the
plugin; every other tool inlines the model-local function of the same name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx
import onnxscript
from onnx.defs import OpSchema

from engram_trt.plugins import torch_ops
from engram_trt.plugins.indexer.spec import CANDIDATE_SOURCE
from engram_trt.plugins.onnx_exporter import RENAMING_TRANSLATIONS, STANDARD
from engram_trt.plugins.registry import SPECS, spec_of
from engram_trt.plugins.spec import NAMESPACE, TYPE_VARIABLES, AttributeValue, PluginSpec

PLUGIN_ATTRIBUTES = ("plugin_namespace", "plugin_version")

_ONNX_TYPES = {
    "bool": "tensor(bool)",
    "int8": "tensor(int8)",
    "int32": "tensor(int32)",
    "int64": "tensor(int64)",
    "float32": "tensor(float)",
    "bfloat16": "tensor(bfloat16)",
}
_ENGRAM = onnxscript.values.Opset(NAMESPACE, 1)


def op_schema(spec: PluginSpec) -> OpSchema:
    """The ONNX schema of an op; attributes are all required."""

    def formal(operand: Any) -> OpSchema.FormalParameter:
        option = OpSchema.FormalParameterOption.Optional if operand.optional else OpSchema.FormalParameterOption.Single
        type_name = operand.dtype if operand.dtype in TYPE_VARIABLES else _ONNX_TYPES[operand.dtype]
        return OpSchema.FormalParameter(operand.name, type_name, operand.meaning, param_option=option)

    kinds = {"int": OpSchema.AttrType.INT, "float": OpSchema.AttrType.FLOAT}
    attributes = [OpSchema.Attribute(a.name, kinds[a.kind], a.meaning, required=True) for a in spec.attributes]
    attributes += [
        OpSchema.Attribute(name, OpSchema.AttrType.STRING, "read by TensorRT's parser", required=True)
        for name in PLUGIN_ATTRIBUTES
    ]
    used = {operand.dtype for operand in (*spec.inputs, *spec.outputs)} & TYPE_VARIABLES.keys()
    return OpSchema(
        spec.name,
        NAMESPACE,
        1,
        doc=spec.name,
        inputs=[formal(operand) for operand in spec.inputs],
        outputs=[formal(operand) for operand in spec.outputs],
        type_constraints=[(name, [_ONNX_TYPES[t] for t in TYPE_VARIABLES[name]], "") for name in sorted(used)],
        attributes=attributes,
    )


@contextmanager
def registered_schemas() -> Iterator[None]:
    """Make the ops known to the exporter, and unknown again: a registered schema hides a model-local function
    from onnx's shape inference in the same process."""
    for spec in SPECS:
        onnx.defs.register_schema(op_schema(spec))
    try:
        yield
    finally:
        for spec in SPECS:
            onnx.defs.deregister_schema(spec.name, 1, NAMESPACE)


def emit(spec: PluginSpec, inputs: Sequence[Any], attributes: Mapping[str, AttributeValue]) -> Any:
    """Put a node of an op into the graph being traced; absent optional inputs are None.

    The exporter gives a node every output its schema declares; `drop_unused_outputs` takes the spare ones away.
    """
    present = list(inputs)
    while present and present[-1] is None:
        present.pop()
    plugin = dict(zip(PLUGIN_ATTRIBUTES, (NAMESPACE, spec.version), strict=True))
    return onnxscript.values.Op(_ENGRAM, spec.name)(*present, **attributes, **plugin)


def translate(spec: PluginSpec) -> Callable[..., Any]:
    """A translation for a torch op whose arguments are the spec's inputs, then its attributes, in order."""
    names = (*spec.input_names, *spec.attribute_names)
    num_inputs = len(spec.inputs)
    has_spare_output = any(operand.optional for operand in spec.outputs)

    def translation(*arguments: Any) -> Any:
        attributes = dict(zip(spec.attribute_names, arguments[num_inputs:], strict=True))
        outputs = emit(spec, arguments[:num_inputs], attributes)
        return outputs[0] if has_spare_output else outputs

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    translation.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    translation.__name__ = spec.name
    return translation


def _take(table: Any, indices: Any) -> Any:
    return STANDARD.Gather(table, indices, axis=0)


def _stable_topk(scores: Any, k: int) -> Any:
    count = STANDARD.Constant(value_ints=[k])
    return STANDARD.TopK(scores, count, axis=-1, largest=1, sorted=1)


def _floor_divide(x: Any, divisor: int) -> Any:
    return STANDARD.Div(x, STANDARD.Constant(value_int=divisor))


def _ring_slots(positions: Any, ring: Any) -> Any:
    return STANDARD.Mod(positions, STANDARD.Shape(ring, start=1, end=2))


def _gather_rows(cache: Any, indices: Any) -> Any:
    last = STANDARD.Constant(value_ints=[-1])
    return STANDARD.GatherND(cache, STANDARD.Unsqueeze(indices, last), batch_dims=1)


def _indexer_candidate_source(
    index_q: Any,
    index_weights: Any,
    index_keys: Any,
    start_positions: Any,
    visible_entries: Any,
    compress_ratio: int,
    index_topk: int,
    candidate_topk_blocks: int,
    candidate_block_size: int,
) -> Any:
    attributes = {
        "compress_ratio": compress_ratio,
        "index_topk": index_topk,
        "role": CANDIDATE_SOURCE,
        "candidate_topk_blocks": candidate_topk_blocks,
        "candidate_block_size": candidate_block_size,
    }
    inputs = [index_q, index_weights, index_keys, start_positions, visible_entries]
    return emit(spec_of("Indexer"), inputs, attributes)


PRIMITIVE_TRANSLATIONS: Mapping[Any, Callable[..., Any]] = {
    **RENAMING_TRANSLATIONS,
    torch_ops.primitives.take._opoverload: _take,
    torch_ops.primitives.stable_topk._opoverload: _stable_topk,
    torch_ops.primitives.floor_divide._opoverload: _floor_divide,
    torch_ops.primitives.ring_slots._opoverload: _ring_slots,
    torch_ops.primitives.gather_rows._opoverload: _gather_rows,
}
"""What references use beside torch ops that the exporter knows."""


def translation_table() -> dict[Any, Callable[..., Any]]:
    """Torch op -> translation, for a trace of a stage or of a reference."""
    ops = {
        torch_ops.cache_write.functional_cache_write: "CacheWrite",
        torch_ops.engram_gather.engram_gather: "EngramGather",
        torch_ops.engram_hash.engram_hash: "EngramHash",
        torch_ops.hyper_connection_mix.hyper_connection_mix: "HyperConnectionMix",
        torch_ops.indexer.indexer: "Indexer",
        torch_ops.moe_expert_outputs.moe_expert_outputs: "MoEExpertOutputs",
        torch_ops.moe_experts.moe_experts: "MoEExperts",
        torch_ops.quantize_dequantize.quantize_dequantize: "QuantizeDequantize",
        torch_ops.sparse_attention.sparse_attention: "SparseAttention",
    }
    return {
        **PRIMITIVE_TRANSLATIONS,
        **{op._opoverload: translate(spec_of(name)) for op, name in ops.items()},
        torch_ops.indexer.indexer_candidate_source._opoverload: _indexer_candidate_source,
    }

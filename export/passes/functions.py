"""Attach to a traced graph the function bodies of the ops it uses."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import helper

from engram_trt.configs.model import ModelConfig
from engram_trt.plugins.onnx_bodies import FUNCTION_MAKERS
from engram_trt.plugins.onnx_functions import NodeVariant
from engram_trt.plugins.onnx_translation import PLUGIN_ATTRIBUTES
from engram_trt.plugins.registry import spec_of
from engram_trt.plugins.spec import NAMESPACE

_Key = tuple[object, ...]


def operand_sizes(config: ModelConfig) -> dict[str, int]:
    """Fixed extents of every operand symbol, for one model."""
    return {
        "history": max(config.engram_max_ngram_size - 1, 0),
        "ngram": config.engram_max_ngram_size,
        "engram_layers": len(config.engram_layer_ids),
        "engram_heads": config.engram_n_heads,
        "columns": config.engram_columns,
        "engram_head_dim": config.engram_head_dim,
        "groups": config.engram_head_dim // 32,
        "heads": config.n_heads,
        "head_dim": config.head_dim,
        "index_topk": config.index_topk,
        "index_heads": config.index_n_heads,
        "index_head_dim": config.index_head_dim,
        "candidate_topk_blocks": config.candidate_topk_blocks,
        "hc_mult": config.hc_mult,
        "dim": config.dim,
        "hc_mixes": config.hc_mixes,
        "hc_dim": config.hc_mult * config.dim,
    }


class FunctionLibrary:
    """Bodies for one model and dtype; each is made once, however many stages use it.

    Args:
        config: the model.
        dtype: stage dtype.
    """

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        self._sizes, self._dtype = operand_sizes(config), dtype
        self._made: dict[_Key, onnx.FunctionProto] = {}

    def missing(self, model: onnx.ModelProto) -> list[NodeVariant]:
        """What the nodes of a graph need and the library has not; each once."""
        variants = {_key(variant): variant for variant in map(self._variant, _engram_nodes(model.graph.node))}
        return [variant for key, variant in variants.items() if key not in self._made]

    def add(self, variant: NodeVariant, function: onnx.FunctionProto) -> None:
        """Take a body made elsewhere by `make_function`."""
        self._made[_key(variant)] = function

    def attach(self, model: onnx.ModelProto) -> None:
        """Add the bodies a graph needs and point its nodes at them.

        Before: nodes of our domain have no body. After: every such node, also inside an added body, names a
        model-local function by op and overload; functions stand in an order a reader can follow.
        """
        pending = list(_engram_nodes(model.graph.node))
        attached: set[tuple[str, str]] = set()
        while pending:
            node = pending.pop(0)
            variant = self._variant(node)
            node.overload = _overload(variant)
            if (node.op_type, node.overload) in attached:
                continue
            attached.add((node.op_type, node.overload))
            function = model.functions.add()
            function.CopyFrom(self._function(variant))
            pending.extend(_engram_nodes(function.node))
        if "" not in {item.domain for item in model.opset_import}:
            raise ValueError("the traced graph imports no standard operators")

    def _variant(self, node: onnx.NodeProto) -> NodeVariant:
        attributes = {
            item.name: helper.get_attribute_value(item) for item in node.attribute if item.name not in PLUGIN_ATTRIBUTES
        }
        return NodeVariant(
            spec=spec_of(node.op_type),
            attributes=attributes,
            dtype=self._dtype,
            num_inputs=len(node.input),
            sizes=self._sizes,
        )

    def _function(self, variant: NodeVariant) -> onnx.FunctionProto:
        key = _key(variant)
        if key not in self._made:
            self._made[key] = make_function(variant)
        return self._made[key]


def make_function(variant: NodeVariant) -> onnx.FunctionProto:
    """The body of one op; seconds for one that is traced."""
    return FUNCTION_MAKERS[variant.spec.name](variant, _overload(variant))


def _key(variant: NodeVariant) -> _Key:
    return (variant.spec.name, variant.num_inputs, *sorted(variant.attributes.items()))


def _overload(variant: NodeVariant) -> str:
    """Only rounding comes in several forms within one graph."""
    return str(variant.attributes["format"]) if "format" in variant.attributes else ""


def _engram_nodes(nodes: object) -> Iterator[onnx.NodeProto]:
    for node in nodes:  # type: ignore[attr-defined]
        if node.domain == NAMESPACE:
            yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _engram_nodes(attribute.g.node)

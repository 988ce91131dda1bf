"""What the exporter leaves behind that other tools stumble over."""

from __future__ import annotations

import onnx

from engram_trt.plugins.spec import NAMESPACE


def drop_unused_outputs(model: onnx.ModelProto) -> None:
    """Take away trailing outputs of our nodes that nothing reads.

    Before: every node has all outputs of its schema. After: an optional output is there iff it is used, so that a
    plugin is created with the right number of outputs.
    """
    graph = model.graph
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in graph.node:
        while node.domain == NAMESPACE and len(node.output) > 1 and node.output[-1] not in used:
            del node.output[-1]


def drop_untyped_values(model: onnx.ModelProto) -> None:
    """Remove intermediate type entries without a type, which onnx.checker refuses.

    Before: outputs of translated nodes have empty entries. After: every entry has a type.
    """
    kept = [value for value in model.graph.value_info if value.type.WhichOneof("value")]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)

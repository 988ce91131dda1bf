"""An exported stage seen from inside: which of its values can be named, and what they are on given inputs.

Named are the inputs and outputs of the package's ops, of linears and of norms: a parameter keeps its name from the
checkpoint through to the file, and an op is one node. Everything else is arithmetic between such points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from polygraphy.backend.onnx import ModifyOutputs
from polygraphy.logger import G_LOGGER

from engram_trt.plugins.spec import NAMESPACE
from engram_trt.runtime.stage_runners.contract import Array

WEIGHTED = ("RMSNormalization", "MatMul", "Gemm")
_SUFFIX = ".weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A node with a name.

    Args:
        label: `SparseAttention`, `HyperConnectionMix#1` (the second one of the stage), or a module: `attn.wq_b`.
        op_type: of a custom op, empty for linears and norms.
        inputs: value names in node order, empty for an absent one; weights are left out of a module's.
        outputs: value names in node order.
        attributes: of a custom op.
    """

    label: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, int | float]


class StageGraph:
    """One .onnx file of an artefact.

    Args:
        path: the file; its weights are read from the data file beside it.
    """

    def __init__(self, path: Path) -> None:
        self.model: onnx.ModelProto = onnx.load(path)
        graph = self.model.graph
        self.weights = {item.name for item in graph.initializer}
        self.graph_inputs = {item.name for item in graph.input}
        self.graph_outputs = [item.name for item in graph.output]
        self._producer = {name: node for node in graph.node for name in node.output}
        self.anchors = list(self._anchors())
        self._sessions: dict[tuple[str, ...], Any] = {}

    def _anchors(self) -> Iterable[Anchor]:
        counts: dict[str, int] = {}
        for node in self.model.graph.node:
            if node.domain == NAMESPACE:
                count = counts[node.op_type] = counts.get(node.op_type, -1) + 1
                yield Anchor(
                    label=f"{node.op_type}#{count}" if count else node.op_type,
                    op_type=node.op_type,
                    inputs=tuple(node.input),
                    outputs=tuple(node.output),
                    attributes={item.name: onnx.helper.get_attribute_value(item) for item in node.attribute},
                )
            elif node.op_type in WEIGHTED and (module := self._module_of(node)):
                yield Anchor(
                    label=module, op_type="", inputs=(node.input[0],), outputs=(node.output[0],), attributes={}
                )

    def _module_of(self, node: Any) -> str:
        """The module whose weight a node applies; empty if it has none."""
        name = node.input[1]
        producer = self._producer.get(name)
        if producer is not None and producer.op_type == "Transpose":
            name = producer.input[0]
        return name.removesuffix(_SUFFIX) if name in self.weights and name.endswith(_SUFFIX) else ""

    def values(self, names: Iterable[str], feed: Mapping[str, Array]) -> dict[str, Array]:
        """Compute some values of the graph; the file itself is not touched.

        Args:
            names: of values inside the graph.
            feed: every graph input.
        """
        wanted = tuple(name for name in dict.fromkeys(names) if name in self._producer)
        if not wanted:
            return {}
        if wanted not in self._sessions:
            self._sessions[wanted] = self._open(wanted)
        session = self._sessions[wanted]
        needed = {item.name for item in session.get_inputs()}
        results = session.run(list(wanted), {name: feed[name] for name in needed})
        return dict(zip(wanted, results, strict=True))

    def _open(self, outputs: tuple[str, ...]) -> Any:
        import onnxruntime

        with G_LOGGER.verbosity(G_LOGGER.ERROR):
            marked = ModifyOutputs(self.model, outputs=list(outputs), copy=True)()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(marked.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def weight(self, name: str) -> Array | None:
        """An initializer's values."""
        for item in self.model.graph.initializer:
            if item.name == name:
                return onnx.numpy_helper.to_array(item)
        return None

    def between(self, name: str) -> tuple[list[str], list[str]]:
        """What a value is computed from: labels of the nearest named points, and types of the nodes on the way."""
        anchors = {output: anchor.label for anchor in self.anchors for output in anchor.outputs}
        labels: dict[str, None] = {}
        nodes: dict[str, None] = {}
        waiting, seen = [name], set()
        while waiting:
            value = waiting.pop()
            if value in seen or not value:
                continue
            seen.add(value)
            if value in anchors and value != name:
                labels[anchors[value]] = None
            elif value in self.graph_inputs:
                labels[f"input {value}"] = None
            elif value in self._producer:
                node = self._producer[value]
                if node.op_type == "Shape":
                    continue
                nodes[node.op_type] = None
                waiting.extend(node.input)
        return list(labels), list(nodes)

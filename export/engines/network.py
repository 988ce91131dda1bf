"""Checks of a parsed network and of the builder's log: plugins in place, bindings as the stage spec says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engram_trt.configs.errors import BackendError
from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.export.engines.model import DenseWeight, PluginNode
from engram_trt.plugins.tensorrt_api import TensorRT
from engram_trt.plugins.trt_plugins import plugin_of

_LAYER = re.compile(
    r"^Name: (.*?), LayerType: (.*?), Inputs: (.*?), (?:Constants: .*?, )?Outputs: (.*?)(?:, TacticName|$)"
)
_TENSOR = re.compile(r"\{ Name: (.*?)(?: \[profile \d+\])?, (?:Location: \w+, )?Dimensions: \[([^\]]*)\]")

_PLUGIN_LAYERS = ("PluginV3", "custom_layer")
_NO_WORK = ("NoOp", "shape_call", "signal", "wait")


class BuildError(BackendError):
    """A plan cannot be built, or would not be what the stage spec says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLayer:
    """One layer of a built plan, as the builder lists it: tensors by name and text of their extents."""

    name: str
    kind: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]


class Network:
    """A parsed network seen by names.

    Args:
        api: TensorRT.
        network: an `INetworkDefinition`.
    """

    def __init__(self, api: TensorRT, network: Any) -> None:
        self.api, self.network = api, network
        self.plugins: dict[str, tuple[Any, int]] = {}
        """Output tensor -> plugin layer and position of the output."""
        self.read: set[str] = set()
        """Tensors some layer reads."""
        trt = api.module
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            self.read |= {layer.get_input(n).name for n in range(layer.num_inputs) if layer.get_input(n) is not None}
            if layer.type == trt.LayerType.PLUGIN_V3:
                layer.__class__ = trt.IPluginV3Layer
                for position in range(layer.num_outputs):
                    self.plugins[layer.get_output(position).name] = layer, position

    @property
    def inputs(self) -> list[Any]:
        return [self.network.get_input(n) for n in range(self.network.num_inputs)]

    @property
    def outputs(self) -> list[Any]:
        return [self.network.get_output(n) for n in range(self.network.num_outputs)]

    def alias_of(self, output: str) -> str | None:
        """The tensor whose buffer a plugin's output updates; None where there is no such plugin."""
        if output not in self.plugins:
            return None
        layer, position = self.plugins[output]
        source = layer.plugin.get_aliased_input(position)
        return None if source < 0 else str(layer.get_input(source).name)


def check_plugins(stage: str, network: Network, nodes: Sequence[PluginNode]) -> None:
    """Every node of our domain is a plugin layer of its op.

    Raises:
        BuildError: a node fell back to its function body, or became another plugin.
    """
    for node in nodes:
        layers = {id(network.plugins[name][0]) for name in node.outputs if name in network.plugins}
        ops = {network.plugins[name][0].plugin.plugin_name for name in node.outputs if name in network.plugins}
        if len(layers) != 1 or ops != {node.op}:
            raise BuildError(
                f"{stage}: node {node.name} ({node.op})",
                found=f"plugins {sorted(ops)}" if ops else "its function body in place of the plugin",
                expected=f"one plugin layer {node.op}",
                remedy="Give the node plugin_namespace and plugin_version: export again with this version.",
            )


def check_plugin_types(stage: str, network: Network, nodes: Sequence[PluginNode]) -> None:
    """Every plugin gets the dtypes of its contract; the builder itself only says that no format fits, or crashes.

    Raises:
        BuildError: naming node, tensor, and the dtype found and expected.
    """
    for node in nodes:
        layer, _ = network.plugins[node.outputs[0]]
        dtypes = [network.api.dtype_name(layer.get_input(n).dtype) for n in range(layer.num_inputs)]
        for position in range(len(dtypes)):
            refusal = plugin_of(node.op).accepts(position, dtypes[: position + 1], len(dtypes), node.attributes)
            if refusal is not None:
                raise BuildError(
                    f"{stage}: node {node.name}",
                    found=refusal,
                    expected="the dtypes of the op's contract",
                    remedy="Export the checkpoint again with this version.",
                )


def check_configured(stage: str, nodes: Sequence[PluginNode], configured: Iterable[tuple[str, str]]) -> None:
    """The builder configured every plugin; BuildError for one it left out."""
    counts = Counter(configured)
    for node in nodes:
        if counts[node.op, node.name] == 0:
            raise BuildError(
                f"{stage}: node {node.name} ({node.op})",
                found="a plugin the builder never configured",
                expected="every plugin in the plan",
                remedy="The node's outputs are not used: export again with this version.",
            )


def check_bindings(stage: StageSpec, network: Network, weights: Sequence[DenseWeight]) -> None:
    """Names, order, dtypes, shapes and aliases of the network against the spec, and that every input is read.

    Args:
        stage: what the bindings should be.
        network: what was parsed.
        weights: inputs that follow the stage's own.

    Raises:
        BuildError: naming the binding.
    """
    expected = [(tensor.name, tensor.dtype, tensor.shape) for tensor in stage.inputs]
    expected += [(weight.name, weight.dtype, weight.shape) for weight in weights]
    _compare(stage.name, "input", network, network.inputs, expected)
    outputs = [(tensor.name, tensor.dtype, tensor.shape) for tensor in stage.outputs]
    _compare(stage.name, "output", network, network.outputs, outputs)
    for tensor in stage.outputs:
        found = network.alias_of(tensor.name)
        if found != tensor.alias:
            raise _differs(stage.name, f"output {tensor.name}", f"alias of {found}", f"alias of {tensor.alias}")
    for name, _, _ in expected:
        if name not in network.read:
            raise BuildError(
                f"{stage.name}: input {name}",
                found="an input that nothing reads",
                expected="every binding of the stage in use",
                remedy="Unused Input: the graph was changed after the export, or a fusion dropped it.",
            )


def _compare(
    stage: str,
    kind: str,
    network: Network,
    found: Sequence[Any],
    expected: Sequence[tuple[str, str, Sequence[str | int]]],
) -> None:
    names, wanted = [tensor.name for tensor in found], [name for name, _, _ in expected]
    if names != wanted:
        odd = sorted(set(names) ^ set(wanted)) or names
        raise _differs(stage, f"{kind}s", f"{names}", f"{wanted} (differing: {odd})")
    for tensor, (name, dtype, shape) in zip(found, expected, strict=True):
        given = network.api.dtype_name(tensor.dtype)
        if given != dtype:
            raise _differs(stage, f"{kind} {name}", given, dtype)
        extents = tuple(tensor.shape)
        symbolic = tuple(-1 if isinstance(extent, str) else extent for extent in shape)
        if extents != symbolic:
            raise _differs(stage, f"{kind} {name}", f"shape {list(extents)}", f"{list(symbolic)}")


def _differs(stage: str, binding: str, found: str, expected: str) -> BuildError:
    return BuildError(
        f"{stage}: {binding}",
        found=found,
        expected=f"{expected}, as the stage spec says",
        remedy="Graph and manifest do not belong together: export again.",
    )


# --- the builder's log --------------------------------------------------------------------------------------------


def check_log(stage: str, messages: Iterable[str]) -> None:
    """BuildError if the builder said that it ignored an input."""
    for message in messages:
        if "unused input" in message.lower():
            raise BuildError(
                stage,
                found=f"the builder's message {message.strip()!r}",
                expected="every binding of the stage in use",
                remedy="A fusion ignored the input: report it with the log beside the plan.",
            )


def plan_layers(text: str) -> tuple[PlanLayer, ...]:
    """Layers out of the list that the builder writes with detailed verbosity."""
    found = []
    for line in text.splitlines():
        match = _LAYER.match(line)
        if match is not None:
            name, kind, inputs, outputs = match.groups()
            tensors = tuple(tuple(_TENSOR.findall(part)) for part in (inputs, outputs))
            found.append(PlanLayer(name=name, kind=kind, inputs=tensors[0], outputs=tensors[1]))
    return tuple(found)


def check_no_cache_copied(stage: StageSpec, layers: Sequence[PlanLayer], capacities: Mapping[str, int]) -> None:
    """No layer but a plugin writes a tensor as large as a cache.

    Args:
        stage: its aliased outputs are the caches.
        layers: of the plan.
        capacities: size of every symbol that is fixed.

    Raises:
        BuildError: naming the layer.
    """
    sizes = {_trailing(tensor, capacities): tensor.name for tensor in stage.outputs if tensor.alias is not None}
    for layer in layers:
        if layer.kind in (*_PLUGIN_LAYERS, *_NO_WORK):
            continue
        for name, extents in layer.outputs:
            cache = sizes.get(",".join(extents.replace(" ", "").split(",")[1:]))
            if cache is not None:
                raise BuildError(
                    f"{stage.name}: {cache}",
                    found=f"a copy of the cache: layer {layer.name} ({layer.kind}) writes {name} [{extents}]",
                    expected="caches updated in place by plugins only",
                    remedy="Report it with the log beside the plan.",
                )


def _trailing(tensor: TensorSpec, sizes: Mapping[str, int]) -> str:
    return ",".join(str(sizes[extent] if isinstance(extent, str) else extent) for extent in tensor.shape[1:])


def check_plan_plugins(stage: str, layers: Sequence[PlanLayer], nodes: Sequence[PluginNode], profiles: int) -> None:
    """Every plugin is a layer of the plan, once per profile, under its node's name; BuildError for one that is not."""
    kept = [layer.name for layer in layers if layer.kind in _PLUGIN_LAYERS]
    for node in nodes:
        pattern = re.compile(rf"{re.escape(node.name)}( \[profile \d+\])?(_myl\d+_\d+)?")
        count = sum(pattern.fullmatch(name) is not None for name in kept)
        if count < profiles:
            raise BuildError(
                f"{stage}: node {node.name} ({node.op})",
                found=f"{count} plugin layers in the plan",
                expected=f"{profiles}, one per profile",
                remedy="Report it with the log beside the plan.",
            )

"""The `IPluginV3` class and creator of an op, for a loaded TensorRT.

The base classes come from whichever TensorRT was loaded, so the classes are made by a function. All behaviour
that does not need TensorRT is in `trt_contract.py` and `trt_launch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engram_trt.configs.errors import UserError
from engram_trt.plugins.kernels.plan import TensorInfo
from engram_trt.plugins.spec import NAMESPACE, AttributeValue
from engram_trt.plugins.tensorrt_api import TensorRT
from engram_trt.plugins.trt_contract import OpPlugin, read_fields
from engram_trt.plugins.trt_launch import Call, KernelLauncher, tensor_info


@dataclass(slots=True)
class PluginHost:
    """What all plugins of a process share.

    Attributes:
        api: the TensorRT they are registered with.
        sms: compute capabilities that workspaces and plans must suit.
        launcher: runs kernels; None where only plans are built.
        configured: (op, node) as often as the builder configured it.
        refusals: why plugins refused something, in words; TensorRT reports only that they did.
        on_refusal: hears of each at once, for a refusal can end in a crash of the builder.
    """

    api: TensorRT
    sms: tuple[int, ...]
    launcher: KernelLauncher | None = None
    configured: list[tuple[str, str]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    on_refusal: Callable[[str], None] = lambda reason: None

    def refuse(self, reason: str) -> None:
        """Note why a plugin refuses something."""
        self.refusals.append(reason)
        self.on_refusal(reason)


class _Algebra:
    """Products of symbolic extents by TensorRT's expression builder."""

    def __init__(self, api: TensorRT, builder: Any) -> None:
        self._builder, self._product = builder, api.module.DimensionOperation.PROD

    def constant(self, value: int) -> Any:
        return self._builder.constant(value)

    def product(self, first: Any, second: Any) -> Any:
        return self._builder.operation(self._product, first, second)


def creator_of(host: PluginHost, op: OpPlugin) -> Any:
    """An `IPluginCreatorV3One` whose plugins are of one op."""
    trt = host.api.module
    plugin_class = _plugin_class(host, op)
    kinds = {"int": trt.PluginFieldType.INT64, "float": trt.PluginFieldType.FLOAT32}

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_namespace, self.plugin_version = op.spec.name, NAMESPACE, op.spec.version
            self.field_names = trt.PluginFieldCollection(
                [trt.PluginField(a.name, np.array([]), kinds[a.kind]) for a in op.spec.attributes]
            )

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            try:
                attributes = read_fields(op.spec, {item.name: _field(trt, item) for item in fields})
            except UserError as error:
                host.refuse(f"node {name}: {error}")
                return None
            return plugin_class(attributes, name)

    return Creator()


def _field(trt: Any, item: Any) -> tuple[str, Sequence[float]]:
    kinds = trt.PluginFieldType
    names = {kinds.INT32: "int", kinds.INT64: "int", kinds.FLOAT32: "float"}
    values = [] if item.data is None else np.asarray(item.data).reshape(-1).tolist()
    return names.get(item.type, str(item.type)), values


def _plugin_class(host: PluginHost, op: OpPlugin) -> Any:
    trt = host.api.module
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    class Plugin(*bases):  # type: ignore[misc]
        def __init__(self, attributes: Mapping[str, AttributeValue], node: str) -> None:
            for base in bases:
                base.__init__(self)
            self.plugin_name, self.plugin_namespace, self.plugin_version = op.spec.name, NAMESPACE, op.spec.version
            self.num_outputs = len(op.outputs(attributes))
            self.attributes, self.node = attributes, node
            self._serialized: list[Any] = []

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Plugin(self.attributes, self.node)

        # --- build ----------------------------------------------------------------------------------------

        def get_output_data_types(self, dtypes: Sequence[Any]) -> list[Any]:
            names = [host.api.dtype_name(dtype) for dtype in dtypes]
            return [host.api.dtypes[name] for name in op.output_dtypes(names, self.attributes)]

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
            shapes = [[extents[axis] for axis in range(len(extents))] for extents in inputs]
            try:
                results = op.output_shapes(shapes, self.attributes, _Algebra(host.api, builder))
            except ValueError as error:
                host.refuse(f"node {self.node}: {op.spec.name}: a tensor has another rank ({error})")
                raise
            return [_dims(trt, shape) for shape in results]

        def supports_format_combination(self, position: int, tensors: Sequence[Any], num_inputs: int) -> bool:
            if tensors[position].desc.format != trt.TensorFormat.LINEAR:
                return False
            names = [host.api.dtype_name(tensor.desc.type) for tensor in tensors[: position + 1]]
            refusal = op.accepts(position, names, num_inputs, self.attributes)
            if refusal is not None:
                host.refuse(f"node {self.node}: {refusal}")
            return refusal is None

        def get_aliased_input(self, output: int) -> int:
            return op.alias(output)

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            host.configured.append((op.spec.name, self.node))

        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            # TensorRT hands in the largest extents of the profile under construction.
            try:
                tensors = [tensor_info(tuple(item.max), host.api.dtype_name(item.desc.type)) for item in inputs]
                return op.workspace_bytes(op.named_inputs(tensors), self.attributes, host.sms)
            except UserError as error:
                host.refuse(f"node {self.node}: {error}")
                raise

        # --- run ------------------------------------------------------------------------------------------

        def get_fields_to_serialize(self) -> Any:
            kinds = {"int": trt.PluginFieldType.INT64, "float": trt.PluginFieldType.FLOAT32}
            dtypes = {"int": np.int64, "float": np.float32}
            fields = []
            # A field points to its array, so the arrays live as long as the plugin.
            self._serialized = []
            for attribute in op.spec.attributes:
                values = np.array([self.attributes[attribute.name]], dtype=dtypes[attribute.kind])
                self._serialized.append(values)
                fields.append(trt.PluginField(attribute.name, values, kinds[attribute.kind]))
            return trt.PluginFieldCollection(fields)

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            """Plans are made per shape at the first launch; nothing to prepare."""

        def set_tactic(self, tactic: int) -> None:
            """There is one way to run."""

        def get_valid_tactics(self) -> list[int]:
            return []

        def enqueue(
            self,
            input_desc: Sequence[Any],
            output_desc: Sequence[Any],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> int:
            launcher = host.launcher
            if launcher is None:
                raise RuntimeError(f"{op.spec.name} has no kernels in this process: plans are only built here")
            infos = tuple(_info(host.api, desc) for desc in input_desc)
            try:
                launcher.run(Call(op, self.attributes, infos, inputs, outputs, workspace, stream))
            except UserError as error:
                launcher.last_error = error
                raise
            return 0

    return Plugin


def _info(api: TensorRT, desc: Any) -> TensorInfo:
    return tensor_info(tuple(desc.dims), api.dtype_name(desc.type))


def _dims(trt: Any, extents: Sequence[Any]) -> Any:
    dims = trt.DimsExprs(len(extents))
    for axis, extent in enumerate(extents):
        dims[axis] = extent
    return dims

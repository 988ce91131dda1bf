"""What a TensorRT plugin of an op does, without TensorRT: fields, output shapes and dtypes, refusals, workspace.

Everything follows from the op's `PluginSpec` and its launch planner; an op's `trt_plugin.py` adds only what these
do not say, such as an extent that is a product of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from engram_trt.configs.errors import KernelError
from engram_trt.plugins.kernels.checks import Inputs
from engram_trt.plugins.kernels.plan import TRITON_NAME, WORKSPACE_ALIGNMENT, TensorInfo, Variant
from engram_trt.plugins.kernels.planner import Attributes, Planner
from engram_trt.plugins.spec import TYPE_VARIABLES, AttributeValue, Operand, PluginSpec


class ExtentAlgebra(Protocol):
    """How symbolic extents are made; TensorRT's expression builder, or plain integers in tests."""

    def constant(self, value: int) -> Any:
        """A known extent."""

    def product(self, first: Any, second: Any) -> Any:
        """An extent times another."""


_ROUNDING_BYTES = 16 * WORKSPACE_ALIGNMENT
"""What aligning every buffer of a workspace may add."""


def with_extents(spec: PluginSpec, inputs: Inputs, extents: Mapping[str, int]) -> Inputs:
    """The same inputs with other values for some symbols of the contract."""
    return {
        operand.name: replace(
            tensor,
            shape=tuple(
                extents.get(str(symbol), extent) for symbol, extent in zip(operand.shape, tensor.shape, strict=True)
            ),
        )
        for operand in spec.inputs
        if (tensor := inputs.get(operand.name)) is not None
    }


def _as_they_are(inputs: Inputs, attributes: Attributes, sm: int) -> Iterable[Inputs]:
    yield inputs


def _always(variant: Variant, attributes: Attributes) -> bool:
    return True


def _nothing(attributes: Attributes) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlugin:
    """One op as a plugin.

    Args:
        planner: contract and launch plans.
        products: output extent -> the input extents it is the product of.
        num_outputs: attributes -> outputs a node has; all of them by default.
        output_types: attributes -> type variables that no input tells.
        workspace_shapes: inputs at their largest, attributes, SM -> inputs among whose plans is the one with the
            largest workspace; by default the largest inputs have it.
        chunk_bytes: workspace by which a step is cut into chunks; 0 for an op that never does.
        needs_variant: whether a node with these attributes can launch a variant.
        stage_buffers: kernel arguments, besides the contract's tensors, that have the stage's dtype.
    """

    planner: Planner
    products: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    num_outputs: Callable[[Attributes], int] | None = None
    output_types: Callable[[Attributes], Mapping[str, str]] = _nothing
    workspace_shapes: Callable[[Inputs, Attributes, int], Iterable[Inputs]] = _as_they_are
    chunk_bytes: int = 0
    needs_variant: Callable[[Variant, Attributes], bool] = _always
    stage_buffers: tuple[str, ...] = ()

    @property
    def spec(self) -> PluginSpec:
        return self.planner.spec

    def outputs(self, attributes: Attributes) -> tuple[Operand, ...]:
        """The outputs of a node with these attributes."""
        return self.spec.outputs[: self.num_outputs(attributes)] if self.num_outputs else self.spec.outputs

    def alias(self, output: int) -> int:
        """Position of the input whose buffer an output updates; -1 for none."""
        source = self.spec.aliases.get(self.spec.outputs[output].name)
        return -1 if source is None else self.spec.input_names.index(source)

    def named_inputs(self, tensors: Sequence[TensorInfo]) -> dict[str, TensorInfo]:
        """Present inputs by name; trailing optional ones may be absent."""
        return dict(zip(self.spec.input_names, tensors, strict=False))

    def output_shapes(
        self, shapes: Sequence[Sequence[Any]], attributes: Attributes, algebra: ExtentAlgebra
    ) -> tuple[tuple[Any, ...], ...]:
        """Symbolic shapes of the outputs from those of the inputs."""
        known: dict[str, Any] = {}
        for operand, shape in zip(self.spec.inputs, shapes, strict=False):
            for symbol, extent in zip(operand.shape, shape, strict=True):
                if isinstance(symbol, str):
                    known.setdefault(symbol, extent)

        def resolve(symbol: str | int) -> Any:
            if isinstance(symbol, int):
                return algebra.constant(symbol)
            if symbol in self.products:
                return algebra.product(*(known[factor] for factor in self.products[symbol]))
            if symbol in self.spec.attribute_names:
                return algebra.constant(int(attributes[symbol]))
            return known[symbol]

        return tuple(tuple(resolve(symbol) for symbol in operand.shape) for operand in self.outputs(attributes))

    def output_dtypes(self, dtypes: Sequence[str], attributes: Attributes) -> tuple[str, ...]:
        """Dtypes of the outputs from those of the inputs."""
        known = dict(self.output_types(attributes))
        for operand, dtype in zip(self.spec.inputs, dtypes, strict=False):
            known.setdefault(operand.dtype, dtype)
        return tuple(
            known[operand.dtype] if operand.dtype in TYPE_VARIABLES else operand.dtype
            for operand in self.outputs(attributes)
        )

    def accepts(self, position: int, dtypes: Sequence[str], num_inputs: int, attributes: Attributes) -> str | None:
        """Check the dtype of one tensor of a node, given those before it.

        Args:
            position: inputs first, then outputs.
            dtypes: of all tensors up to `position`, as far as they are settled.
            num_inputs: inputs of the node.
            attributes: of the node.

        Returns:
            None, or what is wrong with it.
        """
        is_input = position < num_inputs
        operand = self.spec.inputs[position] if is_input else self.outputs(attributes)[position - num_inputs]
        found = dtypes[position]
        if is_input:
            allowed = TYPE_VARIABLES.get(operand.dtype, (operand.dtype,))
            for earlier, dtype in zip(self.spec.inputs[:position], dtypes, strict=False):
                if earlier.dtype == operand.dtype and operand.dtype in TYPE_VARIABLES:
                    allowed = (dtype,)
                    break
        else:
            allowed = (self.output_dtypes(dtypes[:num_inputs], attributes)[position - num_inputs],)
        if found in allowed:
            return None
        return f"{self.spec.name}: {operand.name} is {found}, expected {' or '.join(allowed)}"

    def workspace_bytes(self, inputs: Inputs, attributes: Attributes, sms: Iterable[int]) -> int:
        """Bytes of scratch memory that suffice for any shapes up to these, on any of the GPUs.

        Raises:
            KernelError: no kernel takes such tensors.
        """
        largest = max(
            self.planner.plan(shapes, attributes, sm).workspace_bytes
            for sm in sms
            for shapes in self.workspace_shapes(inputs, attributes, sm)
        )
        # Chunks of smaller steps may fill the allowance better than those of the largest one.
        if self.chunk_bytes and largest > self.chunk_bytes // 2:
            return max(largest, self.chunk_bytes + _ROUNDING_BYTES)
        return largest

    def variants(self, dtype: str, num_inputs: int, attributes: Attributes, sm: int) -> tuple[Variant, ...]:
        """Kernel variants a node can launch.

        Args:
            dtype: the stage's, the meaning of T.
            num_inputs: inputs of the node; weights are packed where their scales are among them.
            attributes: of the node.
            sm: compute capability.
        """
        return tuple(
            variant
            for variant in self.planner.variants(sm)
            if self._fits_dtype(variant, dtype, num_inputs) and self.needs_variant(variant, attributes)
        )

    def _fits_dtype(self, variant: Variant, dtype: str, num_inputs: int) -> bool:
        packed = num_inputs == len(self.spec.inputs)
        meaning = {"T": dtype, "W": "int8" if packed else dtype}
        kinds = {operand.name: operand.dtype for operand in (*self.spec.inputs, *self.spec.outputs)}
        kinds |= {name: "T" for name in self.stage_buffers}
        typed = all(
            kind == f"*{TRITON_NAME[meaning[kinds[name]]]}"
            for name, kind in variant.signature
            if kinds.get(name) in meaning
        )
        return typed and dict(variant.constants).get("PACKED", packed) == packed


def read_fields(spec: PluginSpec, fields: Mapping[str, tuple[str, Sequence[float]]]) -> dict[str, AttributeValue]:
    """Check a plugin's fields against the contract.

    Args:
        spec: the op.
        fields: name -> (kind: "int", "float", or TensorRT's name of another type; values).

    Returns:
        every attribute of the contract, in its order.

    Raises:
        KernelError: a field is missing, unknown, of another type, or no single value.
    """
    unknown = [name for name in fields if name not in spec.attribute_names]
    missing = [name for name in spec.attribute_names if name not in fields]
    if unknown or missing:
        found = "; ".join(
            part
            for part in (
                f"unknown {', '.join(unknown)}" if unknown else "",
                f"missing {', '.join(missing)}" if missing else "",
            )
            if part
        )
        raise KernelError(
            f"plugin {spec.name}: fields",
            found=found,
            expected=f"exactly {', '.join(spec.attribute_names) or 'none'}",
            remedy="Export the stage again with this version.",
        )
    values: dict[str, AttributeValue] = {}
    for attribute in spec.attributes:
        kind, given = fields[attribute.name]
        if kind != attribute.kind or len(given) != 1:
            raise KernelError(
                f"plugin {spec.name}: field {attribute.name}",
                found=f"{len(given)} value(s) of type {kind}",
                expected=f"one {attribute.kind}",
                remedy="Export the stage again with this version.",
            )
        values[attribute.name] = int(given[0]) if attribute.kind == "int" else float(given[0])
    return values

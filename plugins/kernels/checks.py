"""Refusals before a launch: dtypes, ranks and extents against an op's contract, targets, alignment.

Every refusal is a `KernelError` that names the op, the argument, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Mapping

from engram_trt.configs.errors import KernelError
from engram_trt.plugins.kernels.plan import TensorInfo
from engram_trt.plugins.spec import TYPE_VARIABLES, Operand, PluginSpec

Inputs = Mapping[str, TensorInfo | None]


def refuse(op: str, argument: str, *, found: str, expected: str, remedy: str) -> KernelError:
    """The error for one argument of one op."""
    return KernelError(f"{op}: {argument}", found=found, expected=expected, remedy=remedy)


def require(condition: bool, op: str, argument: str, *, found: str, expected: str, remedy: str) -> None:
    """Raise `KernelError` unless `condition` holds."""
    if not condition:
        raise refuse(op, argument, found=found, expected=expected, remedy=remedy)


def check_target(spec: PluginSpec, sm: int) -> None:
    """Raise `KernelError` for a compute capability that has no kernel."""
    names = ", ".join(f"sm_{known}" for known in spec.supported_sms)
    require(
        sm in spec.supported_sms,
        spec.name,
        "target",
        found=f"sm_{sm}",
        expected=f"one of {names}",
        remedy="Run on one of these GPUs, or use the CPU path.",
    )


def info(op: str, inputs: Inputs, name: str) -> TensorInfo:
    """A required tensor. Raises `KernelError` where it is absent."""
    found = inputs.get(name)
    if found is None:
        raise refuse(op, name, found="no tensor", expected="a tensor", remedy="Pass this input.")
    return found


def check_inputs(spec: PluginSpec, inputs: Inputs) -> None:
    """Check every tensor's presence, dtype, rank and extents against the contract.

    One symbolic extent, and one type variable, must mean the same in every tensor of a call.

    Raises:
        KernelError: naming the op, the argument, what was found and what was expected.
    """
    unknown = sorted(set(inputs) - set(spec.input_names))
    require(
        not unknown,
        spec.name,
        "inputs",
        found=f"{unknown}",
        expected=f"names among {list(spec.input_names)}",
        remedy="Drop the unknown inputs.",
    )
    extents: dict[str, tuple[int, str]] = {}
    types: dict[str, tuple[str, str]] = {}
    for operand in spec.inputs:
        if operand.optional and inputs.get(operand.name) is None:
            continue
        tensor = info(spec.name, inputs, operand.name)
        _check_dtype(spec.name, operand, tensor, types)
        _check_shape(spec.name, operand, tensor, extents)


def _check_dtype(op: str, operand: Operand, tensor: TensorInfo, types: dict[str, tuple[str, str]]) -> None:
    allowed = TYPE_VARIABLES.get(operand.dtype, (operand.dtype,))
    expected = " or ".join(allowed)
    if operand.dtype in types:
        first, source = types[operand.dtype]
        allowed, expected = (first,), f"{first}, as {source} has"
    require(
        tensor.dtype in allowed,
        op,
        f"{operand.name} dtype",
        found=tensor.dtype,
        expected=expected,
        remedy="Convert the tensor.",
    )
    if operand.dtype in TYPE_VARIABLES:
        types.setdefault(operand.dtype, (tensor.dtype, operand.name))


def _check_shape(op: str, operand: Operand, tensor: TensorInfo, extents: dict[str, tuple[int, str]]) -> None:
    wanted = operand.shape
    found = f"{list(tensor.shape)}"
    shape = tensor.shape
    require(
        len(shape) == len(wanted),
        op,
        f"{operand.name} shape",
        found=found,
        expected=f"{len(wanted)} axes {list(wanted)}",
        remedy="Reshape the tensor.",
    )
    for axis, (extent, symbol) in enumerate(zip(shape, wanted, strict=True)):
        if isinstance(symbol, int):
            known, why = symbol, "the contract"
        else:
            known, why = extents.setdefault(symbol, (extent, operand.name))
        require(
            extent == known,
            op,
            f"{operand.name} shape",
            found=found,
            expected=f"extent {known} on axis {axis} ({symbol}, from {why})",
            remedy="Pass tensors of one call together.",
        )


def check_attributes(spec: PluginSpec, attributes: Mapping[str, int | float]) -> None:
    """Raise `KernelError` unless exactly the contract's attributes are given."""
    require(
        set(attributes) == set(spec.attribute_names),
        spec.name,
        "attributes",
        found=f"{sorted(attributes)}",
        expected=f"{sorted(spec.attribute_names)}",
        remedy="Give every attribute of the contract.",
    )

"""Run a launch plan on torch tensors, through Triton's just-in-time compiler or its interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engram_trt.configs.errors import KernelError
from engram_trt.plugins.kernels.checks import Inputs, refuse, require
from engram_trt.plugins.kernels.plan import (
    BYTES_OF,
    INTERPRET,
    TRITON_NAME,
    Clear,
    Launch,
    LaunchPlan,
    Pointer,
    TensorInfo,
)
from engram_trt.plugins.kernels.planner import Planner
from engram_trt.plugins.kernels.registry import planner_of
from engram_trt.plugins.spec import AttributeValue

POINTER_ALIGNMENT = 16
INTERPRETER_SM = 90
"""Compute capability whose plan the interpreter runs unless told otherwise."""

_TORCH_OF_TRITON = {TRITON_NAME[name]: getattr(torch, name) for name in BYTES_OF}


def describe(tensor: Tensor | None) -> TensorInfo | None:
    """Shape and dtype of a tensor."""
    if tensor is None:
        return None
    return TensorInfo(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def compute_capability(device: torch.device) -> int:
    """10 * major + minor of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launch(
    op_type: str,
    tensors: Mapping[str, Tensor | None],
    attributes: Mapping[str, AttributeValue],
    outputs: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Run an op's kernels on CUDA tensors, on the current stream.

    Args:
        op_type: op name, e.g. "CacheWrite".
        tensors: inputs by contract name; None for an absent optional one. A non-contiguous input is copied, one
            that is updated in place is refused.
        attributes: every attribute of the contract.
        outputs: buffers to write instead of new ones, for tests that poison them.

    Returns:
        Output name -> tensor; an aliased output is the input's own tensor.

    Raises:
        KernelError: no kernel for the target, shapes or dtypes outside the contract, a misaligned or
            non-contiguous tensor, or tensors on different devices.
    """
    device = _common_device(op_type, tensors)
    if device.type != "cuda":
        raise refuse(op_type, "device", found=str(device), expected="cuda", remedy="Call the reference on the CPU.")
    with torch.cuda.device(device):
        return _run(op_type, tensors, attributes, outputs, compute_capability(device), interpret=False)


def launch_interpreted(
    op_type: str,
    tensors: Mapping[str, Tensor | None],
    attributes: Mapping[str, AttributeValue],
    outputs: Mapping[str, Tensor] | None = None,
    sm: int = INTERPRETER_SM,
) -> dict[str, Tensor]:
    """The same on CPU tensors under Triton's interpreter; TRITON_INTERPRET=1 must be set before any import."""
    _common_device(op_type, tensors)
    return _run(op_type, tensors, attributes, outputs, sm, interpret=True)


def execute(plan: LaunchPlan, tensors: Mapping[str, Tensor], device: torch.device, *, interpret: bool) -> None:
    """Run the steps of a plan.

    Args:
        plan: from a planner.
        tensors: every operand and output the plan's launches name.
        device: where they lie.
        interpret: whether Triton interprets instead of compiling.
    """
    named = dict(tensors)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    for buffer in plan.workspace:
        part = workspace[buffer.offset_bytes : buffer.offset_bytes + buffer.info.num_bytes]
        named[buffer.name] = part.view(_TORCH_OF_TRITON[TRITON_NAME[buffer.info.dtype]])
    for step in plan.steps:
        if isinstance(step, Clear):
            named[step.buffer].zero_()
        else:
            _launch_step(step, named, interpret)


def _launch_step(step: Launch, named: Mapping[str, Tensor], interpret: bool) -> None:
    arguments: dict[str, Any] = {}
    for (name, kind), argument in zip(step.variant.signature, step.arguments, strict=True):
        if isinstance(argument, Pointer):
            # A kernel may read raw words of a tensor whose dtype is another.
            arguments[name] = named[argument.tensor].reshape(-1).view(_TORCH_OF_TRITON[kind.removeprefix("*")])
        else:
            arguments[name] = argument.value
    constants = dict(step.variant.constants)
    if INTERPRET in constants:
        constants[INTERPRET] = interpret
    function = getattr(importlib.import_module(step.variant.module), step.variant.function)
    function[step.grid](**arguments, **constants, num_warps=step.variant.num_warps, num_stages=step.variant.num_stages)


def _common_device(op_type: str, tensors: Mapping[str, Tensor | None]) -> torch.device:
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        first = first or (name, tensor.device)
        require(
            tensor.device == first[1],
            op_type,
            f"{name} device",
            found=str(tensor.device),
            expected=f"{first[1]}, where {first[0]} lies",
            remedy="Move the tensors of one call to one device.",
        )
    if first is None:
        raise KernelError(op_type, found="no tensors", expected="inputs", remedy="Pass the op's inputs.")
    return first[1]


def _run(
    op_type: str,
    tensors: Mapping[str, Tensor | None],
    attributes: Mapping[str, AttributeValue],
    outputs: Mapping[str, Tensor] | None,
    sm: int,
    *,
    interpret: bool,
) -> dict[str, Tensor]:
    planner = planner_of(op_type)
    infos: Inputs = {name: describe(tensor) for name, tensor in tensors.items()}
    plan = planner.plan(infos, attributes, sm)
    named = {name: _usable(planner, name, tensor) for name, tensor in tensors.items() if tensor is not None}
    device = next(iter(named.values())).device
    results = _results(planner, infos, attributes, named, outputs or {}, device)
    named.update(results)
    for name, tensor in named.items():
        _check_alignment(planner, plan, name, tensor)
    execute(plan, named, device, interpret=interpret)
    return results


def _usable(planner: Planner, name: str, tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor
    require(
        name not in planner.spec.aliases.values(),
        planner.spec.name,
        f"{name} strides",
        found=str(tuple(tensor.stride())),
        expected="a contiguous buffer, which is updated in place",
        remedy="Pass the whole cache.",
    )
    return tensor.contiguous()


def _results(
    planner: Planner,
    infos: Inputs,
    attributes: Mapping[str, AttributeValue],
    named: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    results = {}
    for name, wanted in planner.outputs(infos, attributes).items():
        if name in planner.spec.aliases:
            results[name] = named[planner.spec.aliases[name]]
        elif name in given:
            found = describe(given[name])
            require(
                found == wanted,
                planner.spec.name,
                name,
                found=str(found),
                expected=str(wanted),
                remedy="Pass an output buffer of that shape and dtype.",
            )
            results[name] = given[name]
        else:
            dtype = _TORCH_OF_TRITON[TRITON_NAME[wanted.dtype]]
            results[name] = torch.empty(wanted.shape, dtype=dtype, device=device)
    return results


def _check_alignment(planner: Planner, plan: LaunchPlan, name: str, tensor: Tensor) -> None:
    aligned = any(
        argument == Pointer(name) and parameter not in step.variant.unaligned
        for step in plan.launches
        for (parameter, _), argument in zip(step.variant.signature, step.arguments, strict=True)
    )
    offset = tensor.data_ptr() % POINTER_ALIGNMENT
    require(
        not aligned or offset == 0,
        planner.spec.name,
        f"{name} address",
        found=f"{offset} bytes past a multiple of {POINTER_ALIGNMENT}",
        expected=f"a multiple of {POINTER_ALIGNMENT}, for {POINTER_ALIGNMENT}-byte loads",
        remedy="Copy the tensor into a buffer of its own.",
    )

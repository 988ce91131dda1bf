"""Which experts the kernels multiply with: dtypes, widths, scales."""

from __future__ import annotations

from engram_trt.plugins.kernels.checks import Inputs, info, require
from engram_trt.plugins.kernels.planner import Attributes
from engram_trt.plugins.moe_experts.grouped import MAX_EXPERTS, PACKED, STORED_UNIT
from engram_trt.plugins.moe_experts.spec import GROUP
from engram_trt.plugins.quantize_dequantize.launch import check_format


def check_experts(op: str, inputs: Inputs, attributes: Attributes) -> None:
    """Raise `KernelError` for experts that no kernel multiplies with."""
    x, w1 = info(op, inputs, "ffn_in"), info(op, inputs, "experts_w1")
    experts, inter, stored = w1.shape
    dim = x.shape[1]
    factor = 2 if w1.dtype == PACKED else 1
    require(
        w1.dtype in (PACKED, x.dtype),
        op,
        "experts_w1 dtype",
        found=w1.dtype,
        expected=f"int8 (packed), or ffn_in's {x.dtype}",
        remedy="Convert the experts to the stage's dtype.",
    )
    require(
        1 <= experts <= MAX_EXPERTS,
        op,
        "experts",
        found=f"{experts} experts",
        expected=f"1 <= experts <= {MAX_EXPERTS}",
        remedy="Bind fewer experts to a device.",
    )
    columns = info(op, inputs, "experts_w2").shape[2]
    require(
        stored * factor == dim and columns * factor == inter,
        op,
        "experts shape",
        found=f"{stored} and {columns} stored columns ({w1.dtype})",
        expected=f"{dim // factor} and {inter // factor}, for dim {dim} and inter {inter}",
        remedy="Pass experts of this model.",
    )
    require(
        dim % (STORED_UNIT * factor) == 0 and inter % (STORED_UNIT * factor) == 0,
        op,
        "experts shape",
        found=f"dim {dim}, inter {inter}",
        expected=f"multiples of {STORED_UNIT * factor}",
        remedy="No kernel covers other widths.",
    )
    format = int(attributes["activation_format"])
    if format != -1:
        check_format(op, "activation_format", format, dim)
        check_format(op, "activation_format", format, inter)
    _check_scales(op, inputs, {"w1": dim, "w2": inter, "w3": dim}, w1.dtype == PACKED)


def _check_scales(op: str, inputs: Inputs, widths: dict[str, int], packed: bool) -> None:
    for matrix, width in widths.items():
        name = f"experts_{matrix}_scale"
        scale = inputs.get(name)
        require(
            (scale is not None) == packed,
            op,
            name,
            found="absent" if scale is None else "present",
            expected="scales with packed weights and only with them",
            remedy="Pass the scales that belong to the weights.",
        )
        require(
            scale is None or scale.shape[2] * GROUP == width,
            op,
            f"{name} shape",
            found=str(scale),
            expected=f"{width // GROUP} groups",
            remedy="Pass one scale per 32 inputs.",
        )

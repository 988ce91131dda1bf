"""Launch plan of `QuantizeDequantize`."""

from __future__ import annotations

from engram_trt.plugins.kernels.checks import Inputs, info, require
from engram_trt.plugins.kernels.plan import (
    INTERPRET,
    TRITON_NAME,
    LaunchPlan,
    TensorInfo,
    Variant,
    ceil_div,
    make_launch,
)
from engram_trt.plugins.kernels.planner import Attributes, Planner
from engram_trt.plugins.quantize_dequantize.spec import GROUP_OF_FORMAT, SPEC

BLOCK_ELEMENTS = 4096
DTYPES = ("float32", "bfloat16")


def variant(dtype: str, format: int) -> Variant:
    """The kernel for one dtype and format."""
    kind = f"*{TRITON_NAME[dtype]}"
    return Variant(
        op=SPEC.name,
        module="engram_trt.plugins.quantize_dequantize.kernel",
        function="quantize_dequantize_kernel",
        signature=(("x", kind), ("y", kind), ("num_groups", "i64")),
        constants=(
            ("FORMAT", format),
            ("GROUP", GROUP_OF_FORMAT[format]),
            ("BLOCK_GROUPS", BLOCK_ELEMENTS // GROUP_OF_FORMAT[format]),
            (INTERPRET, False),
        ),
    )


def variants(sm: int) -> tuple[Variant, ...]:
    """Every variant a plan can hold."""
    return tuple(variant(dtype, format) for dtype in DTYPES for format in GROUP_OF_FORMAT)


def outputs(inputs: Inputs, attributes: Attributes) -> dict[str, TensorInfo]:
    """As the input."""
    return {"y": info(SPEC.name, inputs, "x")}


def check_format(op: str, argument: str, format: int, width: int) -> None:
    """Raise `KernelError` unless rows of `width` elements split into the format's groups."""
    require(
        format in GROUP_OF_FORMAT,
        op,
        argument,
        found=str(format),
        expected=f"one of {sorted(GROUP_OF_FORMAT)}",
        remedy="Pass a format of the contract.",
    )
    group = GROUP_OF_FORMAT[format]
    require(
        width % group == 0,
        op,
        f"width under {argument} {format}",
        found=str(width),
        expected=f"a multiple of {group}",
        remedy="Quantise whole groups.",
    )


def plan_steps(inputs: Inputs, attributes: Attributes, sm: int) -> LaunchPlan:
    """Groups are independent: the tensor is one flat list of them."""
    x = info(SPEC.name, inputs, "x")
    format = int(attributes["format"])
    check_format(SPEC.name, "format", format, x.shape[-1])
    if x.num_elements == 0:
        return LaunchPlan(op=SPEC.name)
    num_groups = x.num_elements // GROUP_OF_FORMAT[format]
    kernel = variant(x.dtype, format)
    blocks = ceil_div(num_groups, BLOCK_ELEMENTS // GROUP_OF_FORMAT[format])
    step = make_launch(kernel, (blocks, 1, 1), {"x": "x", "y": "y", "num_groups": num_groups})
    return LaunchPlan(op=SPEC.name, steps=(step,))


PLANNER = Planner(spec=SPEC, outputs=outputs, plan_steps=plan_steps, variants=variants)

"""From a torch op to its kernels; Triton is imported only when a CUDA tensor arrives."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engram_trt.plugins.spec import AttributeValue, PluginSpec


def launch_on_cuda(
    spec: PluginSpec, tensors: Sequence[Tensor | None], attributes: Sequence[AttributeValue]
) -> tuple[Tensor, ...]:
    """Run an op's kernels.

    Args:
        spec: the op's contract.
        tensors: inputs in the contract's order; trailing optional ones may be left out.
        attributes: in the contract's order.

    Returns:
        The outputs present, in the contract's order.

    Raises:
        KernelError: no kernel for the GPU, or tensors outside the contract.
    """
    from engram_trt.plugins.kernels.launcher import launch

    padded = [*tensors, *[None] * (len(spec.inputs) - len(tensors))]
    results = launch(
        spec.name,
        dict(zip(spec.input_names, padded, strict=True)),
        dict(zip(spec.attribute_names, attributes, strict=True)),
    )
    return tuple(results[name] for name in spec.output_names if name in results)

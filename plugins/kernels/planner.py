"""What an op's `launch.py` offers: outputs, the launch plan, and every variant a plan can choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engram_trt.plugins.kernels.checks import Inputs, check_attributes, check_inputs, check_target
from engram_trt.plugins.kernels.plan import LaunchPlan, TensorInfo, Variant
from engram_trt.plugins.spec import AttributeValue, PluginSpec

Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Launch planning of one op.

    Args:
        spec: the op's contract.
        outputs: shapes and dtypes of the outputs, in the contract's order; an absent optional one is left out.
        plan_steps: the plan for checked inputs, attributes and a compute capability.
        variants: every variant any plan for that compute capability can hold.
    """

    spec: PluginSpec
    outputs: Callable[[Inputs, Attributes], Mapping[str, TensorInfo]]
    plan_steps: Callable[[Inputs, Attributes, int], LaunchPlan]
    variants: Callable[[int], tuple[Variant, ...]]

    def plan(self, inputs: Inputs, attributes: Attributes, sm: int) -> LaunchPlan:
        """Check target, attributes and inputs, then plan.

        Args:
            inputs: shape and dtype of each input by its contract name; None for an absent optional one.
            attributes: every attribute of the contract.
            sm: compute capability, e.g. 90.

        Raises:
            KernelError: no kernel for the target, or tensors outside the contract.
        """
        check_target(self.spec, sm)
        check_attributes(self.spec, attributes)
        check_inputs(self.spec, inputs)
        return self.plan_steps(inputs, attributes, sm)

"""Limits of the golden README, and how far two tensors are apart.

A limit is never tuned to what is measured: each of these is a line of the README's section "Tolerances".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["exact", "close", "rms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What is accepted.

    Args:
        kind: `exact` counts entries that differ (NaN equals NaN); `close` takes |difference| <= atol + rtol *
            |reference| for every entry; `rms` takes a root mean square of the differences relative to that of
            the reference.
        rtol, atol: of `close`.
        rms: of `rms`.
    """

    kind: Kind
    rtol: float = 0.0
    atol: float = 0.0
    rms: float = 0.0

    def __str__(self) -> str:
        """For a table; `r` marks the relative part."""
        if self.kind == "exact":
            return "exact"
        if self.kind == "rms":
            return f"rms {self.rms:g}"
        return "+".join([f"{self.atol:g}"] * (self.atol > 0) + [f"{self.rtol:g}r"] * (self.rtol > 0))


EXACT = Limit(kind="exact")
OPS_F32 = Limit(kind="close", rtol=1e-5, atol=2e-6)
OPS_BF16 = Limit(kind="close", rtol=1.6e-2, atol=1e-3)
LINEAR_BF16 = Limit(kind="close", rtol=0.8e-2, atol=2e-6)
"""One bfloat16 unit in the last place; the absolute part is the float32 sum's."""
ROTARY = Limit(kind="close", atol=1e-6)
STREAMS = Limit(kind="close", atol=2e-3)
MIXES = Limit(kind="close", atol=1e-4)
LOGITS = Limit(kind="close", atol=2e-3)
BLOCKS = {
    "f32_q": Limit(kind="rms", rms=5e-3),
    "bf16": Limit(kind="rms", rms=1e-1),
    "bf16_q": Limit(kind="rms", rms=1e-1),
}
"""Numeric mode -> limit of a block's output, fed with the stored streams."""
END_TO_END = Limit(kind="rms", rms=0.25)
"""Logits of a quantised model that makes no discrete choice."""
VOID_MARGINS = {"f32": 0.0, "f32_q": 1e-4, "bf16": 1e-2, "bf16_q": 1e-2}
"""Numeric mode -> margin of a choice below which rounding alone may turn it over."""


def op_limit(dtype: torch.dtype) -> Limit:
    """Limit of an op's output by the dtype it is stored in."""
    return OPS_BF16 if dtype == torch.bfloat16 else OPS_F32 if dtype.is_floating_point else EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far apart two tensors are.

    Args:
        error: differing entries, largest |difference|, or relative RMS, by the limit's kind; infinity for another
            shape or another pattern of NaN and infinity.
        ok: within the limit.
        note: what a reader must know besides the number.
    """

    error: float
    ok: bool
    note: str = ""


def distance(got: Tensor, want: Tensor, limit: Limit) -> Distance:
    """Compare `got` with the reference `want`.

    Args:
        got, want: the same shape; any dtypes, compared as float64 or int64.
        limit: what is accepted.
    """
    if got.shape != want.shape:
        return Distance(error=math.inf, ok=False, note=f"shape {list(got.shape)}, expected {list(want.shape)}")
    if not want.numel():
        return Distance(error=0.0, ok=True)
    if not want.is_floating_point() and not got.is_floating_point():
        differing = int((got.to(torch.int64) != want.to(torch.int64)).sum())
        return Distance(error=float(differing), ok=differing == 0)
    left, right = got.to(torch.float64), want.to(torch.float64)
    same = (left == right) | (torch.isnan(left) & torch.isnan(right))
    if limit.kind == "exact":
        differing = int((~same).sum())
        return Distance(error=float(differing), ok=differing == 0)
    finite = torch.isfinite(left) & torch.isfinite(right)
    strange = int((~finite & ~same).sum())
    if strange:
        return Distance(error=math.inf, ok=False, note=f"{strange} entries not finite on one side only")
    gap, size = (left - right)[finite].abs(), right[finite].abs()
    if limit.kind == "rms":
        scale = float(size.square().sum().sqrt())
        norm = float(gap.square().sum().sqrt())
        error = norm / scale if scale > 0 else math.inf if norm > 0 else 0.0
        return Distance(error=error, ok=error <= limit.rms)
    error = float(gap.max()) if gap.numel() else 0.0
    return Distance(error=error, ok=bool((gap <= limit.atol + limit.rtol * size).all()))

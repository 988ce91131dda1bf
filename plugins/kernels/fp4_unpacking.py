"""Packed FP4 codes to bfloat16, two codes a register: decoding them one by one costs more than reading the weights.

A code's exponent and mantissa bits, put where bfloat16 keeps its own, read as 2^-126 times the code's value
(subnormal codes included). One product with a power of two then gives the weight, exactly, but 2^-32 times too
small: the missing factor would not fit into bfloat16, so the finished sums are multiplied by it.
"""

from __future__ import annotations

import triton.language as tl

SUM_FACTOR = tl.constexpr(4294967296.0)
"""What sums of products with unpacked weights are multiplied by: 2^32."""

LARGEST_EXPONENT = tl.constexpr(160)
"""Largest E8M0 byte whose factor fits: a scale of 2^33. A larger one, which no trained weight has, gives NaN."""

UNPACK_FP4_ASM = tl.constexpr(
    """
    {
    .reg .b32 code, sign, zero;
    mov.b32 zero, 0x80008000;
    shl.b32 code, $4, 6;
    and.b32 code, code, 0x01C001C0;
    shl.b32 sign, $4, 12;
    and.b32 sign, sign, 0x80008000;
    or.b32 code, code, sign;
    fma.rn.bf16x2 $0, code, $5, zero;
    shr.b32 code, $4, 2;
    and.b32 code, code, 0x01C001C0;
    shl.b32 sign, $4, 4;
    and.b32 sign, sign, 0x80008000;
    or.b32 code, code, sign;
    fma.rn.bf16x2 $1, code, $6, zero;
    shl.b32 code, $4, 2;
    and.b32 code, code, 0x01C001C0;
    shl.b32 sign, $4, 8;
    and.b32 sign, sign, 0x80008000;
    or.b32 code, code, sign;
    fma.rn.bf16x2 $2, code, $5, zero;
    shr.b32 code, $4, 6;
    and.b32 code, code, 0x01C001C0;
    and.b32 sign, $4, 0x80008000;
    or.b32 code, code, sign;
    fma.rn.bf16x2 $3, code, $6, zero;
    }
    """
)
"""Four bytes $4 and the factors $5, $6 of their columns -> even columns $0, $1 and odd columns $2, $3.

Bytes come out in the order 0, 2, 1, 3. Adding -0 makes the fused product a plain one on every target. Outputs are
written while inputs are still read, so their constraints are early clobbers.
"""

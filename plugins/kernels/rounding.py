"""Rounding and decoding of the small float formats inside kernels, by integer arithmetic.

The same helpers run compiled and under the interpreter, whose own casts round wrongly. All round to nearest, ties
to even, and are exact (spec 6.3).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to_bfloat16(x):
    """Nearest bfloat16 value of float32 x, as float32; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def round_to_dtype(x, TARGET: tl.constexpr, INTERPRET: tl.constexpr):
    """x as float32, rounded to the values TARGET can hold.

    Compiled code takes the hardware's cast, which rounds as the helper does.
    """
    if tl.float32 == TARGET:
        rounded = x
    elif INTERPRET:
        rounded = round_to_bfloat16(x)
    else:
        rounded = x.to(tl.bfloat16).to(tl.float32)
    return rounded


@triton.jit
def cast_to_dtype(x, TARGET: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 x as TARGET, rounded to nearest even."""
    if tl.float32 == TARGET:
        result = x
    elif INTERPRET:
        high = round_to_bfloat16(x).to(tl.int32, bitcast=True) >> 16
        result = high.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(tl.bfloat16)
    return result


@triton.jit
def dot_operand(x, INTERPRET: tl.constexpr):
    """x as an operand of tl.dot; the interpreter multiplies bfloat16 as integers, so it gets float32."""
    return x.to(tl.float32) if INTERPRET else x


@triton.jit
def round_to_e4m3(x):
    """Nearest E4M3 value of float32 x in [-448, 448], as float32."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
    # Below 2^-6 the values are multiples of 2^-9; adding 1.5 * 2^23 of them leaves the rounding to the adder.
    magnitude = tl.abs(x)
    subnormal = (magnitude + 24576.0) - 24576.0
    subnormal = tl.where(x < 0, -subnormal, subnormal)
    return tl.where(magnitude < 0.015625, subnormal, normal)


@triton.jit
def round_to_e2m1(x):
    """Nearest E2M1 value of float32 x in [-6, 6], as float32."""
    magnitude = tl.abs(x)
    # 1.5 * 2^23 times the spacing of the values: 0.5 below 2, 1 below 4, 2 above.
    anchor = tl.where(magnitude < 2.0, 6291456.0, tl.where(magnitude < 4.0, 12582912.0, 25165824.0))
    rounded = (magnitude + anchor) - anchor
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def exponent_at_least(x):
    """Biased exponent e of the smallest 2^(e-127) >= x, for positive normal float32 x."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFFFF) >> 23


@triton.jit
def power_of_two(biased_exponent):
    """2^(biased_exponent-127) as float32, for 1..254."""
    return (biased_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_e8m0(byte):
    """Value of an E8M0 byte given as an integer 0..255: 2^(byte-127), NaN for 255."""
    bits = tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_e4m3(byte):
    """Value of an E4M3 byte given as an integer 0..255, as float32; 0x7F and 0xFF are NaN."""
    # The bits put where float32 keeps sign, exponent and mantissa read as 2^-120 times the value.
    bits = ((byte & 0x7F) << 20) | ((byte & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def decode_e2m1(nibble):
    """Value of an FP4 code given as an integer whose low four bits are the code, as float32."""
    bits = ((nibble & 7) << 22) | ((nibble & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def quantize_dequantize_groups(x, FORMAT: tl.constexpr):
    """Round trip of groups through a format of `QuantizeDequantize`.

    x is [groups, group] float32; the result too. NaN in a group stays where it is.
    """
    amax = tl.max(tl.abs(x), axis=1)
    if FORMAT == 0:
        exponent = exponent_at_least(tl.maximum(amax, 1e-4) * 0.002232142857142857)
    elif FORMAT == 1:
        exponent = exponent_at_least(tl.maximum(amax, 7.052966104933725e-38) * 0.16666666666666666)
    if FORMAT == 2:
        sixth = tl.div_rn(tl.maximum(amax, 0.01171875), tl.full(amax.shape, 6.0, tl.float32))
        scale = round_to_e4m3(tl.minimum(sixth, 448.0))
        ratio = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    else:
        scale = power_of_two(exponent)
        ratio = x * power_of_two(254 - exponent)[:, None]
    if FORMAT == 0:
        rounded = round_to_e4m3(tl.minimum(tl.maximum(ratio, -448.0), 448.0))
    else:
        rounded = round_to_e2m1(tl.minimum(tl.maximum(ratio, -6.0), 6.0))
    return tl.where(x == x, rounded * scale[:, None], x)

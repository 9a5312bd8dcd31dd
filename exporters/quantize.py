"""Weights in fewer bits: how numbers are rounded, without any graph around them.

A weight is a matrix `(N, K)` as PyTorch has it: one row for each output, or for each token of an embedding.
"""

from typing import Literal, NamedTuple

import numpy as np

from runtime.backend import Array

Precision = Literal["fp32", "fp16", "int8", "int4"]
LOWER: tuple[Precision, ...] = ("fp16", "int8", "int4")
INT8 = 127
"""Largest integer of int8; -128 is left out, so that negating a weight negates its rounding."""
BLOCKS = (32, 16)
"""Weights that share a scale in int4: the first of these that divides a row. 16 is the least that operators take.

Scales are kept in float16: half a bit a weight for blocks of 32.
"""
LARGEST_HALF = float(np.finfo(np.float16).max)


class Quantized(NamedTuple):
    """Integers, and what each is to be multiplied by."""

    integers: Array
    """int8 `(N, K)`; int4 as uint8 `(N, K / block, block / 2)`: 8 added, two in a byte, the first in the low half."""
    scales: Array
    """float32: `(N,)` for int8; `(N, K / block)` for int4, numbers that float16 has, too."""


def rows_int8(weight: Array) -> Quantized:
    """int8 with one scale a row, symmetric: the largest of a row becomes 127."""
    scales = _divisors(np.abs(weight).max(1) / np.float32(INT8))  # (N,)
    return Quantized(np.rint(weight / scales[:, None]).astype(np.int8), scales)


def block_of(width: int) -> int | None:
    """How many weights of a row of `width` share a scale in int4; None where no block fits."""
    return next((block for block in BLOCKS if width % block == 0), None)


def blocks_int4(weight: Array, block: int) -> Quantized:
    """int4 with one scale for `block` weights: the one farthest from 0, whatever its sign, becomes -8."""
    parts = weight.reshape(len(weight), -1, block)  # (N, K / block, block)
    farthest = np.take_along_axis(parts, np.abs(parts).argmax(2)[..., None], 2)[..., 0]
    scales = _divisors((farthest / np.float32(-8)).astype(np.float16))  # (N, K / block)
    shifted = (np.clip(np.rint(parts / scales[..., None]), -8, 7) + 8).astype(np.uint8)
    return Quantized(shifted[..., ::2] | shifted[..., 1::2] << 4, scales)


def fits_half(weight: Array) -> bool:
    """Whether float16 has a finite number for each weight."""
    return bool(np.abs(weight).max(initial=0.0) <= LARGEST_HALF)


def rounded(weight: Array, precision: Precision) -> Array:
    """The float32 numbers `(N, K)` that `weight` stands for in `precision`; those of fp32 are itself.

    Infinite where float16 has no such number. A row that int4 cannot cut into blocks is left as it is.
    """
    if precision == "fp16":
        with np.errstate(over="ignore"):
            return weight.astype(np.float16).astype(np.float32)
    if precision == "int8":
        integers, scales = rows_int8(weight)
        return integers * scales[:, None]
    if precision == "int4" and (block := block_of(weight.shape[1])):
        packed, scales = blocks_int4(weight, block)
        integers = np.stack([packed & 15, packed >> 4], -1).reshape(*scales.shape, block).astype(np.float32) - 8
        whole: Array = (integers * scales[..., None]).reshape(weight.shape)
        return whole
    return weight


def _divisors(scales: Array) -> Array:
    """`scales` in float32 with 1 for 0: what is nothing but zeros stays so."""
    return np.where(scales == 0, 1, scales).astype(np.float32)

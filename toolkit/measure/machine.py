"""What the machine has and what a process uses of it."""

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from runtime.bundle import Passport

PROBE = 2**28
"""Bytes that are read to measure the bandwidth: more than any cache holds."""
BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}
"""Of one weight. Scales are left out, so that a share of the bandwidth is rather too small than too large."""


def peak_memory() -> int | None:
    """Most bytes that this process has held at once, None where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text("utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """Let `peak_memory` begin anew, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")


def read_bandwidth(threads: int, rounds: int = 5) -> float:
    """Bytes a second that `threads` threads read from memory together, the best of some rounds."""
    parts = [np.ones(PROBE // 4 // threads, np.float32) for _ in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - began)
    return sum(part.nbytes for part in parts) / best


def step_bytes(passport: Passport) -> float | None:
    """Bytes of weights that one step reads; None for a precision whose weights we cannot count.

    A decoder layer multiplies with six matrices of `E x E` (the keys and values of the source are in the cache) and two
    of `E x F`, the output projection with one of `E x V`. Of the embedding a step reads a row, biases are small.
    """
    bits = BITS.get(passport.precision)
    if bits is None:
        return None
    dims, ffn = passport.dims, int(passport.model["decoder_ffn_dim"])
    weights: int = dims.layers * (6 * dims.width**2 + 2 * dims.width * ffn) + dims.width * dims.vocab_size
    return weights * bits / 8

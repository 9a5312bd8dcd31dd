"""What training minimises, and the pace at which it walks."""

import math

import torch.nn.functional as F
from torch import Tensor

from .data import IGNORED


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy over the positions that are not padding, in nats (section 5.4 for the smoothing).

    Args:
        logits: `(B, T, V)`.
        labels: `(B, T)`; `IGNORED` on padding, which counts neither in the sum nor in the divisor.
        label_smoothing: share of the probability that is spread over the whole vocabulary.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, label_smoothing=label_smoothing
    )


def inverse_square_root(step: int, peak: float, warmup_steps: int) -> float:
    """Learning rate at `step` (1 is the first): linear to `peak` at `warmup_steps`, then falling as 1/sqrt(step).

    Section 5.3's formula is this one with `peak = (d_model * warmup_steps) ** -0.5`.
    """
    return peak * min(step / warmup_steps, math.sqrt(warmup_steps / step))

"""Cost in floating-point operations, counted while the model runs."""

from collections.abc import Callable
from functools import partial

import torch
from models_support import tiny
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.transformer import Transformer

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


@torch.no_grad()
def operations(side: str, run: Callable[[], object]) -> dict[str, int]:
    """Operations of `run` on one side in the attention proper, the attention's projections and the feed-forward."""
    # The fused kernels are not counted on every device.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    totals = dict.fromkeys(("attention", "projections", "feed_forward"), 0)
    for name, counts in counter.get_flop_counts().items():
        last = name.rpartition(".")[2]
        kind = "attention" if last == "dot_product" else "projections" if last in PROJECTIONS else last
        if kind in totals and side in name.lower():
            totals[kind] += sum(counts.values())
    return totals


def ids(length: int) -> Tensor:
    return torch.full((1, length), 5)


def encoding(length: int, width: int = 16) -> dict[str, int]:
    model = Transformer(tiny(d_model=width, encoder_ffn_dim=2 * width, max_positions=64))
    return operations("encoder", lambda: model.encode(ids(length), torch.ones(1, length)))


def test_projections_cost_tokens_times_width_squared_and_attention_tokens_squared_times_width() -> None:
    base = encoding(10)
    assert base["projections"] == 2 * 4 * 2 * 10 * 16 * 16  # layers, projections, multiply and add, n E^2
    assert base["attention"] == 2 * 2 * 2 * 10 * 10 * 16  # layers, scores and sum, multiply and add, n^2 E
    for longer, wider in ((2, 1), (3, 1), (1, 2), (2, 2)):
        cost = encoding(10 * longer, 16 * wider)
        assert cost["projections"] == base["projections"] * longer * wider**2
        assert cost["feed_forward"] == base["feed_forward"] * longer * wider**2
        assert cost["attention"] == base["attention"] * longer**2 * wider


def test_a_cached_step_pays_for_one_token_and_an_uncached_one_for_all_of_them() -> None:
    model = Transformer(tiny(max_positions=64))
    source, mask = ids(3), torch.ones(1, 3)
    memory = model.encode(source, mask)
    cached, uncached = {}, {}
    for t in (10, 20, 30):
        _, cache = model.prefill(ids(t - 1), memory, mask)
        cached[t] = operations("decoder", partial(model.step, ids(1), mask, cache))
        uncached[t] = operations("decoder", partial(model, source, mask, ids(t)))
    per_key = 2 * 2 * 2 * 8  # layers, scores and sum, multiply and add, width
    for t in (10, 20, 30):
        assert cached[t]["attention"] == per_key * (t + 3)
        assert uncached[t]["attention"] == per_key * t * (t + 3)
        # The step projects neither the source nor an earlier token.
        assert cached[t]["projections"] == 2 * 6 * 2 * 8 * 8
        assert uncached[t]["projections"] == 2 * 2 * 8 * 8 * (6 * t + 2 * 3)
        assert cached[t]["feed_forward"] == 2 * 2 * 2 * 8 * 16
        assert uncached[t]["feed_forward"] == t * cached[t]["feed_forward"]

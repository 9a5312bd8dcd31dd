"""Tiny models, batches and observers for the tests of `models`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.data import Batch, Pair, collate
from models.transformer import Transformer

TINY = ModelConfig(
    vocab_size=23,
    d_model=8,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
    max_positions=16,
)
WALK_THROUGH = msgspec.structs.replace(TINY, vocab_size=100)

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre-norm": {"norm": "pre"},
    "pre-norm without a final norm": {"norm": "pre", "final_norm": False},
    "post-norm with a final norm": {"final_norm": True},
    "norm of embeddings, as BART": {"embedding_norm": True, "positions": "learned", "activation_function": "gelu"},
    "gelu": {"activation_function": "gelu"},
    "learned positions": {"positions": "learned"},
    "as Marian": {"activation_function": "silu", "positions": "sinusoidal-halves", "output_bias": True},
    "untied": {"share_embeddings": False, "tie_output": False, "output_bias": True},
    "tied output, own source embedding": {"share_embeddings": False},
    "own source vocabulary": {"share_embeddings": False, "source_vocab_size": 11},
    "unscaled embedding": {"scale_embedding": False},
    "unequal sides": {
        "norm": "pre",
        "encoder_layers": 1,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 12,
        "decoder_ffn_dim": 20,
    },
}
all_variants = pytest.mark.parametrize(
    "changes", [pytest.param(changes, id=name) for name, changes in VARIANTS.items()]
)


def tiny(**changes: Any) -> ModelConfig:
    """`TINY` with `changes`."""
    return msgspec.structs.replace(TINY, **changes)


def random_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """A float64 model in evaluation mode, none of whose weights, biases and norms is neutral."""
    model = Transformer(config).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.add_(1)
    return model


def random_pairs(config: ModelConfig, lengths: Iterable[tuple[int, int]], seed: int = 0) -> list[Pair]:
    """Pairs of the given source and target lengths, without special ids but for the EOS at either end."""
    generator = torch.Generator().manual_seed(seed)

    def row(length: int, vocabulary: int) -> list[int]:
        ids: list[int] = torch.randint(4, vocabulary, (length - 1,), generator=generator).tolist()
        return [*ids, config.eos_token_id]

    return [Pair(row(source, config.encoder_vocab_size), row(target, config.vocab_size)) for source, target in lengths]


def random_batch(config: ModelConfig, lengths: Iterable[tuple[int, int]] = ((5, 4), (3, 6), (4, 2))) -> Batch:
    """A batch with padding on both sides."""
    return collate(random_pairs(config, lengths), config)


@contextmanager
def outputs_of(modules: Iterable[nn.Module]) -> Iterator[list[list[Tensor]]]:
    """What each of `modules` gives, call after call; of a tuple, its first element."""
    outputs: list[list[Tensor]] = []
    handles = []
    for module in modules:
        calls: list[Tensor] = []
        outputs.append(calls)

        def remember(_: nn.Module, __: object, output: Any, calls: list[Tensor] = calls) -> None:
            calls.append(output[0] if isinstance(output, tuple) else output)

        handles.append(module.register_forward_hook(remember))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def assert_same(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    """Equal up to float64 rounding."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

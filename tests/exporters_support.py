"""Random models of every variant, as checkpoints and as bundles; exports are dear, so that each is made once a run."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import torch
from runtime_support import TINY, VOCABULARY
from torch import nn

from exporters.export import export_bundle
from exporters.golden import Examiner
from exporters.source import SENTENCES
from models.checkpoint import save_checkpoint
from models.config import ModelConfig
from models.transformer import Transformer
from runtime.backend import Array
from runtime.bundle import Bundle
from runtime.contract import GRAPH_FILES
from runtime.parity import Report
from runtime.tokenizer import TOKENIZER_FILES, open_tokenizer

POSITIONS = 20
SMALL: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_positions": POSITIONS,
}


class Variant(NamedTuple):
    """A model, the opset that it is exported at, and a seed with which its outputs vary."""

    config: ModelConfig
    opset: int
    seed: int


VARIANTS = {
    "pre-norm, all shared": Variant(
        ModelConfig(
            vocab_size=VOCABULARY,
            norm="pre",
            positions="sinusoidal",
            activation_function="relu",
            **{**SMALL, "encoder_layers": 2},
        ),
        23,
        2,
    ),
    "post-norm, nothing shared": Variant(
        ModelConfig(
            vocab_size=61,
            source_vocab_size=50,
            norm="post",
            final_norm=True,
            embedding_norm=True,
            positions="learned",
            activation_function="gelu",
            share_embeddings=False,
            tie_output=False,
            output_bias=True,
            scale_embedding=False,
            **{
                **SMALL,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 24,
                "decoder_ffn_dim": 40,
            },
        ),
        23,
        0,
    ),
    "as Marian, opset 18": Variant(
        ModelConfig(
            vocab_size=VOCABULARY,
            norm="post",
            positions="sinusoidal-halves",
            activation_function="silu",
            output_bias=True,
            **SMALL,
        ),
        18,
        0,
    ),
}
"""Between them every setting takes every value."""


class Export(NamedTuple):
    """A model, its checkpoint and the bundle that came of it."""

    model: Transformer
    opset: int
    checkpoint: Path
    bundle: Bundle
    report: Report
    stages: list[str]

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def graph(self, verb: str) -> onnx.ModelProto:
        """The graph of `verb` as it stands in the bundle, weights left outside."""
        return onnx.load(self.bundle.path(verb), load_external_data=False)


def random_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """Neither weights nor biases nor norms are neutral; a strong feed-forward part keeps it from repeating a token."""
    model = Transformer(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = 0.05 if parameter.ndim == 1 else 0.9 if ".fc" in name else 0.15 if ".v_proj" in name else 0.3
            parameter.copy_(gain * torch.randn(parameter.shape, generator=generator))
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.add_(1)
    return model


def write_checkpoint(model: Transformer, folder: Path) -> Path:
    """`model` with the tokenizer of the bundle in tests/data and sentences for the exam."""
    save_checkpoint(model, folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(TINY / name, folder / name)
    (folder / SENTENCES).write_text("a b c d\n\nf e d c b a\n", "utf-8")
    return folder


def examiner(model: Transformer, seed: int) -> Examiner:
    """Writes exams about `model`, with the tokenizer of the bundle in tests/data."""
    return Examiner(model, seed, open_tokenizer(TINY))


def make_export(name: str, folder: Path) -> Export:
    """Export the variant `name` into `folder`."""
    config, opset, seed = VARIANTS[name]
    model = random_model(config, seed)
    checkpoint = write_checkpoint(model, folder / "checkpoint")
    stages: list[str] = []
    report = export_bundle(checkpoint, folder / "bundle", opset=opset, say=stages.append)
    return Export(model, opset, checkpoint, Bundle(folder / "bundle"), report, stages)


def recorded_graphs(
    export: Export, change: Callable[[str, ir.Model], None] = lambda *_: None
) -> Callable[..., Iterator[tuple[str, ir.Model]]]:
    """What takes the place of `export_graphs` and costs nothing: the graphs that were exported, after `change`."""

    def export_graphs(_: Transformer, __: int, say: Callable[[str], None]) -> Iterator[tuple[str, ir.Model]]:
        for verb, name in GRAPH_FILES.items():
            graph = ir.load(export.bundle.folder / name)
            say(f"loading {verb}")
            change(verb, graph)
            yield verb, graph

    return export_graphs


def random_inputs(config: ModelConfig, seed: int = 0, batch: int = 3) -> tuple[Array, Array, Array]:
    """Source ids and mask with padding, and target ids that begin with the start token."""
    random = np.random.default_rng(seed)
    source = random.integers(4, config.encoder_vocab_size, (batch, 7))
    mask = (np.arange(7) < np.array([7, 4, 1, 5, 6])[:batch, None]).astype(np.int64)
    target = random.integers(4, config.vocab_size, (batch, 5))
    target[:, 0] = config.decoder_start_token_id
    return source, mask, target

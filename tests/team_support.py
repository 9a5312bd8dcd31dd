"""A team's own code around `torch.nn.Transformer`, small and random, with the description that an import needs."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from importers_support import randomise, write_tokenizer
from torch import Tensor, nn

from models.layers import sinusoids


class Table(nn.Module):
    """Positions as tutorials have them: a table with an axis for the batch."""

    def __init__(self, table: Tensor, *, learned: bool) -> None:
        super().__init__()
        if learned:
            self.table = nn.Parameter(table)
        else:
            self.register_buffer("table", table[:, None])

    def forward(self, length: int) -> Tensor:
        table: Tensor = self.table
        return table.reshape(-1, table.shape[-1])[:length]


class TeamModel(nn.Module):
    """`torch.nn.Transformer` with embeddings, positions and a head around it."""

    def __init__(self, core: nn.Transformer, sizes: tuple[int, int, int], *, scale: bool, head_bias: bool) -> None:
        super().__init__()
        source, target, width = sizes
        self.core = core
        self.scale = math.sqrt(width) if scale else 1.0
        self.source = nn.Embedding(source, width)
        self.target = nn.Embedding(target, width)
        self.head = nn.Linear(width, target, bias=head_bias)
        self.source_positions: nn.Module
        self.target_positions: nn.Module

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Memory and logits."""
        hidden = ~mask.bool()
        sources = self.source(source) * self.scale + self.source_positions(source.shape[1])
        targets = self.target(target) * self.scale + self.target_positions(target.shape[1])
        future = torch.ones(target.shape[1], target.shape[1]).triu(1).bool()
        memory = self.core.encoder(sources, src_key_padding_mask=hidden)
        states = self.core.decoder(targets, memory, tgt_mask=future, memory_key_padding_mask=hidden)
        return memory, self.head(states)


def team_model(
    *,
    source_vocab: int = 41,
    width: int = 24,
    encoder_layers: int = 2,
    decoder_layers: int = 2,
    ffn: int = 40,
    activation: str = "relu",
    norm_first: bool = False,
    bias: bool = True,
    eps: float = 1e-5,
    scale: bool = True,
    shared: bool = False,
    tied: bool = False,
    head_bias: bool = True,
    final_norms: bool = True,
    positions: str = "sinusoidal",
) -> TeamModel:
    """A random one, for a target vocabulary of 47."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        core = nn.Transformer(
            width,
            nhead=2,
            num_encoder_layers=encoder_layers,
            num_decoder_layers=decoder_layers,
            dim_feedforward=ffn,
            dropout=0.0,
            activation=activation,
            layer_norm_eps=eps,
            batch_first=True,
            norm_first=norm_first,
            bias=bias,
        )
    if not final_norms:
        core.encoder.norm = core.decoder.norm = None
    model = TeamModel(core, (source_vocab, 47, width), scale=scale, head_bias=head_bias)
    if shared:
        model.source = model.target
    if tied:
        model.head.weight = model.target.weight
    if positions.startswith("sinusoidal"):
        table = sinusoids(20, width, halves=positions == "sinusoidal-halves")
        model.source_positions = model.target_positions = Table(table, learned=False)
    else:
        model.source_positions = Table(torch.zeros(20, width), learned=True)
        model.target_positions = (
            Table(torch.zeros(20, width), learned=True) if positions == "two" else model.source_positions
        )
    randomise(model)
    # In evaluation mode torch takes another, fused way, which knows fewer activations.
    return model.train()


def write_team_folder(model: TeamModel, folder: Path, **changes: Any) -> Path:
    """Its state dict and its description."""
    torch.save(model.state_dict(), folder / "model.pt")
    describe(folder, **changes)
    return folder


def describe(folder: Path, prefix: str = "", **changes: Any) -> None:
    """Write the `transformer.toml` of a `TeamModel`, with `changes`; `prefix` stands before all names of tensors."""
    settings = {
        "weights": "model.pt",
        "heads": 2,
        "activation": "relu",
        "scale_embedding": True,
        "positions": "stored",
        "pad_token_id": 0,
        "decoder_start_token_id": 2,
        "eos_token_id": 3,
        **changes,
    }
    names = {
        "transformer": f"{prefix}core",
        "source_embedding": f"{prefix}source.weight",
        "target_embedding": f"{prefix}target.weight",
        "output": f"{prefix}head",
    }
    if settings["positions"] == "stored":
        names |= {f"{side}_positions": f"{prefix}{side}_positions.table" for side in ("source", "target")}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    lines += ["[names]", *(f"{name} = {json.dumps(value)}" for name, value in names.items())]
    (folder / "transformer.toml").write_text("\n".join(lines) + "\n", "utf-8")


def complete_team_folder(folder: Path) -> Path:
    """A `torch.nn.Transformer` with a tokenizer of its vocabulary."""
    model = team_model(source_vocab=47, shared=True)
    write_team_folder(model, folder, pad_token_id=0, decoder_start_token_id=2, eos_token_id=3)
    write_tokenizer(folder, 47, pad=0, eos=3, special={"<s>": 2})
    return folder

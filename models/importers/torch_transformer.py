"""A team's own code around `torch.nn.Transformer`: its state dict, and a TOML file that says what the dict does not."""

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint import unique_parameters
from ..config import Activation, ModelConfig, PositionKind
from ..errors import ModelImportError
from ..transformer import Transformer
from .folder import own_file, read_pickled, read_tensors
from .mapping import Imported, Weights, fill
from .settings import Settings

DESCRIPTION = "transformer.toml"
ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "gelu": "gelu", "silu": "silu"}
POSITIONS: dict[str, PositionKind] = {
    "stored": "learned",
    "sinusoidal": "sinusoidal",
    "sinusoidal-halves": "sinusoidal-halves",
}
FIELDS = {
    "weights",
    "state_dict",
    "ignore",
    "heads",
    "activation",
    "norm_first",
    "layer_norm_eps",
    "bias",
    "scale_embedding",
    "positions",
    "max_positions",
    "pad_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "names",
}
NAMES = {"transformer", "source_embedding", "target_embedding", "source_positions", "target_positions", "output"}

ATTENTIONS = {"self_attention": "self_attn", "cross_attention": "multihead_attn"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
"""In the order in which torch keeps them, one below the other, in one matrix."""
NORMS = {
    "encoder": {"self_residual.norm": "norm1", "feed_forward_residual.norm": "norm2"},
    "decoder": {"self_residual.norm": "norm1", "cross_residual.norm": "norm2", "feed_forward_residual.norm": "norm3"},
}
LINEARS = {"feed_forward.fc1": "linear1", "feed_forward.fc2": "linear2"}


class Names(NamedTuple):
    """Where the parts lie in the state dict."""

    transformer: str
    """What stands before `encoder.layers.0`."""
    source_embedding: str
    target_embedding: str
    source_positions: str
    target_positions: str
    output: str
    """The module of the head: its `weight`, and its `bias` if it has one."""


class Description(NamedTuple):
    """Contents of `transformer.toml`."""

    settings: Settings
    weights: str
    state_dict: str
    """Where the weights are in a file that holds more than these; empty where it does not."""
    ignore: list[str]
    bias: bool
    positions: PositionKind
    names: Names
    fields: dict[str, Any]
    """Of `ModelConfig`, as far as they are known before the weights."""


def import_torch(folder: Path) -> Imported:
    """The model in `folder` that its `transformer.toml` describes.

    Raises:
        ModelImportError: the description is incomplete, or tensors do not fit it; all problems are listed.
    """
    description = _read_description(folder)
    weights = _read_weights(folder, description)
    config = _config(description, weights)
    model = Transformer(config)
    given = _vectors(description, weights, config)
    shapes = {name: tuple(parameter.shape) for name, parameter in unique_parameters(model).items()}
    tensors = {
        name: given[name] if name in given else _part(description, weights, name, shape)
        for name, shape in shapes.items()
    }
    weights.check()
    return Imported("torch", fill(model, tensors), {})


def _read_description(folder: Path) -> Description:
    path = own_file(folder, DESCRIPTION)
    try:
        content = tomllib.loads(path.read_text("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ModelImportError(f"{path} is not TOML: {error}") from None
    settings = Settings(path, content)
    settings.unknown(FIELDS)
    table = settings.need("names", dict[str, Any])
    inside = Settings(path, table, inside="names.")
    inside.unknown(NAMES)
    positions = settings.choose("positions", POSITIONS)
    source_positions = inside.need("source_positions", str) if positions == "learned" else ""
    source_embedding = inside.need("source_embedding", str)
    names = Names(
        transformer=inside.get("transformer", str, ""),
        source_embedding=source_embedding,
        target_embedding=inside.get("target_embedding", str, source_embedding),
        source_positions=source_positions,
        target_positions=inside.get("target_positions", str, source_positions),
        output=inside.need("output", str),
    )
    heads = settings.need("heads", int)
    fields = {
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "activation_function": settings.choose("activation", ACTIVATIONS),
        "norm": "pre" if settings.get("norm_first", bool, False) else "post",
        "layer_norm_eps": settings.get("layer_norm_eps", float, 1e-5),
        "scale_embedding": settings.need("scale_embedding", bool),
        "positions": positions,
        "max_positions": 1 if positions == "learned" else settings.need("max_positions", int),
        **{name: settings.need(name, int) for name in ("pad_token_id", "decoder_start_token_id", "eos_token_id")},
    }
    description = Description(
        settings=settings,
        weights=settings.need("weights", str),
        state_dict=settings.get("state_dict", str, ""),
        ignore=settings.get("ignore", list[str], []),
        bias=settings.get("bias", bool, True),
        positions=positions,
        names=names,
        fields=fields,
    )
    settings.problems += inside.problems
    settings.check()
    return description


def _read_weights(folder: Path, description: Description) -> Weights:
    path = own_file(folder, description.weights)
    if not description.state_dict:
        return Weights(path, read_tensors(path))
    content = read_pickled(path) if path.suffix != ".safetensors" else {}
    inner = content.get(description.state_dict) if isinstance(content, dict) else None
    if not isinstance(inner, dict) or not all(isinstance(value, Tensor) for value in inner.values()):
        raise ModelImportError(
            f"{path} has no dictionary of tensors called {description.state_dict!r}, which {DESCRIPTION} names"
        )
    return Weights(path, {str(name): value for name, value in inner.items()})


def _config(description: Description, weights: Weights) -> ModelConfig:
    """The settings, completed by the shapes of the weights."""
    weights.leave(*description.ignore)
    names = description.names
    source, target = (
        _shape(weights, name, f"names.{side}_embedding", 2)
        for side, name in (("source", names.source_embedding), ("target", names.target_embedding))
    )
    fields: dict[str, Any] = {"vocab_size": target[0], "d_model": target[1], "source_vocab_size": source[0]}
    normed = []
    for side in ("encoder", "decoder"):
        start = f"{_prefix(names)}{side}."
        found = [
            int(match[1]) for name in weights.names if (match := re.match(rf"{re.escape(start)}layers\.(\d+)\.", name))
        ]
        fields[f"{side}_layers"] = max(found, default=0) + 1
        fields[f"{side}_ffn_dim"] = _shape(weights, f"{start}layers.0.linear1.weight", "names.transformer", 2)[0]
        normed.append(f"{start}norm.weight" in weights)
    if normed[0] != normed[1]:
        weights.problems.append(
            "one of encoder.norm and decoder.norm is there and the other is not, expected both or none"
        )
    if description.positions == "learned":
        lengths = [
            len(_table(weights, name, f"names.{side}_positions"))
            for side, name in (("source", names.source_positions), ("target", names.target_positions))
        ]
        fields["max_positions"] = min(lengths)
    if weights.problems:
        weights.check()
    share = source == target and torch.equal(
        weights.take(names.source_embedding, source), weights.take(names.target_embedding, target)
    )
    head = weights.take(f"{names.output}.weight", target)
    fields |= {
        "source_vocab_size": None if share else source[0],
        "share_embeddings": share,
        "tie_output": torch.equal(head, weights.take(names.target_embedding, target)),
        "output_bias": f"{names.output}.bias" in weights,
        "final_norm": normed[0],
    }
    return description.settings.model(lambda: ModelConfig(**{**description.fields, **fields}))


def _vectors(description: Description, weights: Weights, config: ModelConfig) -> dict[str, Tensor]:
    """Embeddings, positions and head by our names."""
    names = description.names
    shape = (config.vocab_size, config.d_model)
    given = {
        "encoder.embedding.tokens.weight": weights.take(
            names.source_embedding, (config.encoder_vocab_size, config.d_model)
        ),
        "decoder.embedding.tokens.weight": weights.take(names.target_embedding, shape),
        "output.weight": weights.take(f"{names.output}.weight", shape),
    }
    if config.output_bias:
        given["output.bias"] = weights.take(f"{names.output}.bias", shape[:1])
    if config.positions == "learned":
        for side, name in (("encoder", names.source_positions), ("decoder", names.target_positions)):
            given[f"{side}.embedding.positions.table"] = _table(weights, name, "")[: config.max_positions]
    return given


def _part(description: Description, weights: Weights, name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor of our weight `name` in a layer, or of a norm after the layers."""
    path, _, kind = name.rpartition(".")
    if kind == "bias" and not description.bias:
        return torch.zeros(shape)
    side, _, rest = path.partition(".")
    if rest == "norm":
        return weights.take(f"{_prefix(description.names)}{name}", shape)
    _, number, part = rest.split(".", 2)
    start = f"{_prefix(description.names)}{side}.layers.{number}."
    if part in LINEARS or part in NORMS[side]:
        return weights.take(f"{start}{(LINEARS | NORMS[side])[part]}.{kind}", shape)
    attention, projection = part.split(".")
    start += ATTENTIONS[attention]
    if projection not in PROJECTIONS:
        return weights.take(f"{start}.{projection}.{kind}", shape)
    joined = weights.take(f"{start}.in_proj_{kind}", (3 * shape[0], *shape[1:]))
    return joined.chunk(3)[PROJECTIONS.index(projection)]


def _prefix(names: Names) -> str:
    return f"{names.transformer}." if names.transformer else ""


def _shape(weights: Weights, name: str, setting: str, axes: int) -> tuple[int, ...]:
    """The shape of the tensor `name`, which `setting` points to."""
    shape = weights.shape(name)
    if shape is None or len(shape) != axes:
        found = "is missing" if shape is None else f"has shape {list(shape)}, expected {axes} axes"
        weights.problems.append(f"{name}, to which {DESCRIPTION} points in {setting}, {found}")
        return (1,) * axes
    return shape


def _table(weights: Weights, name: str, setting: str) -> Tensor:
    """The table of positions `name`, `(N, E)`; an axis of 1, as tutorials have for the batch, is left out."""
    shape = weights.shape(name)
    if shape is not None and len(shape) == 3 and 1 in shape[:2]:
        return weights.take(name, shape).reshape(-1, shape[2])
    return weights.take(name, _shape(weights, name, setting, 2))

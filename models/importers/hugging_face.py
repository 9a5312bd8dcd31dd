"""What transformers' encoder-decoders of the BART kin have in common: settings, names of weights, shared embeddings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from ..checkpoint import unique_parameters
from ..config import Activation, ModelConfig
from ..transformer import Transformer
from .folder import CONFIG, GENERATION, read_json, read_weights, stands
from .mapping import Imported, Weights, fill
from .settings import Settings

ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "gelu": "gelu", "silu": "silu", "swish": "silu"}
SIZES = (
    "vocab_size",
    "d_model",
    *(f"{side}_{what}" for side in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")),
)
"""Fields of `ModelConfig` that go by the same name there and here."""

PARTS = {
    "self_attention": "self_attn",
    "self_residual.norm": "self_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "cross_residual.norm": "encoder_attn_layer_norm",
    "feed_forward.fc1": "fc1",
    "feed_forward.fc2": "fc2",
    "feed_forward_residual.norm": "final_layer_norm",
    "norm": "layer_norm",
    "embedding.norm": "layernorm_embedding",
}
"""Our parts of a layer, of encoder and of decoder, and theirs."""

SHARED, SOURCE, TARGET = "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
HEAD, HEAD_BIAS = "lm_head.weight", "final_logits_bias"
VERSIONS = ("encoder.version", "decoder.version")
"""Marks that fairseq left in old files."""


FIXED: dict[str, object] = {
    "is_encoder_decoder": True,
    "quantization_config": None,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "add_bias_logits": False,
}
"""Settings that may be absent, and otherwise must be so; None for what must be absent."""
KEPT = (
    "model_type",
    "is_encoder_decoder",
    *SIZES,
    "decoder_vocab_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "activation_function",
    "scale_embedding",
    "share_encoder_decoder_embeddings",
    "tie_word_embeddings",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "encoder_layerdrop",
    "decoder_layerdrop",
    "init_std",
    "bos_token_id",
)
"""Fields of `config.json` that a bundle hands on. Defaults of the search are not among them: they have a file."""


class Vectors(NamedTuple):
    """Token embeddings of both sides and the output projection."""

    source: Tensor
    target: Tensor
    output: Tensor
    bias: Tensor | None
    """None where every output token gets the same."""


class Family:
    """One folder that transformers saved, while it is read.

    Args:
        folder: Holds `config.json`, perhaps `generation_config.json`, and weights.
        classes: Names of the model with and without its head; no other `architectures` are read.
        fixed: Settings that this family has in one way alone.
    """

    def __init__(self, folder: Path, classes: tuple[str, str], fixed: Mapping[str, object]) -> None:
        self.folder = folder
        self.content = read_json(folder, CONFIG)
        self.settings = Settings(folder / CONFIG, self.content)
        self._class = classes[0]
        self._searching = read_json(folder, GENERATION) if stands(folder, GENERATION) else {}
        named = self.content.get("architectures") or [classes[0]]
        if not isinstance(named, list) or not set(named) <= set(classes):
            self.settings.refuse(f"architectures is {named}, supported: {' or '.join(classes)}")
        self.settings.fixed({**FIXED, **fixed})
        self.tied = self.settings.get("tie_word_embeddings", bool, True)

    def fields(self, *, scale_embedding: bool) -> dict[str, Any]:
        """Fields of `ModelConfig` that all of these models take from the same settings.

        Args:
            scale_embedding: What its absence means, which differs between these models.
        """
        settings = self.settings
        return {
            **{name: settings.need(name, int) for name in SIZES},
            "max_positions": settings.need("max_position_embeddings", int),
            "activation_function": settings.choose("activation_function", ACTIVATIONS),
            "scale_embedding": settings.get("scale_embedding", bool, scale_embedding),
            "dropout": settings.get("dropout", float, 0.1),
            "tie_output": self.tied,
            "pad_token_id": settings.need("pad_token_id", int),
            "decoder_start_token_id": self._search_id("decoder_start_token_id"),
            "eos_token_id": self._search_id("eos_token_id"),
        }

    def _search_id(self, name: str) -> int:
        """A token that the search begins or ends with: as in `generate`, the search's own settings go first."""
        path, content = self.folder / CONFIG, self.content
        if self._searching.get(name) is not None:
            path, content = self.folder / GENERATION, self._searching
        value = content.get(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        chosen = Settings(path, {name: value})
        found = chosen.need(name, int)
        for problem in chosen.problems:
            self.settings.refuse(problem if path.name == CONFIG else f"in {GENERATION} {problem}")
        return found

    def weights(self) -> Weights:
        """The tensors, once the settings are found good. Names of a model without its head begin one word later."""
        self.settings.check()
        path, tensors = read_weights(self.folder)
        whole = any(name.startswith("model.") for name in tensors)
        weights = Weights(path, tensors if whole else {_in_model(name): tensor for name, tensor in tensors.items()})
        weights.leave(*map(_in_model, VERSIONS))
        return weights

    def vectors(self, weights: Weights, config: ModelConfig) -> Vectors:
        """Embeddings and head. A file keeps some or all of the names that one matrix goes by."""
        shape = (config.vocab_size, config.d_model)
        source_shape = (config.encoder_vocab_size, config.d_model)
        shared, source, target = map(_in_model, (SHARED, SOURCE, TARGET))
        why = f"{CONFIG} says tie_word_embeddings"
        if config.tie_output and config.share_embeddings:
            one = weights.take_one_of((shared, source, target, HEAD), shape, why)
            found = (one, one, one)
        elif config.tie_output:
            one = weights.take_one_of((target, HEAD), shape, why)
            found = (weights.take(source, source_shape), one, one)
        else:
            if config.share_embeddings:
                # Untied, transformers computes with each side's own, if there is one.
                source, target = (name if name in weights else shared for name in (source, target))
                weights.leave(shared)
            found = (weights.take(source, source_shape), weights.take(target, shape), weights.take(HEAD, shape))
        bias = weights.take(HEAD_BIAS, (1, config.vocab_size))[0] if HEAD_BIAS in weights else None
        return Vectors(*found, bias if bias is not None and bias.any() else None)

    def finish(
        self, config: ModelConfig, weights: Weights, vectors: Vectors, tables: Mapping[str, Tensor] | None = None
    ) -> Imported:
        """The model of `config`: layers and norms by their names, embeddings, head and tables of positions as given.

        Args:
            config: Our settings, but for what the tensors decide.
            weights: The tensors.
            vectors: Embeddings and head.
            tables: Positions of "encoder" and "decoder", `(max_positions, E)` each; None where the settings give them.
        """
        model = Transformer(
            msgspec.structs.replace(
                config,
                share_embeddings=config.share_embeddings and torch.equal(vectors.source, vectors.target),
                output_bias=vectors.bias is not None,
                positions="learned" if tables else config.positions,
            )
        )
        given = {
            "encoder.embedding.tokens.weight": vectors.source,
            "decoder.embedding.tokens.weight": vectors.target,
            "output.weight": vectors.output,
            "output.bias": vectors.bias,
            **{f"{side}.embedding.positions.table": table for side, table in (tables or {}).items()},
        }
        tensors = {}
        for name, parameter in unique_parameters(model).items():
            tensor = given.get(name)
            tensors[name] = weights.take(their_name(name), parameter.shape) if tensor is None else tensor
        weights.check()
        kept = {name: self.content[name] for name in KEPT if name in self.content}
        return Imported(self.content["model_type"], fill(model, tensors), {**kept, "architectures": [self._class]})


def their_name(name: str) -> str:
    """Their name of our weight `name`, in a layer or beside the layers."""
    side, _, rest = name.partition(".")
    layers, number, part = rest.split(".", 2) if rest.startswith("layers.") else ("", "", rest)
    ours = next(known for known in PARTS if part.startswith(f"{known}."))
    path = (side, layers, number, PARTS[ours] + part.removeprefix(ours))
    return _in_model(".".join(word for word in path if word))


def _in_model(name: str) -> str:
    return f"model.{name}" if name.startswith(("encoder.", "decoder.", "shared.")) else name

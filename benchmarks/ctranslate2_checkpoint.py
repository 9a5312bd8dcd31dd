"""Write a checkpoint of this project as CTranslate2 reads it: transformers has no class for our pre-norm models."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from ctranslate2.specs import TransformerDecoderSpec, TransformerEncoderSpec, TransformerSpec, common_spec
from torch import Tensor, nn

from models.checkpoint import load_checkpoint
from models.layers import Embedding, FeedForward, MultiHeadAttention
from models.transformer import Decoder, Encoder, Transformer

ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "silu": common_spec.Activation.SWISH,
}


def write_ctranslate2(checkpoint: Path, folder: Path, quantization: str) -> None:
    """Write the model in `checkpoint` to `folder`, weights as CTranslate2's `quantization` says."""
    model = load_checkpoint(checkpoint)
    config = model.config
    pieces = msgspec.json.decode((checkpoint / "vocab.json").read_bytes(), type=dict[str, int])
    vocabulary = sorted(pieces, key=pieces.__getitem__)
    spec = TransformerSpec(
        *(
            side(
                layers,
                heads,
                pre_norm=config.norm == "pre",
                activation=ACTIVATIONS[config.activation_function],
                layernorm_embedding=config.embedding_norm,
            )
            for side, layers, heads in (
                (TransformerEncoderSpec, config.encoder_layers, config.encoder_attention_heads),
                (TransformerDecoderSpec, config.decoder_layers, config.decoder_attention_heads),
            )
        )
    )
    _fill(spec, model)
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.add_source_bos = spec.config.add_source_eos = False  # the tokenizer adds what is wanted
    spec.config.bos_token = spec.config.decoder_start_token = vocabulary[config.decoder_start_token_id]
    spec.config.eos_token = vocabulary[config.eos_token_id]
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.validate()
    spec.optimize(quantization=quantization)
    folder.mkdir(parents=True)
    spec.save(str(folder))


def _fill(spec: Any, model: Transformer) -> None:
    _embed(spec.encoder, spec.encoder.embeddings[0], model.encoder.embedding)
    _embed(spec.decoder, spec.decoder.embeddings, model.decoder.embedding)
    for theirs, ours in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        _layers(theirs, ours)
        if isinstance(ours.norm, nn.LayerNorm):
            _norm(theirs.layer_norm, ours.norm)
    _linear([model.output], spec.decoder.projection)


def _embed(side: Any, table: Any, embedding: Embedding) -> None:
    table.weight = _array(embedding.tokens.weight)
    side.scale_embeddings = embedding.scale
    side.position_encodings.encodings = _array(embedding.positions.table)
    if isinstance(embedding.norm, nn.LayerNorm):
        _norm(side.layernorm_embedding, embedding.norm)


def _layers(spec: Any, side: Encoder | Decoder) -> None:
    layers: Any = side.layers
    for theirs, ours in zip(spec.layer, layers, strict=True):
        attention: MultiHeadAttention = ours.self_attention
        _linear([attention.q_proj, attention.k_proj, attention.v_proj], theirs.self_attention.linear[0])
        _linear([attention.out_proj], theirs.self_attention.linear[1])
        _norm(theirs.self_attention.layer_norm, ours.self_residual.norm)
        if isinstance(side, Decoder):
            crossed: MultiHeadAttention = ours.cross_attention
            _linear([crossed.q_proj], theirs.attention.linear[0])
            _linear([crossed.k_proj, crossed.v_proj], theirs.attention.linear[1])
            _linear([crossed.out_proj], theirs.attention.linear[2])
            _norm(theirs.attention.layer_norm, ours.cross_residual.norm)
        forward: FeedForward = ours.feed_forward
        _linear([forward.fc1], theirs.ffn.linear_0)
        _linear([forward.fc2], theirs.ffn.linear_1)
        _norm(theirs.ffn.layer_norm, ours.feed_forward_residual.norm)


def _linear(ours: list[nn.Linear], theirs: Any) -> None:
    """Several projections of the same states are one there."""
    theirs.weight = np.concatenate([_array(layer.weight) for layer in ours])
    if ours[0].bias is not None:
        theirs.bias = np.concatenate([_array(layer.bias) for layer in ours])


def _norm(theirs: Any, ours: nn.LayerNorm) -> None:
    theirs.gamma, theirs.beta = _array(ours.weight), _array(ours.bias)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


if __name__ == "__main__":
    write_ctranslate2(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

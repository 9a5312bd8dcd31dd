"""The model against two that were not written here: `torch.nn.Transformer`'s layers and transformers' MarianMT."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models_support import assert_same, random_batch, random_model, tiny
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel

from models.config import ModelConfig
from models.layers import MultiHeadAttention, Residual, causal_mask
from models.transformer import Transformer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


# torch.nn.Transformer.


def copy_attention(theirs: nn.MultiheadAttention, ours: MultiHeadAttention) -> None:
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
    theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())


def copy_norm(theirs: nn.LayerNorm, ours: Residual) -> None:
    theirs.load_state_dict(ours.norm.state_dict())


@torch.no_grad()
def torchs_transformer(model: Transformer) -> nn.Transformer:
    """`torch.nn.Transformer` with the weights of `model`."""
    config = model.config
    activation = ACTIVATIONS[config.activation_function]
    pre = config.norm == "pre"
    shared = {"dropout": 0.0, "layer_norm_eps": config.layer_norm_eps, "batch_first": True, "norm_first": pre}
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(
            config.d_model,
            config.encoder_attention_heads,
            config.encoder_ffn_dim,
            activation=activation,
            **shared,  # type: ignore[arg-type]
        ),
        config.encoder_layers,
        nn.LayerNorm(config.d_model, config.layer_norm_eps) if pre else None,
        enable_nested_tensor=False,
    )
    decoder = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(
            config.d_model,
            config.decoder_attention_heads,
            config.decoder_ffn_dim,
            activation=activation,
            **shared,  # type: ignore[arg-type]
        ),
        config.decoder_layers,
        nn.LayerNorm(config.d_model, config.layer_norm_eps) if pre else None,
    )
    theirs = nn.Transformer(config.d_model, custom_encoder=encoder, custom_decoder=decoder, batch_first=True).double()
    # In evaluation mode torch takes another, fused way, which knows fewer activations.
    theirs.train()
    our_encoder: Iterable[Any] = model.encoder.layers
    our_decoder: Iterable[Any] = model.decoder.layers
    for layer, ours in zip(encoder.layers, our_encoder, strict=True):
        copy_attention(layer.self_attn, ours.self_attention)
        copy_norm(layer.norm1, ours.self_residual)
        copy_norm(layer.norm2, ours.feed_forward_residual)
    for layer, ours in zip(decoder.layers, our_decoder, strict=True):
        copy_attention(layer.self_attn, ours.self_attention)
        copy_attention(layer.multihead_attn, ours.cross_attention)
        copy_norm(layer.norm1, ours.self_residual)
        copy_norm(layer.norm2, ours.cross_residual)
        copy_norm(layer.norm3, ours.feed_forward_residual)
    for layer, ours in zip((*encoder.layers, *decoder.layers), (*our_encoder, *our_decoder), strict=True):
        layer.linear1.load_state_dict(ours.feed_forward.fc1.state_dict())
        layer.linear2.load_state_dict(ours.feed_forward.fc2.state_dict())
    if encoder.norm is not None and decoder.norm is not None:
        encoder.norm.load_state_dict(model.encoder.norm.state_dict())
        decoder.norm.load_state_dict(model.decoder.norm.state_dict())
    return theirs


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("sides", [{}, {"encoder_layers": 1, "decoder_layers": 3, "encoder_attention_heads": 4}])
def test_outputs_equal_those_of_torchs_transformer(norm: str, activation: str, sides: dict[str, int]) -> None:
    config = tiny(norm=norm, activation_function=activation, encoder_ffn_dim=12, layer_norm_eps=0.01, **sides)
    model, batch = random_model(config), random_batch(config)
    theirs = torchs_transformer(model)
    hidden = ~batch.source_mask.bool()
    length = batch.target_ids.shape[1]
    future = ~causal_mask(length, hidden.device)[0, 0]

    memory = model.encode(batch.source_ids, batch.source_mask)
    expected = theirs.encoder(model.encoder.embedding(batch.source_ids), src_key_padding_mask=hidden)
    assert_same(memory, expected)

    states = theirs.decoder(
        model.decoder.embedding(batch.target_ids), expected, tgt_mask=future, memory_key_padding_mask=hidden
    )
    logits, _ = model.prefill(batch.target_ids, memory, batch.source_mask)
    assert_same(logits, model.output(states))


# MarianMT.


def marian_config(config: ModelConfig) -> MarianConfig:
    """Settings of transformers for what `config` describes."""
    return MarianConfig(
        vocab_size=config.encoder_vocab_size,
        decoder_vocab_size=config.vocab_size,
        d_model=config.d_model,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.encoder_attention_heads,
        decoder_attention_heads=config.decoder_attention_heads,
        encoder_ffn_dim=config.encoder_ffn_dim,
        decoder_ffn_dim=config.decoder_ffn_dim,
        activation_function=config.activation_function,
        max_position_embeddings=config.max_positions,
        scale_embedding=config.scale_embedding,
        share_encoder_decoder_embeddings=config.share_embeddings,
        tie_word_embeddings=config.tie_output,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        bos_token_id=config.decoder_start_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        forced_eos_token_id=config.eos_token_id,
    )


PARTS = {
    "self_attention": "self_attn",
    "self_residual.norm": "self_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "cross_residual.norm": "encoder_attn_layer_norm",
    "feed_forward.fc1": "fc1",
    "feed_forward.fc2": "fc2",
    "feed_forward_residual.norm": "final_layer_norm",
}


@torch.no_grad()
def copy_marian(theirs: MarianMTModel, ours: Transformer) -> None:
    """Put the weights of `theirs` into `ours`; every one of `ours` gets its own."""
    source = theirs.state_dict()
    for name, weight in ours.named_parameters():
        side, _, rest = name.partition(".")
        if name == "output.bias":
            weight.copy_(source["final_logits_bias"][0])
        elif rest == "embedding.tokens.weight":
            weight.copy_(source[f"model.{side}.embed_tokens.weight"])
        else:
            for part, marians in PARTS.items():
                rest = rest.replace(f".{part}.", f".{marians}.")
            weight.copy_(source[f"model.{side}.{rest}"])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="shared"),
        pytest.param({"encoder_layers": 1, "decoder_layers": 3, "encoder_attention_heads": 4}, id="unequal sides"),
        pytest.param({"share_embeddings": False, "source_vocab_size": 11}, id="own source vocabulary"),
        pytest.param({"activation_function": "relu", "scale_embedding": False}, id="relu, unscaled"),
    ],
)
@torch.no_grad()
def test_logits_equal_those_of_marian(changes: dict[str, object]) -> None:
    changes = {"activation_function": "silu", "positions": "sinusoidal-halves", "output_bias": True, **changes}
    config = tiny(**changes)
    torch.manual_seed(0)
    theirs = MarianMTModel(marian_config(config)).double()
    theirs.eval()  # type: ignore[no-untyped-call]
    for weight in theirs.parameters():
        if weight.requires_grad:
            weight.add_(0.3 * torch.randn_like(weight))
    theirs.final_logits_bias.normal_()
    ours = Transformer(config).double().eval()
    copy_marian(theirs, ours)

    batch = random_batch(config)
    expected = theirs(input_ids=batch.source_ids, attention_mask=batch.source_mask, decoder_input_ids=batch.target_ids)
    memory = ours.encode(batch.source_ids, batch.source_mask)
    assert_same(memory, expected.encoder_last_hidden_state, 1e-10)
    assert_same(ours(batch.source_ids, batch.source_mask, batch.target_ids), expected.logits, 1e-10)

    _, cache = ours.prefill(batch.target_ids, memory, batch.source_mask)
    for layer, (self_key, self_value, cross_key, cross_value) in zip(cache, layer_caches(expected), strict=True):
        for mine, marians in zip(
            (*layer.decoder, *layer.encoder), (self_key, self_value, cross_key, cross_value), strict=True
        ):
            assert_same(mine, marians, 1e-10)


def layer_caches(expected: object) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Self keys and values, cross keys and values of every layer in the cache of transformers."""
    past = expected.past_key_values  # type: ignore[attr-defined]
    pairs = zip(past.self_attention_cache.layers, past.cross_attention_cache.layers, strict=True)
    return [(own.keys, own.values, cross.keys, cross.values) for own, cross in pairs]


def test_the_tables_of_positions_are_equal_bit_by_bit() -> None:
    config = tiny(positions="sinusoidal-halves", d_model=64, max_positions=300)
    theirs = MarianMTModel(marian_config(config)).model.encoder.embed_positions.weight
    assert torch.equal(Transformer(config).encoder.embedding.positions.table, theirs)

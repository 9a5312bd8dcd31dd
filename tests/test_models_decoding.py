"""Who sees whom, what a cache holds, and that the three verbs together compute one function."""

import pytest
import torch
from models_support import (
    VARIANTS,
    all_variants,
    assert_same,
    outputs_of,
    random_batch,
    random_model,
    tiny,
)
from torch import Tensor

from models.data import Batch
from models.errors import SequenceTooLongError
from models.layers import DotProductAttention
from models.objective import cross_entropy
from models.transformer import Cache, Transformer

LENGTH = 6


def full_target(batch: Batch, vocabulary: int) -> Tensor:
    """Random target ids `(B, LENGTH)` without padding, after the start token."""
    ids = torch.randint(4, vocabulary, (len(batch.target_ids), LENGTH), generator=torch.Generator().manual_seed(3))
    ids[:, 0] = batch.target_ids[0, 0]
    return ids


def setting(changes: dict[str, object]) -> tuple[Transformer, Batch, Tensor, Tensor]:
    """A model, a batch, a target and the memory of the batch's source."""
    config = tiny(**changes)
    model, batch = random_model(config), random_batch(config)
    return model, batch, full_target(batch, config.vocab_size), model.encode(batch.source_ids, batch.source_mask)


def layer_states(model: Transformer, target: Tensor, memory: Tensor, mask: Tensor) -> list[Tensor]:
    """What the embedding and every layer of the decoder give, `(B, T, E)` each."""
    with outputs_of([model.decoder.embedding, *model.decoder.layers]) as outputs:
        model.prefill(target, memory, mask)
    return [calls[0] for calls in outputs]


def all_visible(length: int, device: torch.device) -> Tensor:
    """What `causal_mask` would be without causality."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device)


# Causality.


@all_variants
def test_appending_tokens_changes_no_earlier_state_in_any_layer(changes: dict[str, object]) -> None:
    model, batch, target, memory = setting(changes)
    longest = layer_states(model, target, memory, batch.source_mask)
    assert len(longest) == 1 + model.config.decoder_layers
    for length in range(1, LENGTH):
        shorter = layer_states(model, target[:, :length], memory, batch.source_mask)
        for states, prefix in zip(longest, shorter, strict=True):
            assert_same(states[:, :length], prefix)


def test_without_the_mask_appended_tokens_change_earlier_states(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, target, memory = setting({})
    monkeypatch.setattr("models.transformer.causal_mask", all_visible)
    longest = layer_states(model, target, memory, batch.source_mask)
    shorter = layer_states(model, target[:, :3], memory, batch.source_mask)
    assert_same(longest[0][:, :3], shorter[0])
    for states, prefix in zip(longest[1:], shorter[1:], strict=True):
        assert ((states[:, :3] - prefix).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_state_depends_on_the_inputs_up_to_its_own_and_on_all_of_them(norm: str) -> None:
    model, batch, target, memory = setting({"norm": norm})
    inputs, *layers = layer_states(model, target, memory, batch.source_mask)
    # A sum over features would be constant after a norm.
    weights = torch.arange(1.0, 9.0, dtype=torch.float64)
    for states in layers:
        for place in range(LENGTH):
            (gradient,) = torch.autograd.grad((states[0, place] * weights).sum(), inputs, retain_graph=True)
            reaches = gradient[0].abs().amax(-1) > 0
            assert reaches.tolist() == [other <= place for other in range(LENGTH)]


def test_the_encoder_sees_in_both_directions() -> None:
    model, batch, _, _ = setting({})
    with outputs_of([model.encoder.embedding]) as outputs:
        memory = model.encode(batch.source_ids[:1], batch.source_mask[:1])
    weights = torch.arange(1.0, 9.0, dtype=torch.float64)
    for place in range(5):
        (gradient,) = torch.autograd.grad((memory[0, place] * weights).sum(), outputs[0][0], retain_graph=True)
        assert (gradient[0].abs().amax(-1) > 0).all()


def test_a_step_needs_no_mask_and_a_prefix_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, target, memory = setting({})
    masks: list[Tensor | None] = []
    for layer in model.decoder.layers:
        module = layer.get_submodule("self_attention.dot_product")
        assert isinstance(module, DotProductAttention)
        module.register_forward_hook(lambda _, inputs, __: masks.append(inputs[3]))
    logits, cache = model.prefill(target[:, :-1], memory, batch.source_mask)
    assert all(mask is not None and mask.shape == (1, 1, LENGTH - 1, LENGTH - 1) for mask in masks)
    masks.clear()
    step, _ = model.step(target[:, -1:], batch.source_mask, cache)
    assert masks == [None, None]
    whole, _ = model.prefill(target, memory, batch.source_mask)
    assert_same(torch.cat([logits, step], 1), whole)

    monkeypatch.setattr("models.transformer.causal_mask", all_visible)
    unmasked, _ = model.prefill(target, memory, batch.source_mask)
    assert (unmasked - whole)[:, :-1].abs().max() > 1e-3
    one, _ = model.prefill(target[:, :1], memory, batch.source_mask)
    assert_same(one, whole[:, :1])


# The three verbs.


def rollout(model: Transformer, target: Tensor, memory: Tensor, mask: Tensor, prefix: int) -> tuple[Tensor, Cache]:
    """Logits of all of `target (B, T)` by a prefill of `prefix` tokens, if any, and steps, and the last cache."""
    if prefix:
        logits, cache = model.prefill(target[:, :prefix], memory, mask)
        parts = [logits]
    else:
        parts, cache = [], model.begin(memory)
    for place in range(prefix, target.shape[1]):
        logits, cache = model.step(target[:, place : place + 1], mask, cache)
        assert logits.shape == (len(target), 1, model.config.vocab_size)
        parts.append(logits)
    return torch.cat(parts, 1), cache


@all_variants
def test_prefill_then_steps_equals_one_forward_at_every_prefix_length(changes: dict[str, object]) -> None:
    model, batch, target, memory = setting(changes)
    whole = model(batch.source_ids, batch.source_mask, target)
    for prefix in range(LENGTH + 1):
        assert_same(rollout(model, target, memory, batch.source_mask, prefix)[0], whole)


@all_variants
def test_a_beginning_holds_no_token_and_the_source_as_prefill_does(changes: dict[str, object]) -> None:
    model, batch, target, memory = setting(changes)
    begun, (_, prefilled) = model.begin(memory), model.prefill(target[:, :1], memory, batch.source_mask)
    for layer, other in zip(begun, prefilled, strict=True):
        rows, heads, _, size = other.decoder.key.shape
        assert layer.decoder.key.shape == layer.decoder.value.shape == (rows, heads, 0, size)
        assert torch.equal(layer.encoder.key, other.encoder.key)
        assert torch.equal(layer.encoder.value, other.encoder.value)


@all_variants
def test_one_forward_equals_a_forward_over_every_growing_prefix(changes: dict[str, object]) -> None:
    model, batch, target, _ = setting(changes)
    whole = model(batch.source_ids, batch.source_mask, target)
    for length in range(1, LENGTH + 1):
        last = model(batch.source_ids, batch.source_mask, target[:, :length])[:, -1]
        assert_same(last, whole[:, length - 1])


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("positions", ["sinusoidal", "sinusoidal-halves", "learned"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_combination_of_settings_rolls_out_as_one_forward(
    norm: str, activation: str, positions: str, *, tied: bool
) -> None:
    model, batch, target, memory = setting(
        {"norm": norm, "activation_function": activation, "positions": positions, "tie_output": tied}
    )
    whole = model(batch.source_ids, batch.source_mask, target)
    assert_same(rollout(model, target, memory, batch.source_mask, 2)[0], whole)


@all_variants
def test_the_self_cache_grows_by_one_and_the_cross_cache_stays_the_same_object(changes: dict[str, object]) -> None:
    model, batch, target, memory = setting(changes)
    config = model.config
    heads, width = config.decoder_attention_heads, config.decoder_head_dim
    _, cache = model.prefill(target[:, :2], memory, batch.source_mask)
    assert len(cache) == config.decoder_layers
    for place in range(2, LENGTH):
        _, grown = model.step(target[:, place : place + 1], batch.source_mask, cache)
        for before, after in zip(cache, grown, strict=True):
            for old, new in zip(before.decoder, after.decoder, strict=True):
                assert old.shape == (3, heads, place, width)
                assert new.shape == (3, heads, place + 1, width)
                assert torch.equal(new[:, :, :-1], old)
            for old, new in zip(before.encoder, after.encoder, strict=True):
                assert old.shape == (3, heads, 5, width)
                assert new is old
        cache = grown


def test_every_layer_has_caches_of_its_own() -> None:
    model, batch, target, memory = setting({"decoder_layers": 3})
    _, cache = model.prefill(target, memory, batch.source_mask)
    tensors = [tensor for layer in cache for key_value in layer for tensor in key_value]
    for index, one in enumerate(tensors):
        for other in tensors[:index]:
            assert one.shape != other.shape or (one - other).abs().max() > 1e-3


def test_the_encoder_and_the_cross_projections_run_once_a_sentence() -> None:
    model, batch, target, _ = setting({})
    layers = [layer.get_submodule(f"{kind}_attention.{name}") for layer in model.decoder.layers for kind, name in KINDS]
    with outputs_of([model.encoder, *layers]) as outputs:
        memory = model.encode(batch.source_ids, batch.source_mask)
        rollout(model, target, memory, batch.source_mask, 2)
    encoder, *projections = [len(calls) for calls in outputs]
    assert encoder == 1
    steps = LENGTH - 2
    assert projections == [1, 1, 1 + steps, 1 + steps] * 2


KINDS = [("cross", "k_proj"), ("cross", "v_proj"), ("self", "k_proj"), ("self", "v_proj")]


@all_variants
def test_cross_caches_come_from_the_sentence_of_their_own_row(changes: dict[str, object]) -> None:
    model, batch, target, memory = setting(changes)
    _, cache = model.prefill(target, memory, batch.source_mask)
    for layer, decoder_layer in zip(cache, model.decoder.layers, strict=True):
        for name, cached in zip(("k_proj", "v_proj"), layer.encoder, strict=True):
            projected = decoder_layer.get_submodule(f"cross_attention.{name}")(memory)
            assert_same(cached.transpose(1, 2).flatten(2), projected)
    other, _ = model.prefill(target, memory.flip(0), batch.source_mask.flip(0))
    whole, _ = model.prefill(target, memory, batch.source_mask)
    assert ((other - whole)[[0, 2]].abs().amax((1, 2)) > 1e-6).all()


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_a_sequence_that_outgrows_the_position_table_is_refused_by_every_verb(positions: str) -> None:
    model, batch, target, memory = setting({"max_positions": LENGTH, "positions": positions})
    _, cache = model.prefill(target, memory, batch.source_mask)
    with pytest.raises(SequenceTooLongError, match=r"position 7, .* ends at 6"):
        model.step(target[:, :1], batch.source_mask, cache)
    with pytest.raises(SequenceTooLongError, match=r"position 7, .* ends at 6"):
        model.branch(target[:, :2], batch.source_mask, torch.ones(len(target), 2, LENGTH, dtype=torch.int64), cache)
    longer = torch.cat([target, target], 1)
    with pytest.raises(SequenceTooLongError, match="position 12"):
        model.prefill(longer, memory, batch.source_mask)
    with pytest.raises(SequenceTooLongError, match="position 12"):
        model.encode(longer, torch.ones_like(longer))


# Padding.


@all_variants
def test_a_sentence_alone_gives_what_it_gives_in_a_padded_batch(changes: dict[str, object]) -> None:
    model, batch, target, memory = setting(changes)
    logits = model(batch.source_ids, batch.source_mask, target)
    for row, length in enumerate(batch.source_mask.sum(1).tolist()):
        ids, mask = batch.source_ids[row : row + 1, :length], batch.source_mask[row : row + 1, :length]
        assert_same(model.encode(ids, mask), memory[row : row + 1, :length])
        assert_same(model(ids, mask, target[row : row + 1]), logits[row : row + 1])


def test_what_stands_on_padding_matters_to_no_one() -> None:
    model, batch, target, _ = setting({})
    other_ids = torch.where(batch.source_mask.bool(), batch.source_ids, 9)
    assert not torch.equal(other_ids, batch.source_ids)
    assert_same(
        model(other_ids, batch.source_mask, target), model(batch.source_ids, batch.source_mask, target), tolerance=1e-12
    )


def test_a_fully_padded_row_gives_numbers() -> None:
    model, batch, target, _ = setting({})
    mask = batch.source_mask.clone()
    mask[1] = 0
    assert model(batch.source_ids, mask, target).isfinite().all()


# How the loss reaches the encoder.


def encoder_gradients(model: Transformer, batch: Batch) -> list[Tensor]:
    model.zero_grad()
    loss = cross_entropy(model(batch.source_ids, batch.source_mask, batch.target_ids), batch.labels)
    torch.autograd.backward(loss)
    weights = [weight for name, weight in model.encoder.named_parameters() if not name.endswith("k_proj.bias")]
    return [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]


@pytest.mark.parametrize("cut", [(), ("k_proj",), ("v_proj",), ("k_proj", "v_proj")])
def test_the_loss_reaches_the_encoder_through_the_keys_and_values_of_cross_attention(cut: tuple[str, ...]) -> None:
    config = tiny(share_embeddings=False, activation_function="gelu")
    model, batch = random_model(config), random_batch(config)
    for layer in model.decoder.layers:
        for name in cut:
            projection = layer.get_submodule(f"cross_attention.{name}")
            projection.register_forward_hook(lambda _, __, output: output.detach())
    reached = [(gradient != 0).any().item() for gradient in encoder_gradients(model, batch)]
    assert set(reached) == {len(cut) < 2}


def test_a_tied_weight_is_one_tensor_and_an_untied_one_is_not() -> None:
    for name, changes in VARIANTS.items():
        model = Transformer(tiny(**changes))
        source, target, output = (
            model.encoder.embedding.tokens.weight,
            model.decoder.embedding.tokens.weight,
            model.output.weight,
        )
        assert (source is target) == model.config.share_embeddings, name
        assert (output is target) == model.config.tie_output, name
        assert (model.output.bias is not None) == model.config.output_bias, name
        assert source.shape[0] == model.config.encoder_vocab_size

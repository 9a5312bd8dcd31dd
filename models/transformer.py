"""The encoder-decoder Transformer and its three verbs: `encode`, `prefill`, `step`.

Letters: B batch, S source, T target of this call, P past, L layers, H heads, D head size, E model width, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .errors import ModelError
from .layers import (
    Embedding,
    FeedForward,
    KeyValue,
    MultiHeadAttention,
    Positions,
    Residual,
    branch_mask,
    causal_mask,
    padding_mask,
)


class LayerCache(NamedTuple):
    """What one decoder layer remembers between steps.

    `decoder` holds keys and values of the tokens so far, `(B, H, P, D)`, and grows by one a step;
    `encoder` holds those of the source, `(B, H, S, D)`, computed once, in prefill.
    """

    decoder: KeyValue
    encoder: KeyValue


Cache = tuple[LayerCache, ...]


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward (section 3.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(config.d_model, config.encoder_attention_heads)
        self.self_residual = _residual(config)
        self.feed_forward = FeedForward(config.d_model, config.encoder_ffn_dim, config.activation_function)
        self.feed_forward_residual = _residual(config)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """`states (B, S, E)` and `mask (B, 1, S, S)` to `(B, S, E)`."""
        normed = self.self_residual.before(states)
        attended = self.self_attention(normed, self.self_attention.key_value(normed), mask)
        states = self.self_residual.after(states, attended)
        output = self.feed_forward(self.feed_forward_residual.before(states))
        return self.feed_forward_residual.after(states, output)


class DecoderLayer(nn.Module):
    """Self-attention over the target so far, cross-attention to the source, feed-forward (section 3.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(config.d_model, config.decoder_attention_heads)
        self.self_residual = _residual(config)
        self.cross_attention = MultiHeadAttention(config.d_model, config.decoder_attention_heads)
        self.cross_residual = _residual(config)
        self.feed_forward = FeedForward(config.d_model, config.decoder_ffn_dim, config.activation_function)
        self.feed_forward_residual = _residual(config)

    def forward(
        self, states: Tensor, past: KeyValue | None, source: KeyValue, self_mask: Tensor | None, cross_mask: Tensor
    ) -> tuple[Tensor, LayerCache]:
        """`states (B, T, E)` of the new tokens to `(B, T, E)`, and the cache with the new tokens appended.

        Args:
            states: `(B, T, E)`.
            past: keys and values of the P tokens before, None where there are none.
            source: keys and values of the source, `(B, H, S, D)`.
            self_mask: who sees whom among the new tokens; None when there is one, which sees everything.
            cross_mask: `(B, 1, T, S)`.
        """
        normed = self.self_residual.before(states)
        target = self.self_attention.key_value(normed)
        if past is not None:
            target = KeyValue(*(torch.cat(pair, dim=2) for pair in zip(past, target, strict=True)))  # (B, H, P + T, D)
        states = self.self_residual.after(states, self.self_attention(normed, target, self_mask))
        crossed = self.cross_attention(self.cross_residual.before(states), source, cross_mask)
        states = self.cross_residual.after(states, crossed)
        output = self.feed_forward(self.feed_forward_residual.before(states))
        return self.feed_forward_residual.after(states, output), LayerCache(target, source)


class Encoder(nn.Module):
    """Embedding, N layers and, where configured, a final norm."""

    def __init__(self, config: ModelConfig, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.norm = _final_norm(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`(B, S)` ids and mask to memory `(B, S, E)`."""
        mask = padding_mask(attention_mask, input_ids.shape[1])  # (B, 1, S, S)
        states = self.embedding(input_ids)  # (B, S, E)
        for layer in self.layers:
            states = layer(states, mask)
        memory: Tensor = self.norm(states)
        return memory


class Decoder(nn.Module):
    """Embedding, N layers and, where configured, a final norm; reads and returns caches."""

    def __init__(self, config: ModelConfig, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = _final_norm(config)

    def source_key_values(self, memory: Tensor) -> list[KeyValue]:
        """Each layer's keys and values of the source, `(B, H, S, D)`, from `memory (B, S, E)`."""
        return [layer.cross_attention.key_value(memory) for layer in self._decoder_layers()]

    def forward(
        self,
        input_ids: Tensor,
        encoder_attention_mask: Tensor,
        pasts: list[KeyValue | None],
        sources: list[KeyValue],
        *,
        start: int = 0,
        places: Tensor | None = None,
        self_mask: Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        """`input_ids (B, T)` to `(B, T, E)` and the cache with them appended.

        Args:
            input_ids: `(B, T)`.
            encoder_attention_mask: `(B, S)`.
            pasts: each layer's keys and values of the tokens before, None where there are none.
            sources: each layer's keys and values of the source.
            start: where the first of the tokens stands.
            places: where each of them stands, `(B, T)`, if not one after the other.
            self_mask: `(B, 1, T, P + T)`, or what broadcasts to it; None where all is seen.
        """
        cross_mask = padding_mask(encoder_attention_mask, input_ids.shape[1])  # (B, 1, T, S)
        states = self.embedding(input_ids, start, places)  # (B, T, E)
        cache = []
        for layer, past, source in zip(self._decoder_layers(), pasts, sources, strict=True):
            states, layer_cache = layer(states, past, source, self_mask, cross_mask)
            cache.append(layer_cache)
        return self.norm(states), tuple(cache)

    def _decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


class Transformer(nn.Module):
    """The model of "Attention Is All You Need" and its usual variants, on token ids.

    Inference is `encode` once, `prefill` once, `step` as often as tokens are wanted; the cache is a plain value that is
    passed in and returned. Training is `forward`, which is `encode` and `prefill` over the whole target.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        target_tokens = nn.Embedding(config.vocab_size, config.d_model)
        source_tokens = (
            target_tokens if config.share_embeddings else nn.Embedding(config.encoder_vocab_size, config.d_model)
        )
        self.encoder = Encoder(config, _embedding(config, source_tokens))
        self.decoder = Decoder(config, _embedding(config, target_tokens))
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=config.output_bias)
        self._initialise()
        if config.tie_output:
            self.output.weight = target_tokens.weight

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.d_model**-0.5)

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Source ids `(B, S)` and their mask (1 on real tokens) to memory `(B, S, E)`."""
        memory: Tensor = self.encoder(input_ids, attention_mask)
        return memory

    def prefill(self, input_ids: Tensor, memory: Tensor, encoder_attention_mask: Tensor) -> tuple[Tensor, Cache]:
        """The first T >= 1 target tokens at once, each seeing those before it.

        Args:
            input_ids: `(B, T)`, beginning with the start token.
            memory: `(B, S, E)` from `encode`.
            encoder_attention_mask: `(B, S)`, 1 on real source tokens.

        Returns:
            Logits `(B, T, V)` and the cache of T tokens.
        """
        sources = self.decoder.source_key_values(memory)
        self_mask = causal_mask(input_ids.shape[1], input_ids.device)
        states, cache = self.decoder(
            input_ids, encoder_attention_mask, [None] * len(sources), sources, self_mask=self_mask
        )
        return self.output(states), cache

    def begin(self, memory: Tensor) -> Cache:
        """The cache of no tokens, `(B, H, 0, D)`, around that of the source: a first token may come by `step`.

        Args:
            memory: `(B, S, E)` from `encode`.
        """
        sources = self.decoder.source_key_values(memory)
        return tuple(LayerCache(KeyValue(*(tensor[:, :, :0] for tensor in source)), source) for source in sources)

    def step(self, input_ids: Tensor, encoder_attention_mask: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """One more target token `(B, 1)` after the P tokens of `cache`: logits `(B, 1, V)` and a cache of P + 1."""
        if input_ids.shape[1] != 1:
            raise ModelError(f"a step takes one token a row, got {input_ids.shape[1]}: these belong into prefill")
        pasts, sources = _sides(cache)
        past_length = cache[0].decoder.key.shape[2]
        states, grown = self.decoder(input_ids, encoder_attention_mask, pasts, sources, start=past_length)
        return self.output(states), grown

    def branch(
        self, input_ids: Tensor, encoder_attention_mask: Tensor, seen: Tensor, cache: Cache
    ) -> tuple[Tensor, Cache]:
        """A step of several hypotheses about one source, over a cache that holds the tokens of all of them.

        Each new token sees its own ancestors among the P tokens of `cache`, as many as its position says, and itself.
        So a beam that goes on from another one's past needs no copy of it.

        Args:
            input_ids: `(B, T)`, one token of each of T hypotheses.
            encoder_attention_mask: `(B, S)`, 1 on real source tokens.
            seen: `(B, T, P)`, 1 on a token's ancestors.
            cache: as prefill or another branch gave it.

        Returns:
            Logits `(B, T, V)` and a cache of P + T tokens.
        """
        pasts, sources = _sides(cache)
        # Where P is 0, runtimes do not agree about a sum over nothing.
        ancestors = torch.cat([seen, seen.new_zeros(*input_ids.shape, 1)], -1)  # (B, T, P + 1)
        states, grown = self.decoder(
            input_ids,
            encoder_attention_mask,
            pasts,
            sources,
            places=ancestors.sum(-1),
            self_mask=branch_mask(seen),
        )
        return self.output(states), grown

    def forward(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """Teacher forcing: logits `(B, T, V)` for all positions of `target_ids (B, T)`."""
        return self.prefill(target_ids, self.encode(source_ids, source_mask), source_mask)[0]


def _sides(cache: Cache) -> tuple[list[KeyValue | None], list[KeyValue]]:
    return [layer.decoder for layer in cache], [layer.encoder for layer in cache]


def _residual(config: ModelConfig) -> Residual:
    return Residual(config.d_model, config.norm, config.layer_norm_eps, config.dropout)


def _final_norm(config: ModelConfig) -> nn.Module:
    # A post-norm layer already ends in a norm, so that the paper adds none; torch.nn.Transformer does.
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.ends_in_norm else nn.Identity()


def _embedding(config: ModelConfig, tokens: nn.Embedding) -> Embedding:
    positions = Positions(config.positions, config.max_positions, config.d_model)
    norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.embedding_norm else None
    return Embedding(tokens, positions, scale=config.scale_embedding, dropout=config.dropout, norm=norm)

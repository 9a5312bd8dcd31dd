"""Every question that a reader has about a variant of the Transformer is one field of `ModelConfig`."""

from typing import Literal

import msgspec

from .errors import ConfigError

Activation = Literal["relu", "gelu", "silu"]
NormPlacement = Literal["post", "pre"]
PositionKind = Literal["sinusoidal", "sinusoidal-halves", "learned"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and variants of one encoder-decoder Transformer; the defaults are the paper's base model.

    Field names are those of Hugging Face's encoder-decoder configurations where these have one.

    Raises:
        ConfigError: two fields contradict each other; the message lists every contradiction.

    Source: Vaswani et al. 2017, "Attention Is All You Need", table 3 (base).
    """

    vocab_size: int
    """V: entries of the target vocabulary, and of the source's unless `source_vocab_size` says otherwise."""
    source_vocab_size: int | None = None

    # Sizes.
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048

    # Where normalisation sits: LN(x + f(x)) as in the paper, or x + f(LN(x)) with a final norm on each side.
    norm: NormPlacement = "post"
    layer_norm_eps: float = 1e-5
    # Whether encoder and decoder end in a norm of their own; None for as the placement needs it, after pre-norm alone.
    final_norm: bool | None = None
    # Whether the sum of token and position vectors is normalised before the first layer, as in BART.
    embedding_norm: bool = False

    # What happens between the two position-wise projections.
    activation_function: Activation = "relu"

    # Where position enters. "sinusoidal" interleaves sine and cosine as in section 3.5 of the paper;
    # "sinusoidal-halves" stores all sines, then all cosines.
    positions: PositionKind = "sinusoidal"
    max_positions: int = 512

    # How token embeddings are scaled (sqrt(E)) and what is shared.
    scale_embedding: bool = True
    share_embeddings: bool = True
    tie_output: bool = True
    output_bias: bool = False

    # Applied to the sum of embeddings and to the output of every sub-layer, in training only.
    dropout: float = 0.1

    pad_token_id: int = 0
    decoder_start_token_id: int = 2
    eos_token_id: int = 3

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError("model: " + "; ".join(problems))

    def _problems(self) -> list[str]:
        problems = [*self._size_problems(), *self._vocabulary_problems()]
        if not self.layer_norm_eps > 0:
            problems.append(f"layer_norm_eps is {self.layer_norm_eps}, expected more than 0")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout is {self.dropout}, expected 0 <= dropout < 1")
        return problems

    def _size_problems(self) -> list[str]:
        problems = []
        sizes = (
            "vocab_size d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads "
            "encoder_ffn_dim decoder_ffn_dim max_positions"
        )
        for name in sizes.split():
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            heads = getattr(self, name)
            if heads >= 1 and self.d_model % heads:
                problems.append(f"d_model {self.d_model} is not a multiple of {name} {heads}")
        if self.positions != "learned" and self.d_model % 2:
            problems.append(f"d_model {self.d_model} is odd, {self.positions} positions need pairs of features")
        return problems

    def _vocabulary_problems(self) -> list[str]:
        problems = []
        if self.share_embeddings and self.source_vocab_size not in (None, self.vocab_size):
            problems.append(
                f"share_embeddings needs one vocabulary, but source_vocab_size is {self.source_vocab_size} "
                f"and vocab_size {self.vocab_size}"
            )
        for name in ("pad_token_id", "decoder_start_token_id", "eos_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                problems.append(f"{name} {getattr(self, name)} is outside the vocabulary of {self.vocab_size}")
        if self.encoder_vocab_size != self.vocab_size and self.pad_token_id >= self.encoder_vocab_size:
            problems.append(
                f"pad_token_id {self.pad_token_id} is outside the source vocabulary of {self.encoder_vocab_size}"
            )
        return problems

    @property
    def encoder_vocab_size(self) -> int:
        """Entries of the source vocabulary."""
        return self.vocab_size if self.source_vocab_size is None else self.source_vocab_size

    @property
    def ends_in_norm(self) -> bool:
        """Whether a norm follows the last layer of encoder and decoder."""
        return self.norm == "pre" if self.final_norm is None else self.final_norm

    @property
    def decoder_head_dim(self) -> int:
        """D: features of one head of the decoder, hence of every cache."""
        return self.d_model // self.decoder_attention_heads

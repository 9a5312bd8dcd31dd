"""The parts of the Transformer, in the order of section 3 of the paper.

Letters: B batch, S source, T target of this call, X queries, Y keys, H heads, D head size, E model width,
F feed-forward width.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Activation, NormPlacement, PositionKind
from .errors import SequenceTooLongError


class KeyValue(NamedTuple):
    """Keys and values of one attention, split into heads: `(B, H, Y, D)` each."""

    key: Tensor
    value: Tensor


def attention_scores(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled scores `q kT / sqrt(D)`, minus infinity where `mask` is False (section 3.2.1).

    Args:
        query: `(..., X, D)`.
        key: `(..., Y, D)`.
        mask: bool, broadcastable to `(..., X, Y)`; True where a query may look.

    Returns:
        `(..., X, Y)`.
    """
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])  # (..., X, Y)
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax of `attention_scores` over the keys: `(..., X, Y)`, every row sums to 1."""
    return attention_scores(query, key, mask).softmax(dim=-1)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Weighted sum of values, one output per query (section 3.2.1, equation 1).

    Equal to `attention_weights(query, key, mask) @ value`, in one fused call. A query that may see nothing gets zeros.

    Args:
        query: `(B, H, X, D)`.
        key: `(B, H, Y, D)`.
        value: `(B, H, Y, Dv)`; its width may differ from that of query and key.
        mask: as in `attention_scores`.

    Returns:
        `(B, H, X, Dv)`.
    """
    # Scaled here rather than inside: for one query ONNX Runtime is twice as fast where the factor of the product is 1.
    scaled = query * query.shape[-1] ** -0.5  # (B, H, X, D)
    return F.scaled_dot_product_attention(scaled, key, value, attn_mask=mask, scale=1.0)


def padding_mask(attention_mask: Tensor, queries: int) -> Tensor:
    """Bool mask that hides padding from every query, `(B, 1, X, S)`, from a `(B, S)` mask of ones on real tokens.

    Expanded over the queries because ONNX Runtime's CPU `Attention` takes no mask that broadcasts over them.
    """
    visible = attention_mask.bool()[:, None, None, :]  # (B, 1, 1, S)
    return visible.expand(-1, -1, queries, -1)  # (B, 1, X, S)


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Bool mask `(1, 1, T, T)` by which position i sees positions 0..i (section 3.2.3)."""
    places = torch.arange(length, device=device)
    return (places[None, :] <= places[:, None])[None, None]  # (1, 1, T, T)


def branch_mask(seen: Tensor) -> Tensor:
    """Bool mask `(B, 1, T, P + T)` by which each of T branches sees what `seen (B, T, P)` says, and itself alone."""
    own = torch.eye(seen.shape[1], dtype=torch.bool, device=seen.device)  # (T, T)
    return torch.cat([seen.bool(), own.expand(seen.shape[0], -1, -1)], -1)[:, None]  # (B, 1, T, P + T)


class DotProductAttention(nn.Module):
    """`attention` as a module without weights, so that its inputs can be observed by name."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """See `attention`."""
        return attention(query, key, value, mask)


class MultiHeadAttention(nn.Module):
    """Section 3.2.2. Keys and values are computed apart from the queries, so that they can be kept in a cache."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.dot_product = DotProductAttention()
        self.out_proj = nn.Linear(width, width)

    def key_value(self, states: Tensor) -> KeyValue:
        """Keys and values `(B, H, Y, D)` of `states (B, Y, E)`."""
        return KeyValue(self._split(self.k_proj(states)), self._split(self.v_proj(states)))

    def forward(self, states: Tensor, key_value: KeyValue, mask: Tensor | None) -> Tensor:
        """Attend from `states (B, X, E)` to `key_value`; returns `(B, X, E)`. `mask`: see `attention_scores`."""
        query = self._split(self.q_proj(states))  # (B, H, X, D)
        heads = self.dot_product(query, *key_value, mask)  # (B, H, X, D)
        joined: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))  # (B, X, E)
        return joined

    def _split(self, states: Tensor) -> Tensor:
        batch, length, width = states.shape
        return states.view(batch, length, self.heads, width // self.heads).transpose(1, 2)  # (B, H, X, D)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class FeedForward(nn.Module):
    """Two projections of every position by itself, with an activation between (section 3.3)."""

    def __init__(self, width: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.activation = ACTIVATIONS[activation]
        self.fc2 = nn.Linear(inner, width)

    def forward(self, states: Tensor) -> Tensor:
        """`(B, X, E)` to `(B, X, E)`."""
        outer: Tensor = self.fc2(self.activation(self.fc1(states)))
        return outer


class Residual(nn.Module):
    """What surrounds a sub-layer f: `LN(x + f(x))` for post-norm (the paper), `x + f(LN(x))` for pre-norm.

    A sub-layer reads `before(x)` and its output y goes to `after(x, y)`. Dropout falls on y (section 5.4).
    """

    def __init__(self, width: int, norm: NormPlacement, eps: float, dropout: float) -> None:
        super().__init__()
        self.pre_norm = norm == "pre"
        self.norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def before(self, states: Tensor) -> Tensor:
        """What the sub-layer reads."""
        return self._normed(states) if self.pre_norm else states

    def after(self, states: Tensor, output: Tensor) -> Tensor:
        """What leaves the sub-layer."""
        total: Tensor = states + self.dropout(output)
        return total if self.pre_norm else self._normed(total)

    def _normed(self, states: Tensor) -> Tensor:
        normed: Tensor = self.norm(states)
        return normed


class Positions(nn.Module):
    """The table of position vectors, added to token embeddings (section 3.5)."""

    table: Tensor

    def __init__(self, kind: PositionKind, count: int, width: int) -> None:
        super().__init__()
        if kind == "learned":
            self.table = nn.Parameter(torch.randn(count, width) * width**-0.5)
        else:
            self.register_buffer("table", sinusoids(count, width, halves=kind == "sinusoidal-halves"), persistent=False)

    def forward(self, start: int, length: int) -> Tensor:
        """Vectors `(T, E)` of positions start .. start + T - 1."""
        if not torch.compiler.is_compiling():
            self._require(start + length)
        # A slice could be cut short at the end of the table, so that an export would not know its length.
        return self.table.narrow(0, start, length)

    def at(self, places: Tensor) -> Tensor:
        """Vectors `(B, T, E)` of the positions `places (B, T)`."""
        if not torch.compiler.is_compiling():
            self._require(int(places.max()) + 1)
        return F.embedding(places, self.table)

    def _require(self, length: int) -> None:
        if length > self.table.shape[0]:
            raise SequenceTooLongError(
                f"a sequence reaches position {length}, the model's table ends at {self.table.shape[0]}"
            )


def sinusoids(count: int, width: int, *, halves: bool = False) -> Tensor:
    """Sines and cosines of geometrically falling frequency: `(count, width)`, float32.

    Feature pair i has frequency 10000^(-2i/width). Sine on even and cosine on odd features as in section 3.5, or,
    with `halves`, all sines before all cosines as Marian stores them.
    """
    pairs = torch.arange(0, width, 2, dtype=torch.float64)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * 10000.0 ** (-pairs / width)  # (count, width / 2)
    both = torch.cat if halves else torch.stack
    return both([angles.sin(), angles.cos()], -1).flatten(1).float()  # (count, width)


class Embedding(nn.Module):
    """Token vectors, scaled by sqrt(E) if so configured, plus position vectors (sections 3.4 and 3.5).

    With `norm` the sum is normalised, as in BART.
    """

    def __init__(
        self,
        tokens: nn.Embedding,
        positions: Positions,
        *,
        scale: bool,
        dropout: float,
        norm: nn.LayerNorm | None = None,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.scale = math.sqrt(tokens.embedding_dim) if scale else 1.0
        self.norm: nn.Module = nn.Identity() if norm is None else norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, start: int = 0, places: Tensor | None = None) -> Tensor:
        """`ids (B, T)` to `(B, T, E)`: at positions start .. start + T - 1, or each at its own of `places (B, T)`."""
        positions = self.positions(start, ids.shape[1]) if places is None else self.positions.at(places)
        summed = self.tokens(ids) * self.scale + positions
        embedded: Tensor = self.dropout(self.norm(summed))
        return embedded

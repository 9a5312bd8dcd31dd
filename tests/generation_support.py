"""A model that is a table, for tests of the search: no torch, no ONNX, every logit can be looked up."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from runtime.backend import Array, Cache, FloatArray, IntArray, LayerCache
from runtime.decoding import SpecialIds
from runtime.ranking import rank_tokens

VOCABULARY, POSITIONS = 7, 9
EOS, START = 0, VOCABULARY - 1
SPECIAL = SpecialIds(pad=START, start=START, eos=EOS)
Source = tuple[int, ...]
Table = Callable[[Source, Source], FloatArray]
"""From a source and the target so far, start token included, to the logits `(V,)` of the next token."""


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor of the backend. Whoever looks inside without `get` fails."""

    array: Array


class TableBackend:
    """A model that is a table.

    Its caches hold what the logits depend on: source ids and mask as cross-attention, target tokens as
    self-attention. So a row or an ancestor that is lost, moved or mixed up changes the outputs.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self.calls: Counter[str] = Counter()
        self.rows_of_steps: list[int] = []
        """How many hypotheses each step or branch goes on with."""
        self.cross_of_steps: list[tuple[Held, Held]] = []

    def encode(self, input_ids: Held, attention_mask: Held) -> Held:
        self.calls["encode"] += 1
        return Held(np.stack([input_ids.array, attention_mask.array]))  # (2, B, S)

    def prefill(self, input_ids: Held, memory: Held, encoder_attention_mask: Held) -> tuple[Held, Cache[Held]]:
        self.calls["prefill"] += 1
        ids, mask = (Held(array) for array in memory.array)
        return self._decode(
            LayerCache(input_ids, input_ids, ids, mask), input_ids.array.shape[1], encoder_attention_mask
        )

    def begin(self, memory: Held) -> Cache[Held]:
        self.calls["begin"] += 1
        ids, mask = (Held(array) for array in memory.array)
        nothing = Held(ids.array[:, :0])
        return (LayerCache(nothing, nothing, ids, mask),)

    def step(self, input_ids: Held, encoder_attention_mask: Held, cache: Cache[Held]) -> tuple[Held, Cache[Held]]:
        self.calls["step"] += 1
        return self._decode(self._grown(input_ids, cache), 1, encoder_attention_mask)

    def branch(
        self, input_ids: Held, encoder_attention_mask: Held, seen: Held, cache: Cache[Held]
    ) -> tuple[Held, Cache[Held]]:
        self.calls["branch"] += 1
        assert seen.array.shape == (*input_ids.array.shape, cache[0].decoder_key.array.shape[1])
        layer = self._grown(input_ids, cache)
        rows = zip(
            self._sources(layer, encoder_attention_mask),
            cache[0].decoder_key.array,
            seen.array,
            input_ids.array,
            strict=True,
        )
        logits = [
            [
                self._table(source, (*past[ancestors == 1], token))
                for ancestors, token in zip(row_seen, tokens, strict=True)
            ]
            for source, past, row_seen, tokens in rows
        ]
        return Held(np.array(logits)), (layer,)

    def rank(self, logits: Held, forbidden: Sequence[int], count: int) -> tuple[FloatArray, IntArray]:
        self.calls["rank"] += 1
        return rank_tokens(logits.array, forbidden, count)

    def _grown(self, input_ids: Held, cache: Cache[Held]) -> LayerCache[Held]:
        (layer,) = cache
        self.rows_of_steps.append(input_ids.array.size)
        self.cross_of_steps.append((layer.encoder_key, layer.encoder_value))
        grown = Held(np.concatenate([layer.decoder_key.array, input_ids.array], 1))
        return layer._replace(decoder_key=grown, decoder_value=grown)

    def _sources(self, layer: LayerCache[Held], mask: Held) -> list[Source]:
        assert np.array_equal(mask.array, layer.encoder_value.array)
        return [tuple(ids[real == 1]) for ids, real in zip(layer.encoder_key.array, mask.array, strict=True)]

    def _decode(self, layer: LayerCache[Held], last: int, mask: Held) -> tuple[Held, Cache[Held]]:
        logits = [
            [self._table(source, tuple(row[:end])) for end in range(len(row) - last + 1, len(row) + 1)]
            for source, row in zip(self._sources(layer, mask), layer.decoder_key.array, strict=True)
        ]
        return Held(np.array(logits)), (layer,)

    def select(self, cache: Cache[Held], rows: IntArray) -> Cache[Held]:
        self.calls["select"] += 1
        return tuple(LayerCache(*(Held(held.array[rows]) for held in layer)) for layer in cache)

    def put(self, array: Array) -> Held:
        return Held(array)

    def get(self, tensor: Held) -> Array:
        self.calls["get"] += 1
        return tensor.array


def random_table(seed: int, vocabulary: int = VOCABULARY) -> Table:
    """Different logits for every source and history."""

    @cache
    def logits(source: Source, history: Source) -> FloatArray:
        return np.random.default_rng([seed, *source, 1000, *history]).normal(0, 2, vocabulary).astype(np.float32)

    return logits


def written_table(probabilities: Mapping[Source, Sequence[float]]) -> Table:
    """Probabilities by target so far, without the start token; whatever is not written is uniform."""
    uniform = np.ones(4)
    return lambda _, history: np.log(np.asarray(probabilities.get(history[1:], uniform)) + 1e-12)

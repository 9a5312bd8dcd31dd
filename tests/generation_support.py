"""A model that is a table, for tests of the search: no torch, no ONNX, every logit can be looked up."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from runtime.backend import Array, Cache, FloatArray, IntArray, LayerCache
from runtime.decoding import SpecialIds

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

    Its caches hold what the logits depend on: source ids and mask as cross-attention, the target so far as
    self-attention. So a row that is lost, moved or mixed up changes the outputs.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self.calls: Counter[str] = Counter()
        self.rows_of_steps: list[int] = []
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

    def step(self, input_ids: Held, encoder_attention_mask: Held, cache: Cache[Held]) -> tuple[Held, Cache[Held]]:
        self.calls["step"] += 1
        (layer,) = cache
        self.rows_of_steps.append(len(input_ids.array))
        self.cross_of_steps.append((layer.encoder_key, layer.encoder_value))
        grown = Held(np.concatenate([layer.decoder_key.array, input_ids.array], 1))
        return self._decode(layer._replace(decoder_key=grown, decoder_value=grown), 1, encoder_attention_mask)

    def _decode(self, layer: LayerCache[Held], last: int, mask: Held) -> tuple[Held, Cache[Held]]:
        assert np.array_equal(mask.array, layer.encoder_value.array)
        histories = layer.decoder_key.array
        logits = [
            [self._table(tuple(ids[seen == 1]), tuple(row[:end])) for end in range(len(row) - last + 1, len(row) + 1)]
            for ids, seen, row in zip(layer.encoder_key.array, mask.array, histories, strict=True)
        ]
        return Held(np.array(logits)), (layer,)

    def reorder(self, cache: Cache[Held], rows: IntArray) -> Cache[Held]:
        self.calls["reorder"] += 1
        (layer,) = cache
        assert np.array_equal(layer.encoder_key.array[rows], layer.encoder_key.array)
        moved = Held(layer.decoder_key.array[rows])
        return (layer._replace(decoder_key=moved, decoder_value=moved),)

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

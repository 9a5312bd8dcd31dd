"""The PyTorch model behind the runtime's `Backend` protocol: the reference that every export is compared with."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.layers import KeyValue
from models.transformer import Cache as ModelCache
from models.transformer import LayerCache as ModelLayerCache
from models.transformer import Transformer
from runtime.backend import Array, Cache, FloatArray, IntArray, LayerCache
from runtime.ranking import rank_tokens


class TorchBackend:
    """Runs `model` eagerly, where its weights are and in their precision.

    Args:
        model: Put into evaluation mode; float64 for a reference, float32 for what people run.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model.eval()
        weight = next(model.parameters())
        self._device, self._dtype = weight.device, weight.dtype

    @torch.no_grad()
    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See `Backend.encode`."""
        return self.model.encode(input_ids, attention_mask)

    @torch.no_grad()
    def prefill(
        self, input_ids: Tensor, memory: Tensor, encoder_attention_mask: Tensor
    ) -> tuple[Tensor, Cache[Tensor]]:
        """See `Backend.prefill`."""
        return _given(*self.model.prefill(input_ids, memory, encoder_attention_mask))

    @torch.no_grad()
    def begin(self, memory: Tensor) -> Cache[Tensor]:
        """See `Backend.begin`."""
        return _layered(self.model.begin(memory))

    @torch.no_grad()
    def step(
        self, input_ids: Tensor, encoder_attention_mask: Tensor, cache: Cache[Tensor]
    ) -> tuple[Tensor, Cache[Tensor]]:
        """See `Backend.step`."""
        return _given(*self.model.step(input_ids, encoder_attention_mask, _taken(cache)))

    @torch.no_grad()
    def branch(
        self, input_ids: Tensor, encoder_attention_mask: Tensor, seen: Tensor, cache: Cache[Tensor]
    ) -> tuple[Tensor, Cache[Tensor]]:
        """See `Backend.branch`."""
        return _given(*self.model.branch(input_ids, encoder_attention_mask, seen, _taken(cache)))

    def rank(self, logits: Tensor, forbidden: Sequence[int], count: int) -> tuple[FloatArray, IntArray]:
        """See `Backend.rank`."""
        return rank_tokens(self.get(logits), forbidden, count)

    def select(self, cache: Cache[Tensor], rows: IntArray) -> Cache[Tensor]:
        """See `Backend.select`."""
        index = self.put(rows)
        return tuple(LayerCache(*(tensor[index] for tensor in layer)) for layer in cache)

    def put(self, array: Array) -> Tensor:
        """See `Backend.put`; floating-point arrays take the precision of the weights."""
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def get(self, tensor: Tensor) -> Array:
        """See `Backend.get`."""
        array: Array = tensor.cpu().numpy()
        return array


def _taken(cache: Cache[Tensor]) -> ModelCache:
    return tuple(ModelLayerCache(KeyValue(*layer[:2]), KeyValue(*layer[2:])) for layer in cache)


def _given(logits: Tensor, cache: ModelCache) -> tuple[Tensor, Cache[Tensor]]:
    return logits, _layered(cache)


def _layered(cache: ModelCache) -> Cache[Tensor]:
    return tuple(LayerCache(*layer.decoder, *layer.encoder) for layer in cache)

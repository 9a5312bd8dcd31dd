"""The graph that ranks tokens: large vocabularies are searched block by block, and that must not show."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from exporters.graphs import OPSETS
from exporters.search_graphs import LARGE, block_width, rank_graph
from runtime.backend import Array
from runtime.contract import RANK, Dims, graph_specs
from runtime.errors import GraphError
from runtime.parity.search_graphs import rank_case
from runtime.ranking import rank_tokens

SIZES = {"small": 600, "least that is cut": LARGE, "of the shipped model": 6000, "prime": 4099, "odd": 58101}


def graph_of(vocabulary: int, opset: int = OPSETS[1]) -> ir.Model:
    dims = Dims(
        layers=1, heads=1, head_dim=4, width=4, vocab_size=vocabulary, source_vocab_size=vocabulary, max_positions=8
    )
    return rank_graph(graph_specs(dims)[RANK], opset)


class Ranker:
    """As much of a backend as ranks."""

    def __init__(self, model: ir.Model) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        self._session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)

    def put(self, array: Array) -> Array:
        return array

    def rank(self, logits: Array, forbidden: Sequence[int], count: int) -> Any:
        names = [given.name for given in self._session.get_inputs()]
        bias = np.zeros(logits.shape[-1], np.float32)
        bias[list(forbidden)] = -np.inf
        kept = np.array([min(count, logits.shape[-1])])
        try:
            return self._session.run(None, dict(zip(names, (logits, bias, kept), strict=True)))
        except Exception as error:  # ONNX Runtime's own exceptions share no public base
            raise GraphError(str(error)) from None


def problems(vocabulary: int, model: ir.Model) -> list[str]:
    backend: Any = Ranker(model)
    return list(rank_case(vocabulary, backend).problems)


@pytest.mark.parametrize("vocabulary", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("opset", OPSETS)
def test_the_best_tokens_are_those_that_numpy_finds(vocabulary: int, opset: int) -> None:
    assert problems(vocabulary, graph_of(vocabulary, opset)) == []


def test_large_vocabularies_are_cut_into_about_as_many_blocks_as_these_are_wide() -> None:
    widths = {vocabulary: block_width(vocabulary) for vocabulary in (600, 4096, 6000, 32000, 58101, 4099, 2 * 4099)}
    assert widths == {600: None, 4096: 64, 6000: 75, 32000: 160, 58101: 181, 4099: None, 2 * 4099: None}
    operators = [[node.op_type for node in graph_of(vocabulary).graph] for vocabulary in (4096, 4099)]
    assert ["ReduceMax" in names for names in operators] == [True, False]


def test_of_equal_tokens_in_many_blocks_the_first_comes_first() -> None:
    logits = np.zeros((1, 1, 6000), np.float32)
    logits[0, 0, [5999, 81, 80, 3000]] = 1
    for count in (1, 2, 6, 75, 6000):
        found, expected = Ranker(graph_of(6000)).rank(logits, (), count), rank_tokens(logits, (), count)
        np.testing.assert_array_equal(found[1], expected[1])


def named(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def leave_blocks_in_order_of_rank(model: ir.Model) -> None:
    order = named(model, "rank/TopK_2")
    ir.convenience.replace_all_uses_with(order.outputs[0], order.inputs[0])  # type: ignore[arg-type]  # it has one


def look_at_one_block(model: ir.Model) -> None:
    model.graph.initializers["block_count"].const_value = ir.tensor(np.array([1]))


def forget_where_blocks_begin(model: ir.Model) -> None:
    model.graph.initializers["block_width"].const_value = ir.tensor(np.array([0]))


def take_the_blocks_with_the_worst(model: ir.Model) -> None:
    named(model, "rank/TopK").attributes["largest"] = ir.AttrInt64("largest", 0)


@pytest.mark.parametrize(
    "spoil",
    [
        leave_blocks_in_order_of_rank,
        look_at_one_block,
        forget_where_blocks_begin,
        take_the_blocks_with_the_worst,
    ],
)
def test_a_graph_that_is_spoilt_is_seen_on_rung_2(spoil: Callable[[ir.Model], None]) -> None:
    model = graph_of(6000)
    spoil(model)
    assert problems(6000, model)

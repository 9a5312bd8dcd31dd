"""The names that the outside world relies on, spelt out."""

from dataclasses import dataclass
from typing import Any

import pytest

from runtime.contract import GRAPH_FILES, Dims, GraphSpec, TensorSpec, contract_problems, graph_specs

B, S, T, P = "batch_size", "encoder_sequence_length", "decoder_sequence_length", "past_decoder_sequence_length"
GROWN = "past_decoder_sequence_length + decoder_sequence_length"


def dims(layers: int) -> Dims:
    return Dims(layers=layers, heads=2, head_dim=4, width=8, vocab_size=100, source_vocab_size=90, max_positions=16)


def names(tensors: tuple[TensorSpec, ...]) -> list[str]:
    return [tensor.name for tensor in tensors]


PRESENT = {
    1: [
        "present.0.decoder.key",
        "present.0.decoder.value",
        "present.0.encoder.key",
        "present.0.encoder.value",
    ],
    2: [
        "present.0.decoder.key",
        "present.0.decoder.value",
        "present.0.encoder.key",
        "present.0.encoder.value",
        "present.1.decoder.key",
        "present.1.decoder.value",
        "present.1.encoder.key",
        "present.1.encoder.value",
    ],
    3: [
        "present.0.decoder.key",
        "present.0.decoder.value",
        "present.0.encoder.key",
        "present.0.encoder.value",
        "present.1.decoder.key",
        "present.1.decoder.value",
        "present.1.encoder.key",
        "present.1.encoder.value",
        "present.2.decoder.key",
        "present.2.decoder.value",
        "present.2.encoder.key",
        "present.2.encoder.value",
    ],
}
PAST = {
    1: [
        "past_key_values.0.decoder.key",
        "past_key_values.0.decoder.value",
        "past_key_values.0.encoder.key",
        "past_key_values.0.encoder.value",
    ],
    2: [
        "past_key_values.0.decoder.key",
        "past_key_values.0.decoder.value",
        "past_key_values.0.encoder.key",
        "past_key_values.0.encoder.value",
        "past_key_values.1.decoder.key",
        "past_key_values.1.decoder.value",
        "past_key_values.1.encoder.key",
        "past_key_values.1.encoder.value",
    ],
    3: [
        "past_key_values.0.decoder.key",
        "past_key_values.0.decoder.value",
        "past_key_values.0.encoder.key",
        "past_key_values.0.encoder.value",
        "past_key_values.1.decoder.key",
        "past_key_values.1.decoder.value",
        "past_key_values.1.encoder.key",
        "past_key_values.1.encoder.value",
        "past_key_values.2.decoder.key",
        "past_key_values.2.decoder.value",
        "past_key_values.2.encoder.key",
        "past_key_values.2.encoder.value",
    ],
}


def test_graphs_lie_where_optimum_looks_for_them() -> None:
    assert GRAPH_FILES == {
        "encode": "encoder_model.onnx",
        "prefill": "decoder_model.onnx",
        "step": "decoder_with_past_model.onnx",
        "begin": "begin_model.onnx",
        "branch": "branch_model.onnx",
        "rank": "search/rank_tokens.onnx",
        "select": "search/select_rows.onnx",
    }


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_names_of_the_encoder(layers: int) -> None:
    graph = graph_specs(dims(layers))["encode"]
    assert names(graph.inputs) == ["input_ids", "attention_mask"]
    assert names(graph.outputs) == ["last_hidden_state"]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_names_of_prefill(layers: int) -> None:
    graph = graph_specs(dims(layers))["prefill"]
    assert names(graph.inputs) == ["encoder_attention_mask", "input_ids", "encoder_hidden_states"]
    assert names(graph.outputs) == ["logits", *PRESENT[layers]]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_names_of_step_whose_cross_attention_goes_in_and_never_comes_out(layers: int) -> None:
    graph = graph_specs(dims(layers))["step"]
    assert names(graph.inputs) == ["encoder_attention_mask", "input_ids", *PAST[layers]]
    assert names(graph.outputs) == ["logits", *(name for name in PRESENT[layers] if ".decoder." in name)]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_names_of_begin_which_gives_the_caches_of_prefill(layers: int) -> None:
    graph = graph_specs(dims(layers))["begin"]
    assert names(graph.inputs) == ["encoder_hidden_states"]
    assert names(graph.outputs) == PRESENT[layers]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_names_of_branch_are_those_of_step_and_who_has_seen_what(layers: int) -> None:
    graph = graph_specs(dims(layers))["branch"]
    assert names(graph.inputs) == ["encoder_attention_mask", "input_ids", "seen", *PAST[layers]]
    assert names(graph.outputs) == ["logits", *(name for name in PRESENT[layers] if ".decoder." in name)]


def test_types_and_axes_of_every_tensor() -> None:
    found = {
        f"{verb}.{tensor.name}": (tensor.dtype, tensor.shape)
        for verb, graph in graph_specs(dims(1)).items()
        for tensor in (*graph.inputs, *graph.outputs)
    }
    assert found == {
        "encode.input_ids": ("int64", (B, S)),
        "encode.attention_mask": ("int64", (B, S)),
        "encode.last_hidden_state": ("float32", (B, S, 8)),
        "prefill.encoder_attention_mask": ("int64", (B, S)),
        "prefill.input_ids": ("int64", (B, T)),
        "prefill.encoder_hidden_states": ("float32", (B, S, 8)),
        "prefill.logits": ("float32", (B, T, 100)),
        "prefill.present.0.decoder.key": ("float32", (B, 2, T, 4)),
        "prefill.present.0.decoder.value": ("float32", (B, 2, T, 4)),
        "prefill.present.0.encoder.key": ("float32", (B, 2, S, 4)),
        "prefill.present.0.encoder.value": ("float32", (B, 2, S, 4)),
        "step.encoder_attention_mask": ("int64", (B, S)),
        "step.input_ids": ("int64", (B, 1)),
        "step.past_key_values.0.decoder.key": ("float32", (B, 2, P, 4)),
        "step.past_key_values.0.decoder.value": ("float32", (B, 2, P, 4)),
        "step.past_key_values.0.encoder.key": ("float32", (B, 2, S, 4)),
        "step.past_key_values.0.encoder.value": ("float32", (B, 2, S, 4)),
        "step.logits": ("float32", (B, 1, 100)),
        "step.present.0.decoder.key": ("float32", (B, 2, GROWN, 4)),
        "step.present.0.decoder.value": ("float32", (B, 2, GROWN, 4)),
        "begin.encoder_hidden_states": ("float32", (B, S, 8)),
        "begin.present.0.decoder.key": ("float32", (B, 2, 0, 4)),
        "begin.present.0.decoder.value": ("float32", (B, 2, 0, 4)),
        "begin.present.0.encoder.key": ("float32", (B, 2, S, 4)),
        "begin.present.0.encoder.value": ("float32", (B, 2, S, 4)),
        "branch.encoder_attention_mask": ("int64", (B, S)),
        "branch.input_ids": ("int64", (B, T)),
        "branch.seen": ("int64", (B, T, P)),
        "branch.past_key_values.0.decoder.key": ("float32", (B, 2, P, 4)),
        "branch.past_key_values.0.decoder.value": ("float32", (B, 2, P, 4)),
        "branch.past_key_values.0.encoder.key": ("float32", (B, 2, S, 4)),
        "branch.past_key_values.0.encoder.value": ("float32", (B, 2, S, 4)),
        "branch.logits": ("float32", (B, T, 100)),
        "branch.present.0.decoder.key": ("float32", (B, 2, GROWN, 4)),
        "branch.present.0.decoder.value": ("float32", (B, 2, GROWN, 4)),
        "rank.logits": ("float32", (B, T, 100)),
        "rank.bias": ("float32", (100,)),
        "rank.count": ("int64", (1,)),
        "rank.log_probabilities": ("float32", (B, T, "count")),
        "rank.tokens": ("int64", (B, T, "count")),
        "select.rows": ("int64", ("selected",)),
        "select.cache.0": ("float32", (B, 2, "length", 4)),
        "select.cache.1": ("float32", (B, 2, "length", 4)),
        "select.selected.0": ("float32", ("selected", 2, "length", 4)),
        "select.selected.1": ("float32", ("selected", 2, "length", 4)),
    }


def replaced(graph: GraphSpec, tensor_name: str, /, **changes: Any) -> GraphSpec:
    return GraphSpec(
        graph.verb,
        *(
            tuple(tensor._replace(**changes) if tensor.name == tensor_name else tensor for tensor in side)
            for side in (graph.inputs, graph.outputs)
        ),
    )


@dataclass
class Deviation:
    verb: str
    graph: GraphSpec
    problems: list[str]


STEP = graph_specs(dims(1))["step"]
DEVIATIONS = {
    "another name": Deviation(
        "step",
        replaced(STEP, "logits", name="scores"),
        ["step: logits is missing", "step: scores is not in the contract"],
    ),
    "another type": Deviation(
        "step",
        replaced(STEP, "input_ids", dtype="int32"),
        ["step: input_ids is int32 (batch_size, 1), expected int64 (batch_size, 1)"],
    ),
    "a frozen axis": Deviation(
        "step",
        replaced(STEP, "logits", shape=(3, 1, 100)),
        ["step: logits is float32 (3, 1, 100), expected float32 (batch_size, 1, 100)"],
    ),
    "a missing output": Deviation(
        "step", STEP._replace(outputs=STEP.outputs[:-1]), ["step: present.0.decoder.value is missing"]
    ),
    "another order": Deviation(
        "step",
        STEP._replace(outputs=STEP.outputs[::-1]),
        ["step: outputs are in another order than in the contract"],
    ),
}


@pytest.mark.parametrize("deviation", DEVIATIONS.values(), ids=DEVIATIONS)
def test_every_deviation_from_the_contract_is_named(deviation: Deviation) -> None:
    contract = graph_specs(dims(1))
    assert contract_problems(contract, contract | {deviation.verb: deviation.graph}) == deviation.problems


def test_all_deviations_are_gathered() -> None:
    contract = graph_specs(dims(1))
    found = contract | {deviation.graph.verb: deviation.graph for deviation in DEVIATIONS.values()}
    found["encode"] = replaced(contract["encode"], "attention_mask", dtype="bool")
    assert len(contract_problems(contract, found)) == 2


def test_graphs_that_keep_the_contract_have_no_problems() -> None:
    assert contract_problems(graph_specs(dims(3)), graph_specs(dims(3))) == []

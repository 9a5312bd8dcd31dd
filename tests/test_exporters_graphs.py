"""What the three graphs are: the contract's names and axes, structure alone, the same numbers in every runtime."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from exporters_support import VARIANTS, Export, random_inputs
from onnx import TensorProto

from exporters.errors import ExportError
from exporters.graphs import dims_of, export_graphs
from exporters.reference import TorchBackend
from models.config import ModelConfig
from models.transformer import Transformer
from runtime.backend import Array
from runtime.contract import BRANCH, GRAPH_FILES, PREFILL, STEP, VERBS, graph_specs
from runtime.exam import load_exam
from runtime.parity import RUNGS
from runtime.session import OrtBackend
from runtime.verbs import call

TYPES = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}
WEIGHTED = (*VERBS, BRANCH)
"""The graphs that compute with the model's weights."""
Exports = Callable[[str], Export]


@pytest.fixture(params=VARIANTS)
def export(request: pytest.FixtureRequest, exports: Exports) -> Export:
    return exports(request.param)


def calls(export: Export, backend: Any, padded_row: int | None = None) -> dict[str, dict[str, Array]]:
    """Outputs of the verbs, each fed with what PyTorch's verb before it gave; a row may be all padding."""
    torch_backend = TorchBackend(export.model)
    source, mask, target = random_inputs(export.config)
    if padded_row is not None:
        mask[padded_row] = 0
    encode = {"input_ids": source, "attention_mask": mask}
    memory = call(torch_backend, "encode", encode)["last_hidden_state"]
    prefill = {"encoder_attention_mask": mask, "input_ids": target[:, :-1], "encoder_hidden_states": memory}
    past = {
        name.replace("present.", "past_key_values."): array
        for name, array in call(torch_backend, "prefill", prefill).items()
        if name != "logits"
    }
    step = {"encoder_attention_mask": mask, "input_ids": target[:, -1:], **past}
    # Three hypotheses, of which none has seen the same.
    seen = np.array([[[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1]]] * len(mask))
    branch = {**step, "input_ids": target[:, 1:4], "seen": seen}
    inputs: dict[str, dict[str, Array]] = {"encode": encode, "prefill": prefill, "step": step, "branch": branch}
    if isinstance(backend, dict):
        return {
            verb: dict(zip(backend[verb].output_names, backend[verb].run(None, inputs[verb]), strict=True))
            for verb in WEIGHTED
        }
    return {verb: call(backend, verb, inputs[verb]) for verb in WEIGHTED}


def assert_same(ours: dict[str, dict[str, Array]], theirs: dict[str, dict[str, Array]]) -> None:
    for verb in WEIGHTED:
        assert ours[verb].keys() == theirs[verb].keys()
        for name, array in ours[verb].items():
            scale = np.abs(theirs[verb][name]).max()
            np.testing.assert_allclose(array, theirs[verb][name], rtol=0, atol=2e-5 * scale, err_msg=f"{verb} {name}")


def test_an_export_climbs_the_ladder(export: Export) -> None:
    assert [rung.name for rung in export.report.rungs] == list(RUNGS)
    assert export.report.passed
    assert export.report.differences == []


def test_the_sentences_of_the_exam_make_the_model_say_different_things(exports: Exports) -> None:
    """Otherwise equal ids would prove nothing."""
    for name in VARIANTS:
        outputs = [case.ids for case in load_exam(exports(name).bundle.path("exam")).tokens]
        assert len({tuple(ids) for ids in outputs}) > 1, name
        assert max(len(set(ids)) for ids in outputs) > 3, name


def test_inputs_and_outputs_are_the_contract_s(export: Export) -> None:
    specs = graph_specs(dims_of(export.config))
    for verb, spec in specs.items():
        graph = export.graph(verb).graph
        for values, tensors in ((graph.input, spec.inputs), (graph.output, spec.outputs)):
            assert [value.name for value in values] == [tensor.name for tensor in tensors]
            for value, tensor in zip(values, tensors, strict=True):
                kind = value.type.tensor_type
                assert kind.elem_type == TYPES[tensor.dtype]
                shape = tuple(axis.dim_param or axis.dim_value for axis in kind.shape.dim)
                assert shape == tensor.shape, (verb, tensor.name)


def test_the_checker_is_clean(export: Export) -> None:
    for verb in GRAPH_FILES:
        onnx.checker.check_model(str(export.bundle.path(verb)), full_check=True)


def test_the_opset_is_the_one_that_was_asked_for(export: Export) -> None:
    for verb in GRAPH_FILES:
        assert {opset.domain: opset.version for opset in export.graph(verb).opset_import} == {"": export.opset}
    assert export.bundle.passport.opset == export.opset
    assert export.bundle.passport.ir_version == max(export.graph(verb).ir_version for verb in WEIGHTED)


def test_attention_is_one_operator_from_opset_23_on_and_spelt_out_before(export: Export) -> None:
    config = export.config
    expected = {
        "encode": config.encoder_layers,
        "prefill": 2 * config.decoder_layers,
        "step": 2 * config.decoder_layers,
        "branch": 2 * config.decoder_layers,
    }
    for verb in WEIGHTED:
        operators = [node.op_type for node in export.graph(verb).graph.node]
        assert operators.count("Attention") == (expected[verb] if export.opset >= 23 else 0)
        assert operators.count("Softmax") == (0 if export.opset >= 23 else expected[verb])


def arrays_inside(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """Every tensor that stands in the file itself: initializers and attributes of nodes."""
    yield from (tensor for tensor in graph.initializer if tensor.data_location != TensorProto.EXTERNAL)
    for node in graph.node:
        for attribute in node.attribute:
            yield from [attribute.t] if attribute.HasField("t") else []
            yield from attribute.tensors
            assert not attribute.HasField("g")


def test_graphs_hold_structure_alone(export: Export) -> None:
    for verb in WEIGHTED:
        graph = export.graph(verb).graph
        assert max((tensor.ByteSize() for tensor in arrays_inside(graph)), default=0) < 200
        assert any(tensor.data_location == TensorProto.EXTERNAL for tensor in graph.initializer)
    sizes = [export.bundle.path(verb).stat().st_size for verb in GRAPH_FILES]
    assert sum(sizes) < 120_000


def test_graphs_are_as_small_for_wide_models_as_for_narrow_ones(export: Export) -> None:
    for verb in WEIGHTED:
        graph = export.graph(verb).graph
        weights = sum(np.prod(tensor.dims) for tensor in graph.initializer if len(tensor.dims) == 2)
        outside = sum(
            np.prod(tensor.dims)
            for tensor in graph.initializer
            if len(tensor.dims) == 2 and tensor.data_location == TensorProto.EXTERNAL
        )
        assert weights == outside > 0


def test_graphs_say_nothing_about_where_they_were_made(export: Export) -> None:
    telling = [b".py", b"site-packages", b"Traceback", b"stack_trace", b'File "', b"pkg.torch", b"namespace"]
    telling += [str(path).encode() for path in (Path.cwd(), Path.home(), Path(sys.prefix), export.bundle.folder)]
    for verb in GRAPH_FILES:
        content = export.bundle.path(verb).read_bytes()
        assert [word for word in telling if word in content] == []


def test_nodes_are_named_after_the_modules_that_they_come_from(export: Export) -> None:
    modules = {name for name, _ in export.model.named_modules(remove_duplicate=False) if name}
    for verb in WEIGHTED:
        names = [node.name for node in export.graph(verb).graph.node]
        assert len(set(names)) == len(names)
        paths = {name.rpartition("/")[0] for name in names}
        strangers = {path for path in paths if path not in modules and path != verb and ".transposed" not in path}
        assert strangers == set()
    prefill = {node.name for node in export.graph(PREFILL).graph.node}
    assert {"decoder.layers.0.self_attention.q_proj/MatMul", "decoder.layers.0.feed_forward.fc1/MatMul"} <= prefill
    assert "output/MatMul" in prefill


@pytest.mark.parametrize("verb", [STEP, BRANCH])
def test_what_has_a_cache_computes_no_cross_attention_keys_and_values(export: Export, verb: str) -> None:
    names = [node.name for node in export.graph(verb).graph.node]
    assert [name for name in names if "cross_attention.k_proj" in name or "cross_attention.v_proj" in name] == []
    assert any("cross_attention.q_proj" in name for name in names)


@pytest.mark.parametrize("verb", [STEP, BRANCH])
def test_attention_itself_appends_to_the_cache_where_it_is_one_operator(export: Export, verb: str) -> None:
    graph = export.graph(verb).graph
    appending = [node for node in graph.node if node.op_type == "Attention" and len(node.output) == 3]
    caches = [name for node in appending for name in node.output[1:]]
    present = [value.name for value in graph.output if value.name.startswith("present.")]
    assert caches == (present if export.opset >= 23 else [])
    makers = {name: node.op_type for node in graph.node for name in node.output}
    assert {makers[name] for name in present} == {"Attention" if export.opset >= 23 else "Concat"}


def test_onnx_runtime_gives_what_pytorch_gives(export: Export) -> None:
    assert_same(calls(export, OrtBackend(export.bundle, threads=1)), calls(export, TorchBackend(export.model)))


def test_the_reference_evaluator_of_onnx_gives_what_pytorch_gives(export: Export) -> None:
    evaluators = {verb: onnx.reference.ReferenceEvaluator(onnx.load(export.bundle.path(verb))) for verb in WEIGHTED}
    assert_same(calls(export, evaluators), calls(export, TorchBackend(export.model)))


@pytest.mark.parametrize("row", [0, 1])
def test_a_row_of_nothing_but_padding_gives_numbers_and_leaves_the_others_alone(export: Export, row: int) -> None:
    others = [index for index in range(3) if index != row]
    for backend in (TorchBackend(export.model), OrtBackend(export.bundle, threads=1)):
        whole, padded = calls(export, backend), calls(export, backend, padded_row=row)
        for verb in WEIGHTED:
            for name, array in padded[verb].items():
                assert np.isfinite(array).all(), (type(backend), verb, name)
                np.testing.assert_allclose(array[others], whole[verb][name][others], rtol=0, atol=1e-4)


@pytest.mark.parametrize("opset", [17, 24, 0])
def test_an_opset_that_is_not_written_is_refused(exports: Exports, opset: int) -> None:
    with pytest.raises(ExportError, match=f"opset is {opset}, expected 18 to 23"):
        next(export_graphs(exports("pre-norm, all shared").model, opset))


def test_a_model_with_too_few_positions_is_refused() -> None:
    config = ModelConfig(
        vocab_size=10,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        max_positions=7,
    )
    with pytest.raises(ExportError, match="max_positions is 7, an export needs more than 7"):
        next(export_graphs(Transformer(config), 23))


class Frozen(torch.nn.Module):
    """What an axis is frozen by: a reshape to the traced size."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return (input_ids * attention_mask).reshape(4, 5)[:, :, None].expand(4, 5, 32).float()


def test_an_axis_that_tracing_froze_is_an_error(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exports("pre-norm, all shared").model
    monkeypatch.setattr(model, "encode", Frozen().forward)
    with pytest.raises(ExportError) as caught:
        next(export_graphs(model, 23))
    assert "encode" in str(caught.value)
    assert "\n" not in str(caught.value)

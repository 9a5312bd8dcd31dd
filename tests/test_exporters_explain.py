"""A fault inside a graph is named by the module that it sits in."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
from exporters_support import VARIANTS, Export
from runtime_support import TINY, tiny_copy

from exporters.errors import ExportError
from exporters.explain import explain
from runtime.bundle import Bundle
from runtime.contract import GRAPH_FILES
from runtime.exam import Exam, load_exam

Exports = Callable[[str], Export]
Change = Callable[[ir.Graph], None]


def spoil(place: str, change: Change | None = None) -> Change:
    """Change the input at the end of the node `place`, by default by adding to one element."""

    def edit(graph: ir.Graph) -> None:
        node = next(node for node in graph if node.name == place)
        value = node.inputs[-1]
        assert value is not None
        assert value.const_value is not None
        array = np.array(value.const_value.numpy())
        array.flat[3] += 0.5
        # A value of its own: the same weights may serve other nodes.
        own = ir.Value(name="fault", shape=value.shape, type=value.type, const_value=ir.tensor(array, name="fault"))
        graph.register_initializer(own)
        node.replace_input_with(len(node.inputs) - 1, own)

    return change or edit


def drop_mask(graph: ir.Graph) -> None:
    node = next(node for node in graph if node.name == "decoder.layers.0.cross_attention.dot_product/Attention")
    node.replace_input_with(3, None)


def epsilon(graph: ir.Graph) -> None:
    node = next(node for node in graph if node.name == "encoder.layers.1.self_residual.norm/LayerNormalization")
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.1)


def freeze(graph: ir.Graph) -> None:
    """Into a shape that only one row has."""
    node = next(node for node in graph if node.op_type == "Reshape")
    shape = ir.Value(
        name="one_row",
        shape=ir.Shape([4]),
        type=ir.TensorType(ir.DataType.INT64),
        const_value=ir.tensor(np.array([1, 2, 4, 8]), name="one_row"),
    )
    graph.register_initializer(shape)
    node.replace_input_with(1, shape)


FAULTS: dict[str, tuple[str, Change, str]] = {
    "a projection of the first encoder layer": (
        "encode",
        spoil("encoder.layers.0.self_attention.v_proj/Add"),
        "encoder.layers.0.self_attention.v_proj in encode",
    ),
    "a norm of the second encoder layer": ("encode", epsilon, "encoder.layers.1.self_residual.norm in encode"),
    "the cross mask of prefill": ("prefill", drop_mask, "decoder.layers.0.cross_attention.dot_product in prefill"),
    "the cross mask of step": ("step", drop_mask, "decoder.layers.0.cross_attention.dot_product in step"),
    "the feed-forward part of step": (
        "step",
        spoil("decoder.layers.0.feed_forward.fc1/Add"),
        "decoder.layers.0.feed_forward.fc1 in step",
    ),
    "the last norm": ("step", spoil("decoder.norm/LayerNormalization"), "decoder.norm in step"),
}


@pytest.fixture(scope="module")
def recorded() -> Exam:
    return load_exam(Bundle(TINY).path("exam"))


def edited(folder: Path, verb: str, change: Change) -> Bundle:
    """The tiny bundle with one graph changed; it was opened before, so that its passport is none the wiser."""
    bundle = Bundle(tiny_copy(folder))
    model = ir.load(bundle.path(verb))
    change(model.graph)
    ir.save(model, folder / GRAPH_FILES[verb])
    return bundle


@pytest.mark.parametrize(("verb", "change", "expected"), FAULTS.values(), ids=FAULTS)
def test_the_first_module_that_is_off_is_named(
    tmp_path: Path, recorded: Exam, verb: str, change: Change, expected: str
) -> None:
    explanation = explain(edited(tmp_path / "tiny", verb, change), recorded)
    assert explanation.sentence.startswith(f"The first to leave tolerance is {expected}: ")
    first = next(place for place, result in enumerate(explanation.modules) if not result.passed)
    assert f"the {first} modules before it are within" in explanation.sentence


def test_a_graph_that_gives_up_is_named_with_its_node(tmp_path: Path, recorded: Exam) -> None:
    explanation = explain(edited(tmp_path / "tiny", "encode", freeze), recorded)
    assert explanation.sentence.startswith("encode gives up on B=2 S=2: ")
    assert explanation.modules == []
    assert "Reshape" in explanation.sentence


@pytest.mark.parametrize("name", VARIANTS)
def test_every_module_of_a_good_bundle_is_compared_and_within_tolerance(exports: Exports, name: str) -> None:
    export = exports(name)
    explanation = explain(export.bundle, load_exam(export.bundle.path("exam")))
    assert all(result.passed for result in explanation.modules)
    assert explanation.sentence.startswith(f"All {len(explanation.modules)} modules inside the graphs are within")
    layers = export.config.encoder_layers + 2 * export.config.decoder_layers
    assert len(explanation.modules) > 8 * layers


def test_modules_come_in_the_order_of_computation(recorded: Exam) -> None:
    found = [result.module for result in explain(Bundle(TINY), recorded).modules if result.graph == "encode"]
    assert found[0] == "encoder.embedding"
    assert found[-1] == "encoder.norm"
    assert [name for name in found if name.endswith("fc2")] == [
        f"encoder.layers.{layer}.feed_forward.fc2" for layer in range(2)
    ]


def test_an_exam_without_modules_explains_nothing(recorded: Exam) -> None:
    silent = msgspec.structs.replace(recorded, graphs=[case for case in recorded.graphs if not case.modules])
    with pytest.raises(ExportError, match="says nothing about the modules"):
        explain(Bundle(TINY), silent)


def test_graphs_with_other_names_are_refused(tmp_path: Path, recorded: Exam) -> None:
    def rename(graph: ir.Graph) -> None:
        for node in graph:
            node.name = str(node.name).replace("layers.1", "blocks.1")

    with pytest.raises(ExportError, match=r"encode has no nodes of these modules: encoder\.layers\.1\."):
        explain(edited(tmp_path / "tiny", "encode", rename), recorded)


def test_the_bundle_is_left_as_it_is(recorded: Exam) -> None:
    before = {path: path.stat().st_mtime_ns for path in TINY.rglob("*")}
    explain(Bundle(TINY), recorded)
    assert {path: path.stat().st_mtime_ns for path in TINY.rglob("*")} == before

"""Faults planted between the model and the bundle: each makes the export fail and leaves nothing."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from exporters_support import Export, recorded_graphs

from exporters import export as module
from exporters.errors import ExportError
from exporters.export import export_bundle
from runtime.bundle import PASSPORT, Bundle

Exports = Callable[[str], Export]


@pytest.fixture
def export(exports: Exports) -> Export:
    return exports("pre-norm, all shared")


@pytest.fixture
def replayed(export: Export, monkeypatch: pytest.MonkeyPatch) -> Export:
    """An export whose graphs need not be traced again."""
    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export))
    return export


def assert_nothing_left(folder: Path) -> None:
    assert list(folder.iterdir()) == []


def weight(graph: ir.Model, ending: str) -> ir.Value:
    return next(value for name, value in graph.graph.initializers.items() if name.endswith(ending))


def change_a_weight(verb: str, graph: ir.Model) -> None:
    if verb == "prefill":
        value = weight(graph, "self_attention.q_proj.weight.T")
        array = np.array(value.const_value.numpy())  # type: ignore[union-attr]
        array[3, 4] += 0.05
        value.const_value = ir.tensor(array, name=value.name)


def drop_a_bias(verb: str, graph: ir.Model) -> None:
    if verb == "step":
        value = weight(graph, "cross_attention.out_proj.bias")
        value.const_value = ir.tensor(np.zeros(value.shape.numpy(), np.float32), name=value.name)  # type: ignore[union-attr]


def swap_outputs(verb: str, graph: ir.Model) -> None:
    if verb == "step":
        key, value = graph.graph.outputs[1], graph.graph.outputs[2]
        key.name, value.name = "tmp", key.name
        key.name = "present.0.decoder.value"
        graph.graph.outputs[1], graph.graph.outputs[2] = value, key


def freeze_an_axis(verb: str, graph: ir.Model) -> None:
    if verb == "encode":
        graph.graph.inputs[0].shape = ir.Shape([3, "encoder_sequence_length"])


def drop_an_output(verb: str, graph: ir.Model) -> None:
    if verb == "prefill":
        graph.graph.outputs.pop()


def ignore_the_mask(verb: str, graph: ir.Model) -> None:
    """Attention without its mask, which only a batch with padding shows."""
    if verb == "step":
        for node in graph.graph:
            if node.op_type == "Attention" and "cross" in str(node.name):
                node.replace_input_with(3, None)


def always_the_first_position(verb: str, graph: ir.Model) -> None:
    """The table of positions read from its beginning, whatever the past."""
    if verb == "step":
        node = next(node for node in graph.graph if str(node.name).endswith("positions/Slice"))
        zero, one = (
            ir.Value(
                name=f"fault_{number}",
                shape=ir.Shape([1]),
                type=ir.TensorType(ir.DataType.INT64),
                const_value=ir.tensor(np.array([number])),
            )
            for number in (0, 1)
        )
        for place, constant in ((1, zero), (2, one)):
            graph.graph.register_initializer(constant)
            node.replace_input_with(place, constant)


def bake_in_a_size(verb: str, graph: ir.Model) -> None:
    """The axes of the inputs are free, but a reshape holds the number of rows that was traced."""
    if verb == "encode":
        ids = graph.graph.inputs[0]
        shape = ir.Value(
            name="fault",
            shape=ir.Shape([2]),
            type=ir.TensorType(ir.DataType.INT64),
            const_value=ir.tensor(np.array([4, -1])),
        )
        graph.graph.register_initializer(shape)
        turned = ir.val("turned", dtype=ir.DataType.INT64)
        node = ir.node("Reshape", [ids, shape], outputs=[turned], name="fault/Reshape")
        for user, place in list(ids.uses()):
            user.replace_input_with(place, turned)
        node.replace_input_with(0, ids)
        graph.graph.insert_before(graph.graph[0], node)


FAULTS: dict[str, tuple[Callable[[str, ir.Model], None], str]] = {
    "a changed weight": (change_a_weight, r"rung 2 \(graph\): prefill: logits is"),
    "a dropped bias": (drop_a_bias, r"rung 2 \(graph\): step: logits is"),
    "swapped outputs": (swap_outputs, r"rung 2 \(graph\): step: present.0.decoder.key is"),
    "a frozen axis": (
        freeze_an_axis,
        r"rung 0 \(structure\): encode: input_ids is int64 \(3, encoder_sequence_length\)",
    ),
    "a dropped output": (drop_an_output, r"rung 0 \(structure\): prefill: present.0.encoder.value is missing"),
    "a mask that is not read": (ignore_the_mask, r"rung 2 \(graph\): step: logits is"),
    "a position that stands still": (always_the_first_position, r"rung 2 \(graph\): step: logits is"),
    "a size baked in": (bake_in_a_size, r"rung 0 \(structure\): encode: last_hidden_state is float32 \(4, "),
}


@pytest.mark.parametrize(("fault", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_fault_between_the_model_and_the_bundle_fails_the_export(
    export: Export,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[str, ir.Model], None],
    expected: str,
) -> None:
    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export, fault))
    with pytest.raises(ExportError, match=expected) as caught:
        export_bundle(export.checkpoint, tmp_path / "bundle")
    assert "the export failed the sweep over sizes that were not traced" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_nothing_left(tmp_path)


def test_a_graph_that_the_checker_refuses_fails_the_export(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown_operator(verb: str, graph: ir.Model) -> None:
        if verb == "prefill":
            graph.graph[3].op_type = "Teleport"

    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export, unknown_operator))
    with pytest.raises(ExportError, match=r"prefill: onnx\.checker refuses the graph"):
        export_bundle(export.checkpoint, tmp_path / "bundle")
    assert_nothing_left(tmp_path)


def test_a_failure_keeps_the_bundle_that_was_there(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export))
    export_bundle(export.checkpoint, tmp_path / "bundle")
    before = (tmp_path / "bundle" / PASSPORT).read_bytes()
    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export, change_a_weight))
    with pytest.raises(ExportError):
        export_bundle(export.checkpoint, tmp_path / "bundle", force=True)
    assert (tmp_path / "bundle" / PASSPORT).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    Bundle(tmp_path / "bundle")


def test_an_interruption_while_the_old_bundle_makes_room_brings_it_back(
    replayed: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "bundle"
    export_bundle(replayed.checkpoint, target)
    (target / "mark").touch()
    rename = Path.rename

    def interrupted(path: Path, to: Path) -> Path:
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_bundle(replayed.checkpoint, target, force=True)
    assert (target / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("stage", ["loading prefill", "writing the exam", "sitting the exam"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_at_any_stage_leaves_nothing(
    replayed: Export, tmp_path: Path, stage: str, error: type[BaseException]
) -> None:
    def say(now: str) -> None:
        if now == stage:
            raise error

    with pytest.raises(error):
        export_bundle(replayed.checkpoint, tmp_path / "bundle", say=say)
    assert_nothing_left(tmp_path)

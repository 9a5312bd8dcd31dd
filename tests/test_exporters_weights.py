"""One blob: every weight once, aligned, whatever name and orientation the graphs ask for it by."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from exporters_support import VARIANTS, Export

from exporters.weights import ALIGNMENT, PAGE, PAGED, WeightBlob, content_key
from models.checkpoint import unique_parameters
from runtime.backend import Array
from runtime.bundle import WEIGHTS
from runtime.contract import BRANCH, VERBS

Exports = Callable[[str], Export]


class External(NamedTuple):
    """Where an initializer points."""

    name: str
    location: str
    offset: int
    length: int
    shape: tuple[int, ...]


@pytest.fixture(params=VARIANTS)
def export(request: pytest.FixtureRequest, exports: Exports) -> Export:
    return exports(request.param)


def externals(model: onnx.ModelProto) -> list[External]:
    found = []
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert tensor.data_type == onnx.TensorProto.FLOAT
            found.append(
                External(
                    tensor.name,
                    entries["location"],
                    int(entries["offset"]),
                    int(entries["length"]),
                    tuple(tensor.dims),
                )
            )
    return found


def all_externals(export: Export) -> list[External]:
    return [external for verb in (*VERBS, BRANCH) for external in externals(export.graph(verb))]


def weights_of(export: Export) -> dict[str, Array]:
    """What must be stored: every parameter once, and the table of positions."""
    weights = {name: tensor.numpy() for name, tensor in unique_parameters(export.model).items()}
    if export.config.positions != "learned":
        weights["positions"] = export.model.encoder.embedding.positions.table.numpy()
    return weights


def test_every_initializer_of_every_graph_points_into_the_one_blob(export: Export) -> None:
    size = (export.bundle.folder / WEIGHTS).stat().st_size
    for external in all_externals(export):
        assert external.location == WEIGHTS
        assert external.length == 4 * np.prod(external.shape)
        assert external.offset + external.length <= size


def test_the_blob_is_hardly_larger_than_the_weights(export: Export) -> None:
    unique = {content_key(array): array.nbytes for array in weights_of(export).values()}
    size = (export.bundle.folder / WEIGHTS).stat().st_size
    assert sum(unique.values()) <= size <= 1.02 * sum(unique.values()) + ALIGNMENT * len(unique)


def test_offsets_are_aligned_and_regions_do_not_overlap(export: Export) -> None:
    regions = sorted({(external.offset, external.length) for external in all_externals(export)})
    end = 0
    for offset, length in regions:
        assert offset % (PAGE if length >= PAGED else ALIGNMENT) == 0
        assert offset >= end
        end = offset + length
    assert end == (export.bundle.folder / WEIGHTS).stat().st_size


def test_no_two_regions_hold_the_same_numbers(export: Export) -> None:
    blob = (export.bundle.folder / WEIGHTS).read_bytes()
    regions = {(external.offset, external.length) for external in all_externals(export)}
    assert len({blob[offset : offset + length] for offset, length in regions}) == len(regions)


def test_every_weight_is_stored_bit_for_bit_in_one_orientation(export: Export) -> None:
    blob = (export.bundle.folder / WEIGHTS).read_bytes()
    stored = {
        content_key(np.frombuffer(blob, np.float32, external.length // 4, external.offset).reshape(external.shape))
        for external in all_externals(export)
    }
    weights = weights_of(export)
    orientations = {name: {content_key(array), content_key(array.T)} & stored for name, array in weights.items()}
    assert [name for name, found in orientations.items() if len(found) != 1] == []
    assert set.union(*orientations.values()) == stored


def test_initializers_carry_the_names_of_the_model_s_weights(export: Export) -> None:
    """With ".T" where a projection is stored as `MatMul` reads it."""
    names = {name for name, _ in export.model.named_parameters()} | {name for name, _ in export.model.named_buffers()}
    assert {external.name.removesuffix(".T") for external in all_externals(export)} <= names


def test_graphs_that_read_the_same_weight_read_the_same_region(export: Export) -> None:
    prefill, step = externals(export.graph("prefill")), externals(export.graph("step"))
    regions = {external.name: external.offset for external in prefill}
    shared = [external for external in step if external.name in regions]
    assert len(shared) == len(step)
    assert all(regions[external.name] == external.offset for external in shared)


@pytest.mark.parametrize("name", ["pre-norm, all shared", "as Marian, opset 18"])
def test_a_tied_head_and_both_embeddings_are_one_region(exports: Exports, name: str) -> None:
    export = exports(name)
    table = (export.config.vocab_size, export.config.d_model)
    regions = {external.offset for external in all_externals(export) if external.shape in (table, table[::-1])}
    assert len(regions) == 1


def test_separate_embeddings_and_head_are_three_regions(exports: Exports) -> None:
    export = exports("post-norm, nothing shared")
    wide = {external.offset for external in all_externals(export) if 61 in external.shape or 50 in external.shape}
    assert len(wide) == 4  # with the bias of the head


# The blob by itself, on graphs written by hand.


def graph_of(arrays: dict[str, Array]) -> ir.Model:
    """A graph that gives `arrays`, its initializers, one output each."""
    initializers = [
        ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT), const_value=ir.tensor(array)
        )
        for name, array in arrays.items()
    ]
    outputs = [ir.val(f"out {value.name}", dtype=ir.DataType.FLOAT, shape=value.shape) for value in initializers]
    nodes = [
        ir.node("Identity", [value], outputs=[output], name=f"read {value.name}")
        for value, output in zip(initializers, outputs, strict=True)
    ]
    graph = ir.Graph([], outputs, nodes=nodes, initializers=initializers, opset_imports={"": 18}, name="reads")
    return ir.Model(graph, ir_version=10)


def assert_reads(path: Path, arrays: dict[str, Array]) -> None:
    """The graph in `path` is valid and gives exactly `arrays`."""
    onnx.checker.check_model(str(path), full_check=True)
    found = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {})
    for output, array in zip(found, arrays.values(), strict=True):
        np.testing.assert_array_equal(output, array)


def blob_of(folder: Path, *graphs: dict[str, Array], names: dict[bytes, str] | None = None) -> list[Path]:
    """Files of the graphs that were moved into one blob in `folder`."""
    files = []
    with WeightBlob(folder / WEIGHTS, names or {}) as blob:
        for index, arrays in enumerate(graphs):
            model = graph_of(arrays)
            blob.take_from(model)
            files.append(folder / f"{index}.onnx")
            ir.save(model, files[-1])
    return files


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_equal_tensors_are_stored_once_across_graphs_and_names(tmp_path: Path) -> None:
    matrix, vector = random(8, 4), random(16)
    graphs: list[dict[str, Array]] = [
        {"a": matrix, "b": vector},
        {"c": vector, "d": matrix, "e": matrix.copy()},
    ]
    for file, arrays in zip(blob_of(tmp_path, *graphs), graphs, strict=True):
        assert_reads(file, arrays)
    assert (tmp_path / WEIGHTS).stat().st_size == matrix.nbytes + vector.nbytes


def test_a_transposed_tensor_is_read_from_the_one_that_is_stored(tmp_path: Path) -> None:
    matrix = random(8, 4)
    graphs: list[dict[str, Array]] = [
        {"embedding": matrix},
        {"head": matrix.T},
        {"embedding": matrix, "head": matrix.T},
        {"head": matrix.T, "other head": matrix.T.copy()},
    ]
    files = blob_of(tmp_path, *graphs, names={content_key(matrix): "embedding"})
    for file, arrays in zip(files, graphs, strict=True):
        assert_reads(file, arrays)
    assert (tmp_path / WEIGHTS).stat().st_size == matrix.nbytes
    operators = [[node.op_type for node in onnx.load(file, load_external_data=False).graph.node] for file in files]
    assert [names.count("Transpose") for names in operators] == [0, 1, 1, 1]


def test_tensors_of_equal_bytes_and_different_shape_are_different(tmp_path: Path) -> None:
    vector = random(32)
    arrays = {"a": vector, "b": vector.reshape(8, 4), "c": vector.reshape(4, 8)}
    (file,) = blob_of(tmp_path, arrays)
    assert_reads(file, arrays)


def test_scalars_and_integers_stay_inline(tmp_path: Path) -> None:
    (file,) = blob_of(
        tmp_path, {"scalar": np.array(3, np.float32), "single": np.ones((1, 1), np.float32), "vector": random(4)}
    )
    assert [external.name for external in externals(onnx.load(file, load_external_data=False))] == ["constant_0"]
    assert (tmp_path / WEIGHTS).stat().st_size == 16


def test_large_tensors_begin_on_a_page_and_small_ones_on_a_cache_line(tmp_path: Path) -> None:
    arrays = {"a": random(3), "b": random(128, 129, seed=1), "c": random(5, seed=2), "d": random(7, seed=3)}
    (file,) = blob_of(tmp_path, arrays)
    offsets = {external.shape: external.offset for external in externals(onnx.load(file, load_external_data=False))}
    end = PAGE + 4 * 128 * 129
    assert offsets == {
        (3,): 0,
        (128, 129): PAGE,
        (5,): end + -end % ALIGNMENT,
        (7,): end + -end % ALIGNMENT + ALIGNMENT,
    }
    assert_reads(file, arrays)


def test_weights_are_named_after_the_model_s_own(tmp_path: Path) -> None:
    matrix, vector = random(8, 4), random(16)
    names = {content_key(matrix): "layers.0.weight", content_key(vector): "layers.0.bias"}
    files = blob_of(tmp_path, {"val_3": matrix, "val_1": vector}, {"val_9": vector}, names=names)
    found = [[external.name for external in externals(onnx.load(file, load_external_data=False))] for file in files]
    assert sorted(found[0]) == ["layers.0.bias", "layers.0.weight"]
    assert found[1] == ["layers.0.bias"]


def test_a_name_that_is_taken_by_another_tensor_does_not_mix_them_up(tmp_path: Path) -> None:
    """The exporter may have given a weight's name to something else."""
    matrix, other = random(8, 4), random(8, 4, seed=5)
    names = {content_key(matrix): "weight"}
    arrays = {"weight": other, "val_0": matrix}
    (file,) = blob_of(tmp_path, arrays, names=names)
    assert_reads(file, arrays)


def test_two_tensors_under_each_other_s_names_are_not_mixed_up(tmp_path: Path) -> None:
    one, two = random(8, 4), random(8, 4, seed=5)
    arrays = {"one": two, "two": one}
    (file,) = blob_of(tmp_path, arrays, names={content_key(one): "one", content_key(two): "two"})
    assert_reads(file, arrays)


def test_a_transposed_read_does_not_mistake_a_namesake_for_its_source(tmp_path: Path) -> None:
    matrix, other = random(8, 4), random(8, 4, seed=5)
    names = {content_key(matrix): "weight"}
    arrays = {"weight": other, "val_0": matrix.T}
    (_, file) = blob_of(tmp_path, {"x": matrix}, arrays, names=names)
    assert_reads(file, arrays)


def test_a_content_key_tells_type_shape_and_numbers_apart() -> None:
    array = random(4, 6)
    assert content_key(array) == content_key(array.copy()) == content_key(array.T.copy().T)
    others = [array.T, array.reshape(6, 4), array.astype(np.float64), array + 1, array.ravel()]
    assert len({content_key(other) for other in (array, *others)}) == 6

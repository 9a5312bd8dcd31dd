"""Float graphs to lower precision: what the integers are, what a product of them gives, and that it is stored once."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from runtime_support import TINY

from exporters.checking import check_graph
from exporters.errors import ExportError
from exporters.lowering import _write
from exporters.precision import Lowering, check_opset
from exporters.quantize import BLOCKS, Precision, block_of, blocks_int4, fits_half, rounded, rows_int8
from runtime.backend import Array
from runtime.bundle import WEIGHTS
from runtime.contract import GRAPH_FILES

LEVELS = (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
WIDTH, OUT, VOCABULARY = 64, 48, 40


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def value(name: str, array: Array) -> ir.Value:
    return ir.val(name, const_value=ir.tensor(array, name=name))


def product_graph(weight: Array, *, transposed: bool = False) -> ir.Model:
    """`x (B, T, K)` times `weight (N, K)`, which comes as `(K, N)` or as the `Transpose` of a constant, and a sum."""
    stored = value("layer.weight" if transposed else "layer.weight.T", weight if transposed else weight.T.copy())
    states = ir.val("x", dtype=ir.DataType.FLOAT, shape=["batch", "length", weight.shape[1]])
    nodes, right = [], stored
    if transposed:
        nodes.append(ir.node("Transpose", [stored], {"perm": [1, 0]}, name="layer/Transpose"))
        right = nodes[0].outputs[0]
    nodes.append(ir.node("MatMul", [states, right], name="layer/MatMul"))
    # The sum keeps the product from being an output, which would make it the head of the model.
    nodes.append(ir.node("Neg", [nodes[-1].outputs[0]], name="layer/Neg"))
    output = nodes[-1].outputs[0]
    output.name, output.type, output.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", "length", None])
    return ir.Model(
        ir.Graph([states], [output], nodes=nodes, initializers=[stored], opset_imports={"": 23}, name="product"),
        ir_version=10,
    )


def tied_graph(table: Array) -> ir.Model:
    """Looks up `ids` in `table (V, E)`, and multiplies with its transpose."""
    stored, turned = value("tokens.weight", table), value("tokens.weight.T", table.T.copy())
    ids = ir.val("ids", dtype=ir.DataType.INT64, shape=["batch", "length"])
    gather = ir.node("Gather", [stored, ids], {"axis": 0}, name="tokens/Gather")
    row = gather.outputs[0]
    row.name, row.type, row.shape = "row", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", "length", WIDTH])
    head = ir.node("MatMul", [row, turned], name="output/MatMul")
    logits = head.outputs[0]
    logits.name, logits.type = "logits", ir.TensorType(ir.DataType.FLOAT)
    logits.shape = ir.Shape(["batch", "length", len(table)])
    nodes, constants = [gather, head], [stored, turned]
    graph = ir.Graph([ids], [logits, row], nodes=nodes, initializers=constants, opset_imports={"": 23}, name="tied")
    return ir.Model(graph, ir_version=10)


def written(model: ir.Model, precision: Precision, folder: Path, *, excluded: tuple[str, ...] = ()) -> Lowering:
    """`model` in `precision`, as a bundle has it."""
    floats = folder / "floats"
    floats.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exporters.lowering.GRAPH_FILES", {"only": "only.onnx"})
        ir.save(model, floats / "only.onnx")
        return _write(floats, folder, precision, excluded)


def run(folder: Path, inputs: Mapping[str, Array], level: ort.GraphOptimizationLevel = LEVELS[1]) -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort.InferenceSession(folder / "only.onnx", options, providers=["CPUExecutionProvider"])
    result: Array = session.run(None, dict(inputs))[0]
    return result


def simulated(states: Array, weight: Array, precision: Precision) -> Array:
    """The same scheme in numpy: integers of rows times integers of rows, scaled by both."""
    if precision == "int8":
        left, right = rows_int8(states.reshape(-1, states.shape[-1])), rows_int8(weight)
        products = left.integers.astype(np.int64) @ right.integers.T.astype(np.int64)
        whole = products * left.scales[:, None].astype(np.float64) * right.scales
    else:
        rows = states.reshape(-1, states.shape[-1])
        whole = (rounded(rows, precision) if precision == "fp16" else rows) @ rounded(weight, precision).T
        if precision == "fp16":
            whole = whole.astype(np.float16)
    result: Array = -whole.reshape(*states.shape[:-1], -1)
    return result


# Numbers


def test_rows_of_int8_are_within_half_a_step_and_their_largest_is_exact() -> None:
    weight = random(OUT, WIDTH)
    integers, scales = rows_int8(weight)
    near = integers * scales[:, None]
    assert integers.dtype == np.int8
    assert np.abs(integers).max(1).tolist() == [127] * OUT
    assert (np.abs(near - weight) <= scales[:, None] * 0.5001).all()
    np.testing.assert_array_equal(near, rounded(weight, "int8"))


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_int4_are_within_a_step_and_their_farthest_is_near(block: int) -> None:
    weight = random(OUT, 3 * block)
    assert block_of(3 * 16) == 16
    packed, scales = blocks_int4(weight, block)
    assert packed.shape == (OUT, 3, block // 2)
    near = (np.stack([packed & 15, packed >> 4], -1).reshape(OUT, 3, block).astype(np.float32) - 8) * scales[..., None]
    parts = weight.reshape(OUT, 3, block)
    assert (np.abs(near - parts) <= np.abs(scales)[..., None] * 1.01).all()
    farthest = np.abs(parts).argmax(2)[..., None]
    np.testing.assert_allclose(
        np.take_along_axis(near, farthest, 2), np.take_along_axis(parts, farthest, 2), rtol=2**-11
    )


def test_rows_of_zeros_stay_zeros() -> None:
    weight = random(4, WIDTH)
    weight[1] = 0
    for precision in ("fp16", "int8", "int4"):
        near = rounded(weight, precision)
        assert not near[1].any()
        assert np.isfinite(near).all()
        assert 0 < np.abs(near - weight).max() < 1


def test_what_float16_cannot_hold_is_infinite_and_known() -> None:
    weight = random(2, 3)
    weight[1, 2] = 65504
    assert fits_half(weight)
    weight[1, 2] = -65505
    assert not fits_half(weight)
    weight[1, 2] = 1e6
    assert np.isinf(rounded(weight, "fp16")[1, 2])


def test_what_cannot_be_cut_into_blocks_is_left_alone() -> None:
    assert block_of(40) is None
    weight = random(3, 40)
    np.testing.assert_array_equal(rounded(weight, "int4"), weight)


@pytest.mark.parametrize("opset", [18, 20])
def test_int8_needs_scales_for_rows_of_activations(opset: int) -> None:
    with pytest.raises(ExportError, match=f"int8 needs opset 21 or newer, not {opset}"):
        check_opset("int8", opset)
    check_opset("int8", 21)
    check_opset("int4", opset)
    check_opset("fp16", opset)


# Products


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_a_product_is_that_of_the_simulation(
    tmp_path: Path, precision: Precision, level: ort.GraphOptimizationLevel, *, transposed: bool
) -> None:
    weight, states = random(OUT, WIDTH), random(3, 5, WIDTH, seed=1)
    lowering = written(product_graph(weight, transposed=transposed), precision, tmp_path)
    assert (list(lowering.rounded), lowering.kept) == (["layer.weight"], set())
    found, expected = run(tmp_path, {"x": states}, level), simulated(states, weight, precision)
    # Two orders of addition round differently to float16.
    share = {"fp16": 1e-3, "int8": 1e-5, "int4": 1e-5}[precision]
    assert np.abs(found - expected).max() <= share * np.abs(expected).max()
    assert np.abs(found + states @ weight.T).max() > 1e-4  # it is rounded


def test_integers_are_multiplied_exactly(tmp_path: Path) -> None:
    numbers = np.random.default_rng(3)
    weight = numbers.integers(-127, 128, (OUT, WIDTH)).astype(np.float32)
    states = numbers.integers(-127, 128, (2, 3, WIDTH)).astype(np.float32)
    weight[:, 0], states[..., 1] = 127, -127  # so that scales are 1
    written(product_graph(weight), "int8", tmp_path)
    np.testing.assert_array_equal(run(tmp_path, {"x": states}), -(states @ weight.T))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_a_row_of_zeros_or_of_tiny_numbers_gives_numbers(
    tmp_path: Path, precision: Precision, level: ort.GraphOptimizationLevel
) -> None:
    states = random(2, 3, WIDTH)
    states[0, 1], states[1, 0] = 0, 1e-42
    written(product_graph(random(OUT, WIDTH, seed=1)), precision, tmp_path)
    found = run(tmp_path, {"x": states}, level)
    assert np.isfinite(found).all()
    assert not found[0, 1].any()
    assert np.abs(found[1, 0]).max() < 1e-37
    assert np.abs(found[1, 1]).min() > 0


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_a_row_does_not_depend_on_its_neighbours(tmp_path: Path, precision: Precision) -> None:
    states = random(4, 3, WIDTH)
    written(product_graph(random(OUT, WIDTH, seed=1)), precision, tmp_path)
    alone = run(tmp_path, {"x": states[1:2, :1]})
    states[0] *= 1000
    np.testing.assert_allclose(run(tmp_path, {"x": states})[1:2, :1], alone, atol=1e-5, rtol=0)


def test_products_of_the_same_states_share_their_integers() -> None:
    lowering = Lowering("int8")
    graph = ir.load(TINY / GRAPH_FILES["step"])
    lowering.apply(graph)
    kinds = [node.op_type for node in graph.graph]
    assert kinds.count("MatMulIntegerToFloat") == 9  # q, k, v and out; q and out; fc1 and fc2; the logits
    assert kinds.count("QuantizeLinear") == 7  # q, k and v read the same
    assert kinds.count("ConstantOfShape") == 1  # the states of a step all have as many rows


# Look-ups, and what is stored


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_a_table_that_is_looked_up_and_multiplied_with_is_stored_once(
    tmp_path: Path, precision: Precision, level: ort.GraphOptimizationLevel
) -> None:
    table = random(VOCABULARY, WIDTH)
    written(tied_graph(table), precision, tmp_path)
    ids = np.array([[0, 5, VOCABULARY - 1], [7, 7, 1]])
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort.InferenceSession(tmp_path / "only.onnx", options, providers=["CPUExecutionProvider"])
    logits, rows = session.run(None, {"ids": ids})
    near = rounded(table, precision)
    np.testing.assert_allclose(rows, near[ids], rtol=1e-6, atol=1e-7)
    # Logits of fp16 are summed up and kept in float32.
    share = {"fp16": 1e-6, "int8": 0.02, "int4": 1e-5}[precision]
    assert np.abs(logits - near[ids] @ near.T).max() <= share * np.abs(logits).max()
    numbers = {"fp16": 2 * table.size, "int8": table.size + 4 * len(table), "int4": table.size // 2 + 4 * len(table)}
    assert (tmp_path / WEIGHTS).stat().st_size <= numbers[precision] + 64


def test_an_excluded_weight_stays_float32_wherever_it_is_read(tmp_path: Path) -> None:
    table = random(VOCABULARY, WIDTH)
    lowering = written(tied_graph(table), "int8", tmp_path, excluded=("tokens.weight",))
    assert (list(lowering.rounded), lowering.kept) == ([], {"tokens.weight"})
    ids = np.array([[3, 4]])
    np.testing.assert_allclose(run(tmp_path, {"ids": ids}), table[ids] @ table.T, atol=1e-4)
    assert (tmp_path / WEIGHTS).stat().st_size == table.nbytes


@pytest.mark.parametrize(("precision", "width"), [("int4", 40), ("fp16", WIDTH)])
def test_what_a_precision_cannot_hold_stays_float32(tmp_path: Path, precision: Precision, width: int) -> None:
    weight = random(OUT, width)
    weight[3, 4] = 1e6
    lowering = written(product_graph(weight), precision, tmp_path)
    assert lowering.kept == {"layer.weight"}
    states = random(1, 2, width)
    np.testing.assert_allclose(run(tmp_path, {"x": states}), -(states @ weight.T), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_graphs_of_a_bundle_are_valid_and_small_and_name_the_model_s_weights(
    tmp_path: Path, precision: Precision
) -> None:
    lowering = _write(TINY, tmp_path, precision, ())
    before = {name for file in GRAPH_FILES.values() for name in ir.load(TINY / file).graph.initializers}
    for verb, file in GRAPH_FILES.items():
        check_graph(tmp_path / file, verb)
        graph = ir.load(tmp_path / file).graph
        names = {name for name, found in graph.initializers.items() if isinstance(found.const_value, ir.ExternalTensor)}
        kinds = (".T", ".int8", ".int4", ".half", ".scale", ".scales", ".blocks")
        for name in names:
            stem = name
            while stem.endswith(kinds):
                stem = stem.rpartition(".")[0]
            assert {stem, f"{stem}.T"} & before, name
    share = {"fp16": 0.53, "int8": 0.36, "int4": 0.31}[precision]  # biases and norms of so small a model weigh
    assert (tmp_path / WEIGHTS).stat().st_size <= share * (TINY / WEIGHTS).stat().st_size
    assert lowering.kept == set()
    assert "encoder.embedding.tokens.weight" in lowering.rounded

"""Float graphs to graphs of lower precision: products and look-ups in constant matrices, whatever graph has them.

int8: `x (.., K)` times `W (N, K)` is computed in integers. Every row of x has its own scale, so that what a row gives
never depends on its neighbours; every row of W has its own, too. int4: `MatMulNBits`, one scale for each block of a row
of W. float16: products in float16, all between them in float32. Inputs and outputs of a graph stay what they are.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from runtime.backend import Array

from .errors import ExportError
from .quantize import INT8, Precision, Quantized, block_of, blocks_int4, fits_half, rows_int8

CONTRIB = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""
CONTRIB_OPERATORS = ("MatMulIntegerToFloat", "MatMulNBits", "GatherBlockQuantized")
INT8_OPSET = 21
"""The first whose QuantizeLinear takes a scale for each block of an axis."""
ZERO = 128
"""The zero point of activations in uint8: kernels for unsigned activations are ten times as fast as for signed ones."""
Attribute = int | ir.TensorProtocol
ACCURACY = 1
"""Of `MatMulNBits`: float32 activations. With int8 ones (4), three times as fast for a row alone, rounding that
differs in the seventh digit between padded and alone turns an integer around, and a logit of the shipped model moves by
0.05.
"""
FLOAT, HALF, BYTE = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.UINT8


def check_opset(precision: Precision, opset: int) -> None:
    """Refuse what cannot be said in `opset`.

    Raises:
        ExportError: int8 needs a newer one.
    """
    if precision == "int8" and opset < INT8_OPSET:
        raise ExportError(
            f"int8 needs opset {INT8_OPSET} or newer, not {opset}: scales for rows of activations came then"
        )


class _Use(NamedTuple):
    """A node that reads a constant matrix, and which."""

    node: ir.Node
    name: str
    """The model's name of the weight."""
    weight: Array
    """`(N, K)`, as PyTorch has it."""


class Lowering:
    """Rewrites graphs to `precision`; the same weight becomes the same numbers in every graph.

    Args:
        precision: Not fp32.
        excluded: Names of weights that stay float32 wherever they are read.
    """

    def __init__(self, precision: Precision, excluded: Collection[str] = ()) -> None:
        self._precision = precision
        self._excluded = excluded
        self._quantized: dict[str, Quantized] = {}
        self.kept: set[str] = set()
        """Weights that stayed float32: those excluded, and those that `precision` has no room for."""
        self.rounded: dict[str, None] = {}
        """Weights that were rounded, in the order in which they are read."""

    def apply(self, model: ir.Model) -> None:
        """Rewrite `model`, whose initializers have the names of the model's weights, with ".T" where transposed."""
        graph = model.graph
        outputs = {id(value) for value in graph.outputs}
        editor = _Editor(graph)
        for use in list(_uses(graph)):
            if use.name in self._excluded or not self._has_room(use.weight):
                self.kept.add(use.name)
                continue
            self.rounded[use.name] = None
            self._rewrite(editor, use, outputs)
        if self._precision != "fp16" and self.rounded:
            graph.opset_imports[CONTRIB] = 1
        for node in [node for node in graph if _reads_positions(node)]:
            _halve_table(editor, node)
        _drop_unused(graph)

    def _has_room(self, weight: Array) -> bool:
        if self._precision == "fp16":
            return fits_half(weight)
        # Scales of int4 are kept as float16.
        return self._precision == "int8" or (block_of(weight.shape[1]) is not None and fits_half(weight / 8))

    def _rewrite(self, editor: "_Editor", use: _Use, outputs: Collection[int]) -> None:
        gather = use.node.op_type == "Gather"
        if self._precision == "fp16":
            if gather:
                _half_gather(editor, use)
            elif _reaches(use.node.outputs[0], outputs):
                _half_head(editor, use)
            else:
                _half_product(editor, use)
            return
        if use.name not in self._quantized:
            block = block_of(use.weight.shape[1])
            self._quantized[use.name] = (
                rows_int8(use.weight) if self._precision == "int8" else blocks_int4(use.weight, block or 0)
            )
        rewrite = {
            ("int8", True): _int8_gather,
            ("int8", False): _int8_product,
            ("int4", True): _int4_gather,
            ("int4", False): _int4_product,
        }[self._precision, gather]
        rewrite(editor, use, self._quantized[use.name])


def _uses(graph: ir.Graph) -> Iterator[_Use]:
    """Every product with a constant matrix on the right, and every look-up in one."""
    for node in graph:
        if node.op_type == "MatMul":
            if (found := _constant(node.inputs[1])) is not None:
                yield _Use(node, _name(node, found[0]), np.ascontiguousarray(found[1].T))
        elif (
            node.op_type == "Gather"
            and not _reads_positions(node)
            and node.attributes.get_int("axis", 0) == 0
            and (found := _constant(node.inputs[0])) is not None
        ):
            yield _Use(node, _name(node, found[0]), found[1])


def _reads_positions(node: ir.Node) -> bool:
    """Whether vectors of positions come out of `node`: sliced off their table, or looked up in it by branches."""
    table = node.inputs[0] if node.op_type in ("Slice", "Gather") else None
    return table is not None and str(table.name).endswith("positions.table")


def _name(node: ir.Node, initializer: str) -> str:
    """The weight's name: that of its initializer, or of the module where the exporter changed the numbers."""
    if initializer.startswith("constant_"):
        return f"{str(node.name).rpartition('/')[0]}.weight"
    return initializer.removesuffix(".T")


def _constant(value: ir.Value | None) -> tuple[str, Array] | None:
    """Name and numbers of a float32 matrix that is constant, directly or as the transpose of one."""
    if value is None:
        return None
    producer = value.producer()
    if producer is not None and producer.op_type == "Transpose":
        found = _constant(producer.inputs[0])
        return None if found is None else (found[0], found[1].T)
    tensor = value.const_value
    if not value.is_initializer() or tensor is None or tensor.dtype != FLOAT or len(tensor.shape) != 2:
        return None
    return str(value.name), tensor.numpy()


def _reaches(value: ir.Value, outputs: Collection[int]) -> bool:
    """Whether `value` is an output of the graph, or is after a bias was added."""
    after = [node.outputs[0] for node in value.consumers() if node.op_type == "Add"]
    return any(id(one) in outputs for one in (value, *after))


class _Editor:
    """Puts new nodes before the one that they replace, and knows what it has computed already."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._made: dict[str, ir.Value] = {}
        self._names = {node.name for node in graph}

    def constant(self, name: str, array: Array) -> ir.Value:
        """The initializer `name`; it is made once."""
        if name not in self.graph.initializers:
            tensor = ir.tensor(np.array(array, order="C"), name=name)
            value = ir.val(name, const_value=tensor)
            self.graph.register_initializer(value)
        return self.graph.initializers[name]

    def scalar(self, number: np.generic) -> ir.Value:
        """A number of its own type."""
        return self.constant(f"{number.dtype}_{number:g}", np.array(number))

    def op(
        self, at: ir.Node, kind: str, inputs: Sequence[ir.Value | None], dtype: ir.DataType, **attributes: Attribute
    ) -> ir.Value:
        """What a new node gives that stands before `at` and is named after its module.

        Args:
            at: The node to be replaced.
            kind: The operator; one of `CONTRIB_OPERATORS` is of that domain.
            inputs: Values, None for an optional one that is left out.
            dtype: Of the output.
            attributes: Of the operator.
        """
        stem = f"{str(at.name).rpartition('/')[0] or self.graph.name}/{kind}"
        name, count = stem, 1
        while name in self._names:
            name, count = f"{stem}_{count + 1}", count + 1
        self._names.add(name)
        output = ir.val(name, dtype=dtype)
        domain = CONTRIB if kind in CONTRIB_OPERATORS else ""
        node = ir.node(kind, inputs, attributes, domain=domain, outputs=[output], name=name)
        self.graph.insert_before(at, node)
        return output

    def once(self, key: str, make: Callable[[], ir.Value]) -> ir.Value:
        """What `make` made when it was first asked for under `key`: a node that comes later may read it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def replace(self, node: ir.Node, value: ir.Value) -> None:
        """Let `value` be what `node` gave, under its name, and remove the node."""
        old = node.outputs[0]
        value.shape, value.type = old.shape, old.type
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)
        value.name, old.name = old.name, None


def _float(editor: _Editor, at: ir.Node, value: ir.Value) -> ir.Value:
    return editor.op(at, "Cast", [value], FLOAT, to=FLOAT.value)


def _half(editor: _Editor, at: ir.Node, value: ir.Value) -> ir.Value:
    """`value` in float16; products that read the same share it."""
    return editor.once(f"half {value.name}", lambda: editor.op(at, "Cast", [value], HALF, to=HALF.value))


def _int8_product(editor: _Editor, use: _Use, found: Quantized) -> None:
    """The product of integers, times the scale of the column, times the scale of the row."""
    node, name = use.node, use.name
    integers, scales = _activations(editor, node, use.weight.shape[1])
    weight = editor.constant(f"{name}.int8.T", found.integers.T)  # (K, N)
    one, zero = editor.scalar(np.float32(1)), editor.scalar(np.uint8(ZERO))
    columns = editor.constant(f"{name}.scale", found.scales)
    product = editor.op(node, "MatMulIntegerToFloat", [integers, weight, one, columns, zero], FLOAT)
    editor.replace(node, editor.op(node, "Mul", [product, scales], FLOAT))


def _activations(editor: _Editor, node: ir.Node, width: int) -> tuple[ir.Value, ir.Value]:
    """The left side of a product in uint8, and the scale of each of its rows `(.., 1)`.

    A row of zeros has the scale 0: whatever its integers are, the product is 0 again.
    """
    value = node.inputs[0]
    if value is None:
        raise ExportError(f"{node.name} multiplies nothing")

    def measure() -> ir.Value:
        last = editor.constant("last_axis", np.array([-1]))
        largest = editor.op(node, "ReduceMax", [editor.op(node, "Abs", [value], FLOAT), last], FLOAT, keepdims=1)
        return editor.op(node, "Mul", [largest, editor.scalar(np.float32(1 / INT8))], FLOAT)

    scales = editor.once(f"scales of {value.name}", measure)

    def zeros() -> ir.Value:
        shape = editor.op(node, "Shape", [scales], ir.DataType.INT64)
        return editor.op(node, "ConstantOfShape", [shape], BYTE, value=ir.tensor(np.array([ZERO], np.uint8)))

    zero = editor.once(f"zeros of {_rows(value)}", zeros)

    def quantize() -> ir.Value:
        return editor.op(node, "QuantizeLinear", [value, scales, zero], BYTE, axis=-1, block_size=width)

    return editor.once(f"integers of {value.name}", quantize), scales


def _rows(value: ir.Value) -> str:
    """The sizes of `value` without the last: where all are known by number or name, equal ones are equal shapes."""
    sizes = [str(size if isinstance(size, int) else size.value) for size in value.shape or ()][:-1]
    return str(sizes) if sizes and "None" not in sizes else str(value.name)


def _int8_gather(editor: _Editor, use: _Use, found: Quantized) -> None:
    """A row of integers, times its scale."""
    node, ids = use.node, use.node.inputs[1]
    table = editor.constant(f"{use.name}.int8", found.integers)
    row = _float(editor, node, editor.op(node, "Gather", [table, ids], ir.DataType.INT8, axis=0))
    column = editor.constant(f"{use.name}.scales", found.scales[:, None])  # (V, 1)
    scale = editor.op(node, "Gather", [column, ids], FLOAT, axis=0)
    editor.replace(node, editor.op(node, "Mul", [row, scale], FLOAT))


def _int4_product(editor: _Editor, use: _Use, found: Quantized) -> None:
    node, (rows, width) = use.node, use.weight.shape
    weight, scales = _blocks(editor, use, found), _block_scales(editor, use, found)
    block = width // found.scales.shape[1]
    sizes = {"K": width, "N": rows, "bits": 4, "block_size": block, "accuracy_level": ACCURACY}
    editor.replace(node, editor.op(node, "MatMulNBits", [node.inputs[0], weight, scales], FLOAT, **sizes))


def _packed(editor: _Editor, use: _Use, found: Quantized) -> ir.Value:
    return editor.constant(f"{use.name}.int4", found.integers.reshape(len(found.integers), -1))  # (N, K / 2)


def _blocks(editor: _Editor, use: _Use, found: Quantized) -> ir.Value:
    """The integers as a product reads them. ONNX Runtime folds this when it loads the graph, and the scales.

    Where it is told to fold nothing, neither is constant: it would give zeros for constant integers with scales that
    are none, for it packs them without.
    """
    shape = editor.constant(f"{use.name}.blocks", np.array(found.integers.shape))
    flat = _packed(editor, use, found)
    return editor.once(f"blocks of {use.name}", lambda: editor.op(use.node, "Reshape", [flat, shape], BYTE))


def _block_scales(editor: _Editor, use: _Use, found: Quantized) -> ir.Value:
    """Scales of blocks, kept as float16: one in float32 for 32 weights would be a quarter of all that is stored."""
    stored = editor.constant(f"{use.name}.scale", found.scales.astype(np.float16))
    return editor.once(f"scales of {use.name}", lambda: _float(editor, use.node, stored))


def _int4_gather(editor: _Editor, use: _Use, found: Quantized) -> None:
    node, width = use.node, use.weight.shape[1]
    inputs = [_packed(editor, use, found), node.inputs[1], _block_scales(editor, use, found)]
    sizes = {"bits": 4, "block_size": width // found.scales.shape[1], "gather_axis": 0, "quantize_axis": 1}
    editor.replace(node, editor.op(node, "GatherBlockQuantized", inputs, FLOAT, **sizes))


def _half_product(editor: _Editor, use: _Use) -> None:
    node, value = use.node, use.node.inputs[0]
    if value is None:
        raise ExportError(f"{node.name} multiplies nothing")
    weight = editor.constant(f"{use.name}.half.T", use.weight.T.astype(np.float16))
    product = editor.op(node, "MatMul", [_half(editor, node, value), weight], HALF)
    editor.replace(node, _float(editor, node, product))


def _half_head(editor: _Editor, use: _Use) -> None:
    """Logits: weights of float16, but a product in float32. Rounded to 11 bits, close calls would turn around."""
    node = use.node
    weight = _float(editor, node, editor.constant(f"{use.name}.half.T", use.weight.T.astype(np.float16)))
    editor.replace(node, editor.op(node, "MatMul", [node.inputs[0], weight], FLOAT))


def _half_gather(editor: _Editor, use: _Use) -> None:
    node = use.node
    table = editor.constant(f"{use.name}.half", use.weight.astype(np.float16))
    row = editor.op(node, "Gather", [table, node.inputs[1]], HALF, axis=0)
    editor.replace(node, _float(editor, node, row))


def _halve_table(editor: _Editor, node: ir.Node) -> None:
    """Vectors of positions: as float16 in every lower precision."""
    found = _constant(node.inputs[0])
    if found is not None and fits_half(found[1]):
        table = editor.constant(f"{found[0]}.half", found[1].astype(np.float16))
        part = editor.op(node, node.op_type, [table, *node.inputs[1:]], HALF)
        editor.replace(node, _float(editor, node, part))


def _drop_unused(graph: ir.Graph) -> None:
    """Constants that nothing reads any more, and what only turned them round."""
    for node in reversed(list(graph)):
        if node.op_type == "Transpose" and not any(value.uses() or value.is_graph_output() for value in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]

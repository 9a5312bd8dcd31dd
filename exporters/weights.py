"""One blob for all graphs: every weight once, whichever graph, name or orientation it comes under."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import onnx_ir as ir

from runtime.backend import Array

PAGE, PAGED = 4096, 64 * 1024
"""A weight of `PAGED` bytes or more begins on a page of its own, so that it can be mapped without its neighbours."""
ALIGNMENT = 64
"""Of all others: a cache line, and the widest vector register."""
STORED = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT8, ir.DataType.UINT8)
"""Types of weights; other integers are often parts of shapes."""


class _Place(NamedTuple):
    offset: int
    length: int
    name: str


class WeightBlob:
    """Writes weights to one file and points the graphs at it. Use as a context manager.

    Args:
        path: The file, beside the graphs.
        names: Names of the model's weights by `content_key`, so that a graph shows the module that a weight belongs to.
    """

    def __init__(self, path: Path, names: Mapping[bytes, str]) -> None:
        self._path = path
        self._names = names
        self._places: dict[bytes, _Place] = {}

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def take_from(self, model: ir.Model) -> None:
        """Move the weights of `model` into the blob. Scalars, and types that are not `STORED`, stay inline."""
        graph = model.graph
        own = set(self._names.values())
        # The model's own tensors come before those that the exporter derived from them, such as transposes.
        for value in sorted(
            graph.initializers.values(), key=lambda value: str(value.name).removeprefix("model.") not in own
        ):
            tensor = value.const_value
            if tensor is None or tensor.dtype not in STORED or tensor.size == 1:
                continue
            array = np.ascontiguousarray(tensor.numpy())
            if array.ndim == 2 and _bytes_key(array) not in self._places:
                flipped = np.ascontiguousarray(array.T)
                if _bytes_key(flipped) in self._places:
                    _read_transposed(graph, value, self._external(flipped))
                    continue
            external = self._external(array)
            value.const_value = external
            _rename(graph, value, external.name or "")

    def _external(self, array: Array) -> ir.ExternalTensor:
        key = _bytes_key(array)
        place = self._places.get(key) or self._append(key, array)
        return ir.ExternalTensor(
            self._path.name,
            place.offset,
            place.length,
            ir.DataType.from_numpy(array.dtype),
            shape=ir.Shape(array.shape),
            name=place.name,
            base_dir=self._path.parent,
        )

    def _append(self, key: bytes, array: Array) -> _Place:
        alignment = PAGE if array.nbytes >= PAGED else ALIGNMENT
        self._file.write(b"\0" * (-self._file.tell() % alignment))
        turned = self._names.get(content_key(array.T))
        name = self._names.get(content_key(array)) or (f"{turned}.T" if turned else f"constant_{len(self._places)}")
        place = self._places[key] = _Place(self._file.tell(), array.nbytes, name)
        self._file.write(array.tobytes())
        return place


def content_key(array: Array) -> bytes:
    """Digest of an array's type, shape and numbers."""
    return hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).digest()


def _bytes_key(array: Array) -> bytes:
    """Digest of an array's type and numbers: in another shape they are the same weight, read by another operator."""
    return hashlib.sha256(f"{array.dtype}".encode() + array.tobytes()).digest()


def _read_transposed(graph: ir.Graph, value: ir.Value, stored: ir.ExternalTensor) -> None:
    """Let the users of `value` read the transpose of `stored`. ONNX Runtime folds it once, when it loads the graph."""
    source = graph.initializers.get(stored.name)
    if source is None:
        source = ir.Value(name=stored.name, shape=stored.shape, type=ir.TensorType(stored.dtype), const_value=stored)
        graph.register_initializer(source)
    name = f"{stored.name}.transposed"
    turned = next((node.outputs[0] for node in graph if node.outputs[0].name == name), None)
    if turned is None:
        turned = ir.val(name, dtype=stored.dtype, shape=value.shape)
        node = ir.node("Transpose", [source], {"perm": [1, 0]}, outputs=[turned], name=f"{name}/Transpose")
        graph.insert_before(graph[0], node)
    ir.convenience.replace_all_uses_with(value, turned)
    del graph.initializers[str(value.name)]


def _rename(graph: ir.Graph, value: ir.Value, name: str) -> None:
    if name == value.name or name in graph.initializers:
        return
    graph.initializers.pop(str(value.name))
    value.name = name
    graph.initializers[name] = value

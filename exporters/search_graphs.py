"""The two graphs of a search that nobody traces: they have no weights, and are built node by node."""

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from runtime.contract import GraphSpec, TensorSpec

LARGE = 4096
"""From so many tokens on it pays to look for the best ones block by block."""
LEAST_WIDTH = 16
"""Of a block, and how many blocks there are at least."""


def rank_graph(spec: GraphSpec, opset: int) -> ir.Model:
    """The graph that finds the best tokens and their log-probabilities, so that a search need not see all logits.

    `TopK` looks at one token after the other. A large vocabulary is cut into blocks, of which the best token is found
    several times as fast: the `count` best tokens are in the `count` blocks that have the best best ones.
    """
    (logits, bias, count), outputs = _values(spec.inputs), _values(spec.outputs)
    graph = ir.Graph([logits, bias, count], outputs, nodes=[], opset_imports={"": opset}, name=spec.verb)
    normed = _add(graph, "LogSoftmax", [_add(graph, "Add", [logits, bias])], axis=-1)
    vocabulary = int(spec.inputs[1].shape[0])
    width = block_width(vocabulary)
    if width is None:
        _add(graph, "TopK", [normed, count], outputs, axis=-1)
        return ir.Model(graph, ir_version=10)
    last, flat = _constant(graph, "last_axis", [-1]), _constant(graph, "flat", [0, 0, -1])
    blocks = _add(graph, "Reshape", [normed, _constant(graph, "blocks", [0, 0, -1, width])])  # (B, T, N, W)
    kept = _add(graph, "Min", [count, _constant(graph, "block_count", [vocabulary // width])])
    best = _add(graph, "ReduceMax", [blocks, last], keepdims=0)  # (B, T, N)
    _add(graph, "TopK", [best, kept], [ir.val("best_of_blocks"), chosen := ir.val("best_blocks")], axis=-1)
    # In the order of the vocabulary, since of equal tokens the first one counts: (B, T, C).
    _add(graph, "TopK", [chosen, kept], [ordered := ir.val("blocks_in_order"), ir.val("_")], axis=-1, largest=0)
    ordered = _add(graph, "Unsqueeze", [ordered, last])
    candidates = _add(graph, "GatherND", [blocks, ordered], batch_dims=2)  # (B, T, C, W)
    candidates = _add(graph, "Reshape", [candidates, flat])
    scores, tokens = outputs
    _add(graph, "TopK", [candidates, count], [scores, places := ir.val("places")], axis=-1)
    starts = _add(graph, "Mul", [ordered, _constant(graph, "block_width", [width])])
    ids = _add(graph, "Add", [starts, _constant(graph, "inside_a_block", range(width))])  # (B, T, C, W)
    _add(graph, "GatherElements", [_add(graph, "Reshape", [ids, flat]), places], [tokens], axis=-1)
    return ir.Model(graph, ir_version=10)


def block_width(vocabulary: int) -> int | None:
    """Into blocks of how many tokens a vocabulary is cut: about as many as there are blocks. None where it is not."""
    if vocabulary < LARGE:
        return None
    widths = [width for width in range(LEAST_WIDTH, vocabulary // LEAST_WIDTH + 1) if vocabulary % width == 0]
    return min(widths, key=lambda width: abs(width - vocabulary // width), default=None)


def select_graph(spec: GraphSpec, opset: int) -> ir.Model:
    """The graph that picks rows out of caches, so that a search moves them without leaving the device."""
    inputs, outputs = _values(spec.inputs), _values(spec.outputs)
    rows, *caches = inputs
    nodes = [
        ir.node("Gather", [cache, rows], {"axis": 0}, outputs=[picked], name=f"{picked.name}/Gather")
        for cache, picked in zip(caches, outputs, strict=True)
    ]
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": opset}, name=spec.verb)
    return ir.Model(graph, ir_version=10)


def _add(
    graph: ir.Graph, kind: str, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value] | None = None, **attributes: int
) -> ir.Value:
    """Append a node to `graph`; returns its first output."""
    earlier = sum(node.op_type == kind for node in graph)
    name = f"{graph.name}/{kind}" + (f"_{earlier + 1}" if earlier else "")
    node = ir.node(kind, inputs, attributes, outputs=outputs or [ir.val(f"{name}.output")], name=name)
    graph.append(node)
    return node.outputs[0]


def _constant(graph: ir.Graph, name: str, numbers: Iterable[int]) -> ir.Value:
    value = ir.val(name, const_value=ir.tensor(np.array([*numbers], np.int64), name=name))
    graph.register_initializer(value)
    return value


def _values(tensors: Sequence[TensorSpec]) -> list[ir.Value]:
    types = {"int64": ir.DataType.INT64, "float32": ir.DataType.FLOAT}
    return [ir.val(tensor.name, dtype=types[tensor.dtype], shape=tensor.shape) for tensor in tensors]

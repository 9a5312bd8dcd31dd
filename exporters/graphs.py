"""From the model's three verbs to three ONNX graphs with the names, types and axes of the contract."""

import ast
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn

from models.config import ModelConfig
from models.layers import KeyValue
from models.transformer import Cache, LayerCache, Transformer
from runtime.contract import (
    BATCH,
    BEGIN,
    BRANCH,
    ENCODE,
    GROWN,
    PAST,
    PREFILL,
    RANK,
    SELECT,
    SOURCE,
    STEP,
    TARGET,
    Dims,
    GraphSpec,
    graph_specs,
)

from .errors import ExportError
from .search_graphs import rank_graph, select_graph

OPSETS = (18, 23)
"""Oldest and newest that is written: from 23 on attention is the operator `Attention`, before it is spelt out."""

TRACED = {BATCH: 4, SOURCE: 5, TARGET: 3, PAST: 6}
"""Sizes of the example inputs: all different and none of them 0 or 1, which torch.export would take as fixed.

No exam asks for one of them again.
"""


GROWN_SIZES = (f"{PAST} + 1", f"{TARGET} + {PAST}")
"""How torch.export writes the length of a cache that has grown."""


def dims_of(config: ModelConfig) -> Dims:
    """The contract's sizes of a model."""
    return Dims(
        layers=config.decoder_layers,
        heads=config.decoder_attention_heads,
        head_dim=config.decoder_head_dim,
        width=config.d_model,
        vocab_size=config.vocab_size,
        source_vocab_size=config.encoder_vocab_size,
        max_positions=config.max_positions,
    )


def export_graphs(
    model: Transformer, opset: int, say: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[str, ir.Model]]:
    """Each verb and its graph, weights still inside, one after the other; `say` hears which is being traced.

    Raises:
        ExportError: torch's exporter gives up, or would freeze an axis.
    """
    if not OPSETS[0] <= opset <= OPSETS[1]:
        raise ExportError(f"opset is {opset}, expected {OPSETS[0]} to {OPSETS[1]}")
    if model.config.max_positions <= max(TRACED[SOURCE], TRACED[PAST] + 1):
        raise ExportError(
            f"max_positions is {model.config.max_positions}, an export needs more than {TRACED[PAST] + 1}"
        )
    specs = graph_specs(dims_of(model.config))
    verbs: dict[str, Callable[..., Any]] = {
        ENCODE: model.encode,
        PREFILL: _prefill(model),
        STEP: _step(model),
        BEGIN: _begin(model),
        BRANCH: _branch(model),
    }
    for verb, function in verbs.items():
        say(f"tracing {verb}")
        yield verb, _export(_Verb(model, function).eval(), specs[verb], opset)
    yield RANK, rank_graph(specs[RANK], opset)
    yield SELECT, select_graph(specs[SELECT], opset)


class _Verb(nn.Module):
    """One verb as the module that torch.export wants."""

    def __init__(self, model: Transformer, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self._function(*inputs)


def _prefill(model: Transformer) -> Callable[..., Any]:
    def prefill(encoder_attention_mask: Tensor, input_ids: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        logits, cache = model.prefill(input_ids, memory, encoder_attention_mask)
        return logits, *_flat(cache)

    return prefill


def _begin(model: Transformer) -> Callable[..., Any]:
    def begin(memory: Tensor) -> tuple[Tensor, ...]:
        return tuple(_flat(model.begin(memory)))

    return begin


def _step(model: Transformer) -> Callable[..., Any]:
    def step(encoder_attention_mask: Tensor, input_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        return _without_source(*model.step(input_ids, encoder_attention_mask, _cache_of(past)))

    return step


def _branch(model: Transformer) -> Callable[..., Any]:
    def branch(encoder_attention_mask: Tensor, input_ids: Tensor, seen: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        return _without_source(*model.branch(input_ids, encoder_attention_mask, seen, _cache_of(past)))

    return branch


def _flat(cache: Cache) -> Iterator[Tensor]:
    return (tensor for layer in cache for tensor in (*layer.decoder, *layer.encoder))


def _cache_of(past: Sequence[Tensor]) -> Cache:
    return tuple(
        LayerCache(KeyValue(*past[start : start + 2]), KeyValue(*past[start + 2 : start + 4]))
        for start in range(0, len(past), 4)
    )


def _without_source(logits: Tensor, grown: Cache) -> tuple[Tensor, ...]:
    """What a step gives: the cross-attention cache does not change, so it does not come out again."""
    return logits, *(tensor for layer in grown for tensor in layer.decoder)


def _export(verb: _Verb, spec: GraphSpec, opset: int) -> ir.Model:
    examples = tuple(_example(tensor.dtype, tensor.shape) for tensor in spec.inputs)
    axes = {name: torch.export.Dim(name) for name in TRACED}
    shapes = tuple(
        {axis: axes[size] for axis, size in enumerate(tensor.shape) if isinstance(size, str)} for tensor in spec.inputs
    )
    try:
        with _quiet():
            program = torch.onnx.export(
                verb, examples, dynamo=True, opset_version=opset, dynamic_shapes=(shapes,), verbose=False
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ExportError(f"torch cannot export {spec.verb}: {str(error).strip().splitlines()[-1]}") from error
    if program is None:
        raise ExportError(f"torch exported nothing for {spec.verb}")
    model = program.model
    model.graph.name = spec.verb
    _conform(model.graph, spec)
    _hide_wholly(model.graph)
    _grow_inside(model.graph)
    if spec.verb == STEP:
        _split_one_token(model.graph)
        RemoveUnusedNodesPass()(model)
    _forget_the_trace(model)
    return model


def _example(dtype: str, shape: tuple[int | str, ...]) -> Tensor:
    sizes = [TRACED[size] if isinstance(size, str) else size for size in shape]
    return torch.ones(sizes, dtype=torch.int64) if dtype == "int64" else torch.zeros(sizes)


def _conform(graph: ir.Graph, spec: GraphSpec) -> None:
    """Give inputs and outputs the contract's names. An axis that should be free and is not is an error."""
    problems = []
    for values, tensors in ((graph.inputs, spec.inputs), (graph.outputs, spec.outputs)):
        for value, tensor in zip(values, tensors, strict=True):
            sizes = [size if isinstance(size, int) else str(size) for size in value.shape or ()]
            for size, wanted in zip(sizes, tensor.shape, strict=True):
                if isinstance(size, int) != isinstance(wanted, int):
                    problems.append(f"{tensor.name} has shape {sizes}, expected {list(tensor.shape)}")
            value.name = tensor.name
            value.shape = ir.Shape([GROWN if size in GROWN_SIZES else size for size in sizes])
    if problems:
        raise ExportError(f"{spec.verb}: " + "; ".join(dict.fromkeys(problems)))


def _hide_wholly(graph: ir.Graph) -> None:
    """Where attention is spelt out, mask with minus infinity, as PyTorch does.

    The exporter takes the least finite number, by which a query that may see nothing would see everything alike; the
    NaN that minus infinity gives in its place is turned into zeros further on.
    """
    least = np.finfo(np.float32).min
    for value in graph.initializers.values():
        constant = value.const_value
        if constant is not None and constant.size == 1 and constant.dtype == ir.DataType.FLOAT:
            array = constant.numpy()
            if array.item() == least:
                value.const_value = ir.tensor(np.full_like(array, -np.inf), name=value.name)


def _grow_inside(graph: ir.Graph) -> None:
    """Let `Attention` itself append new keys and values to a cache: there ONNX Runtime copies with all its threads."""
    for node in [node for node in graph if node.op_type == "Attention"]:
        grown = [tensor.producer() for tensor in node.inputs[1:3] if tensor is not None]  # of keys and of values
        concats = [concat for concat in grown if concat is not None and concat.op_type == "Concat"]
        if len(concats) < 2:
            continue
        node.resize_inputs(6)
        node.resize_outputs(3)
        for place, concat in enumerate(concats, start=1):
            past, new = concat.inputs
            node.replace_input_with(place, new)
            node.replace_input_with(place + 3, past)
            before, after = concat.outputs[0], node.outputs[place]
            name, after.shape, after.type = before.name, before.shape, before.type
            ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
            graph.remove(concat)
            after.name = name


def _split_one_token(graph: ir.Graph) -> None:
    """Split and join the heads of a single token by reshaping alone: `(B, 1, H D)` and `(B, H, 1, D)` lie alike."""
    for node in [node for node in graph if node.op_type == "Transpose"]:
        before, shape = node.inputs[0], node.outputs[0].shape
        if before is None or shape is None or len(shape) != 4:
            continue
        split = before.producer()
        following = [user for user, _ in node.outputs[0].uses()]
        if split is not None and split.op_type == "Reshape":  # into heads
            _reshape_instead(graph, split.inputs[0], node, node.outputs[0])
        elif [user.op_type for user in following] == ["Reshape"]:  # out of them
            _reshape_instead(graph, before, following[0], following[0].outputs[0])


def _reshape_instead(graph: ir.Graph, given: ir.Value | None, last: ir.Node, result: ir.Value) -> None:
    """Let `result`, whose rows are as many as those of `given`, be `given` in another shape."""
    sizes = [0, *(size for size in (result.shape or ())[1:])]
    name = f"shape.{'.'.join(map(str, sizes))}"
    shape = graph.initializers.get(name)
    if shape is None:
        shape = ir.val(name, const_value=ir.tensor(np.array(sizes, np.int64), name=name))
        graph.register_initializer(shape)
    reshaped = ir.node("Reshape", [given, shape], name=last.name, metadata_props=dict(last.metadata_props))
    ir.convenience.replace_nodes_and_values(graph, last, [last], [reshaped], [result], list(reshaped.outputs))


def _forget_the_trace(model: ir.Model) -> None:
    """Name nodes after the modules they come from, and drop the tracer's notes, which hold paths of this machine."""
    counts: dict[str, int] = {}
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    for node in model.graph.all_nodes():
        stem = f"{_module_path(node) or model.graph.name}/{node.op_type}"
        counts[stem] = counts.get(stem, 0) + 1
        node.name = stem if counts[stem] == 1 else f"{stem}_{counts[stem]}"
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    model.functions.clear()


def _module_path(node: ir.Node) -> str:
    """The innermost module that a node was traced in, such as "decoder.layers.0.self_attention.q_proj"; "" for none."""
    scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    # The last scope is the operation's own name.
    modules = [scope.removeprefix("model.") for scope in scopes[:-1] if not scope.startswith("_")]
    return modules[-1] if modules else ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks about torchvision and shared axis names from the user, who cannot help them."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)

"""Both decoders in one graph, as transformers.js wants them: an `If` over `use_cache_branch`, weights shared."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from runtime.backend import Array
from runtime.contract import BATCH, ENCODE, GRAPH_FILES, GROWN, PREFILL, STEP, Dims, TensorSpec, graph_specs
from runtime.exam import Exam

from .errors import ExportError

USE_CACHE = "use_cache_branch"
"""The input that chooses: true for `step`, false for `prefill`."""

_TYPES = {"int64": ir.DataType.INT64, "float32": ir.DataType.FLOAT}


def merge_decoders(prefill: ir.Model, step: ir.Model, dims: Dims) -> ir.Model:
    """One graph that does what `prefill` and `step` do; both are used up.

    Weights become the outer graph's, one for both branches where it is one in the blob. Names and order are those of
    Optimum's merged decoder, and so is the place of the cross-attention caches: `step` does not compute them, so that
    they come out of its branch with no rows, and the caller keeps those of `prefill`.
    """
    specs = graph_specs(dims)
    wanted = {tensor.name: tensor for tensor in (*specs[PREFILL].inputs, *specs[STEP].inputs[2:])}
    inputs = {name: _value(tensor) for name, tensor in wanted.items()}
    choice = ir.val(USE_CACHE, dtype=ir.DataType.BOOL, shape=[1])
    outputs = [_value(_grown(tensor)) for tensor in specs[PREFILL].outputs]
    weights: dict[str, ir.Value] = {}
    for verb, model in ((PREFILL, prefill), (STEP, step)):
        _make_branch(verb, model.graph, inputs, weights)
    _add_empty(step.graph, specs[PREFILL].outputs)
    branches = [ir.AttrGraph("then_branch", step.graph), ir.AttrGraph("else_branch", prefill.graph)]
    node = ir.node(
        "If", [choice], {attribute.name: attribute for attribute in branches}, outputs=outputs, name="merged/If"
    )
    graph = ir.Graph(
        [*inputs.values(), choice],
        outputs,
        nodes=[node],
        initializers=list(weights.values()),
        opset_imports=dict(prefill.graph.opset_imports),
        name="merged",
    )
    return ir.Model(graph, ir_version=prefill.ir_version)


def check_merged(folder: Path, merged: Path, exam: Exam) -> None:
    """Let both branches of `merged` answer the cases of `exam`, and the graphs in `folder` too.

    Raises:
        ExportError: there is a difference in any bit of any output, or there was nothing to compare.
    """
    both = _open(merged)
    for verb in (PREFILL, STEP):
        own = _open(folder / GRAPH_FILES[verb])
        questions = [case.inputs for case in exam.graphs if case.verb == verb]
        if not questions:
            raise ExportError(f"the exam asks nothing about {verb}, so that {merged.name} was not checked")
        for inputs in questions:
            answer = _answers(both, {**_unused(both, inputs), **inputs, USE_CACHE: np.array([verb == STEP])})
            _require_equal(_answers(own, inputs), answer, f"{merged.name}: {verb}")


def check_encoder(folder: Path, encoder: Path, exam: Exam) -> None:
    """Let `encoder` answer the cases of `exam`, and the one in `folder` too; see `check_merged`."""
    theirs, own = _open(encoder), _open(folder / GRAPH_FILES[ENCODE])
    for case in exam.graphs:
        if case.verb == ENCODE:
            _require_equal(_answers(own, case.inputs), _answers(theirs, case.inputs), f"{encoder.name}: encode")


def _open(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def _make_branch(verb: str, graph: ir.Graph, inputs: Mapping[str, ir.Value], weights: dict[str, ir.Value]) -> None:
    """Let `graph` read the outer `inputs` and `weights`; what stays inside gets names that no other branch has."""
    for value in list(graph.inputs):
        ir.convenience.replace_all_uses_with(value, inputs[str(value.name)])
    graph.inputs.clear()
    for name, value in list(graph.initializers.items()):
        del graph.initializers[name]
        if isinstance(value.const_value, ir.ExternalTensor):
            outer = weights.setdefault(_place(value.const_value), value)
            if outer is not value:
                ir.convenience.replace_all_uses_with(value, outer)
        else:
            value.name = f"{verb}/{name}"
            graph.initializers[value.name] = value
    for node in graph:
        for value in node.outputs:
            value.name = f"{verb}/{value.name}"
    graph.name = verb


def _place(tensor: ir.ExternalTensor) -> str:
    return f"{tensor.offset} {tensor.shape}"


def _add_empty(graph: ir.Graph, specs: Sequence[TensorSpec]) -> None:
    """Give `graph` the outputs of `specs` in their order: a tensor without rows for each that it does not compute."""
    computed = {str(value.name).removeprefix(f"{STEP}/"): value for value in graph.outputs}
    outputs = []
    for spec in specs:
        value = computed.get(spec.name)
        if value is None:
            shape = [0, *(1 if isinstance(size, str) else size for size in spec.shape[1:])]
            value = ir.val(f"{STEP}/{spec.name}", dtype=_TYPES[spec.dtype], shape=shape)
            empty = ir.tensor(np.zeros(shape, spec.dtype))
            graph.append(ir.node("Constant", [], {"value": empty}, outputs=[value], name=f"{value.name}/Constant"))
        outputs.append(value)
    graph.outputs.clear()
    graph.outputs.extend(outputs)


def _value(spec: TensorSpec) -> ir.Value:
    return ir.val(spec.name, dtype=_TYPES[spec.dtype], shape=spec.shape)


def _grown(spec: TensorSpec) -> TensorSpec:
    """The output of both branches: a self-attention cache has grown by this call's tokens."""
    return spec._replace(shape=(*spec.shape[:2], GROWN, *spec.shape[3:])) if ".decoder." in spec.name else spec


def _unused(session: ort.InferenceSession, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """What the branch that is not asked would read: no past and no memory, as callers hand them in."""
    batch = len(inputs["input_ids"])
    return {
        node.name: np.zeros(
            [batch if size == BATCH else 0 if isinstance(size, str) else size for size in node.shape], np.float32
        )
        for node in session.get_inputs()
        if node.type == "tensor(float)"
    }


def _answers(session: ort.InferenceSession, inputs: Mapping[str, Array]) -> dict[str, Array]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def _require_equal(expected: Mapping[str, Array], found: Mapping[str, Array], where: str) -> None:
    wrong = [name for name, array in expected.items() if not np.array_equal(array, found[name])]
    wrong += [name for name, array in found.items() if name not in expected and array.size]
    if wrong:
        raise ExportError(f"{where} gives other numbers than the bundle's own graph: {', '.join(wrong)}")

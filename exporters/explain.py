"""Where a graph leaves tolerance: what the modules inside it give, beside what PyTorch's gave."""

import math
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort

from runtime.backend import Array
from runtime.bundle import WEIGHTS, Bundle
from runtime.contract import GRAPH_FILES, VERBS
from runtime.errors import GraphError
from runtime.exam import Exam, GraphCase
from runtime.parity.report import Explanation, ModuleResult
from runtime.parity.tolerance import Earned, largest, largest_error
from runtime.session import OPTIMIZATIONS, Optimization

from .errors import ExportError

ELSEWHERE = (
    "What is wrong lies after the last of them, between the graphs, or needs other inputs: "
    "with --checkpoint every case tells."
)


def explain(bundle: Bundle, exam: Exam, optimization: Optimization = "all", *, failed: bool = True) -> Explanation:
    """The first module, in the order of computation, whose output leaves tolerance in some case of `exam`.

    Where none does although the bundle `failed`, the sentence says where else to look.

    Nodes are named after the modules that they were traced from, so that the last node of a module gives its output.
    These become outputs of a copy of each graph; the rewrites of `optimization` can then not reach across them.

    Raises:
        ExportError: the bundle is of a lower precision, the exam says nothing about modules, or the graphs have other
            ones.
    """
    if bundle.passport.precision != "fp32":
        raise ExportError(
            f"{bundle.folder} is in {bundle.passport.precision}, of which every module is further away than float32: "
            "there is nothing to explain"
        )
    asked = {verb: [case for case in exam.graphs if case.verb == verb and case.modules] for verb in VERBS}
    if not any(asked.values()):
        raise ExportError("this exam says nothing about the modules inside the graphs: export the bundle again")
    results: list[ModuleResult] = []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(bundle.path("weights"), Path(folder) / WEIGHTS)
        for verb, cases in asked.items():
            try:
                results += _results(bundle, verb, cases, Path(folder), optimization)
            except GraphError as failure:
                if all(result.passed for result in results):
                    return Explanation(sentence=f"{failure}; before it all is within tolerance.", modules=results)
                break
    sentence = _sentence(results, sum(map(len, asked.values())))
    if failed and all(result.passed for result in results):
        sentence += f" {ELSEWHERE}"
    return Explanation(sentence=sentence, modules=results)


def _results(
    bundle: Bundle, verb: str, cases: Sequence[GraphCase], folder: Path, optimization: Optimization
) -> list[ModuleResult]:
    """One result for each module over all `cases`, in the order of computation."""
    model = ir.load(bundle.path(verb))
    paths = list(dict.fromkeys(path for case in cases for path in case.modules))
    exposed = _expose(model.graph, paths)
    if missing := [path for path in paths if path not in exposed]:
        raise ExportError(f"{verb} has no nodes of these modules: {', '.join(missing)}")
    file = folder / Path(GRAPH_FILES[verb]).name
    ir.save(model, file)
    options = ort.SessionOptions()
    options.graph_optimization_level = OPTIMIZATIONS[optimization]
    options.log_severity_level = 4
    found: dict[str, list[ModuleResult]] = {path: [] for path in exposed}
    try:
        session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own exceptions share no public base
        raise GraphError(f"{verb} cannot be loaded: {error}") from None
    for case in cases:
        try:
            outputs = session.run(list(exposed.values()), case.inputs)
        except Exception as error:  # ONNX Runtime's own exceptions share no public base
            raise GraphError(f"{verb} gives up on {case.label}: {error}") from None
        for path, output in zip(exposed, outputs, strict=True):
            found[path].append(_result(case, path, output))
    return [max(results, key=_severity) for results in found.values() if results]


def _severity(result: ModuleResult) -> tuple[bool, float]:
    """How far out of tolerance; NaN before all."""
    ratio = result.error / result.tolerance
    return math.isnan(ratio), ratio


def _expose(graph: ir.Graph, paths: Iterable[str]) -> dict[str, str]:
    """Make the last value of each module an output of `graph`; its name by the module's path, in graph order."""
    last: dict[str, ir.Value] = {}
    for node in graph:
        for path in paths:
            if str(node.name).startswith((f"{path}/", f"{path}.")):
                last.pop(path, None)
                last[path] = node.outputs[0]
    present = {id(value) for value in graph.outputs}
    for value in last.values():
        if id(value) not in present:
            present.add(id(value))
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
            graph.outputs.append(value)
    return {path: str(value.name) for path, value in last.items()}


def _result(case: GraphCase, path: str, output: Array) -> ModuleResult:
    reference = case.modules[path]
    earned = Earned(case.module_errors[path], largest(reference))
    return ModuleResult(
        graph=case.verb, module=path, error=largest_error(output, reference), tolerance=earned.tolerance
    )


def _sentence(results: Sequence[ModuleResult], cases: int) -> str:
    first = next((place for place, result in enumerate(results) if not result.passed), None)
    if first is None:
        return (
            f"All {len(results)} modules inside the graphs are within tolerance in the {cases} cases that tell of them."
        )
    found = results[first]
    return (
        f"The first to leave tolerance is {found.module} in {found.graph}: {found.error:.3g} from the reference, "
        f"earned is {found.tolerance:.3g}; the {first} modules before it are within."
    )

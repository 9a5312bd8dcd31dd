"""A bundle of lower precision: float graphs rewritten, examined, and the weights that spoil it left in float32."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import onnx_ir as ir

from models.transformer import Transformer
from runtime.bundle import WEIGHTS, Quantization
from runtime.contract import GRAPH_FILES
from runtime.exam import TokenCase
from runtime.parity import Report

from .checking import check_graph
from .errors import ExaminationError, ExportError
from .precision import Lowering
from .quantize import BLOCKS, Precision
from .sensitivity import divergences, overflowing
from .weights import WeightBlob, content_key

MOST_EXCLUDED = 4
"""At most every fourth weight stays float32: with more it would be a bundle of another precision."""
SCHEMES: dict[Precision, tuple[str, int | None]] = {
    "fp16": ("none", None),
    "int8": ("rows", None),
    "int4": ("blocks", BLOCKS[0]),
}
"""What shares a scale, and how many weights of a block do at most."""


def lower(
    model: Transformer,
    floats: Path,
    folder: Path,
    precision: Precision,
    *,
    cases: Sequence[TokenCase],
    attempt: Callable[[Quantization], Report],
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> Report:
    """Write the graphs in `floats` to `folder` in `precision`, as often as it takes until `attempt` passes.

    What a failure leaves in float32 the next time are the weights whose rounding alone moves the model's output most:
    one, two, four and so on, up to a quarter of them.

    Args:
        model: What the graphs were traced from.
        floats: Graphs and blob in float32.
        folder: The bundle to be.
        precision: Not fp32.
        cases: Sentences on which the weights are measured.
        attempt: Completes the bundle, and examines it.
        say: Called with the name of each stage as it begins.
        note: Called with what stays float32.

    Raises:
        ExportError: it does not pass whatever is left in float32.
    """
    hopeless = overflowing(model, cases) if precision == "fp16" else []
    excluded: list[str] = []
    ranking: list[str] = []
    while True:
        say(f"rounding the weights to {precision}")
        lowering = _write(floats, folder, precision, [*hopeless, *excluded])
        kept = sorted(lowering.kept)
        scheme, block = SCHEMES[precision]
        try:
            report = attempt(Quantization(scheme=scheme, block=block, excluded=kept))
        except ExaminationError as failure:
            if not all(rung.passed for rung in failure.report.rungs[:2]):
                raise
            if not ranking:
                say("measuring which weights spoil it")
                ranking = list(divergences(model, lowering.rounded, precision, cases))
            most = len(ranking) // MOST_EXCLUDED
            if len(excluded) >= most:
                raise _refusal(precision, failure, len(kept), len(lowering.rounded) + len(kept)) from failure
            excluded = ranking[: min(max(1, 2 * len(excluded)), most)]
            say(f"{_found(failure)}: trying again with {len(excluded)} weights in float32")
        else:
            if kept:
                note(f"in float32 stay {len(kept)} of {len(kept) + len(lowering.rounded)} weights: {', '.join(kept)}")
            return report


def _write(floats: Path, folder: Path, precision: Precision, excluded: Collection[str]) -> Lowering:
    """The graphs of `floats` in `precision`, over one blob in `folder`."""
    lowering = Lowering(precision, excluded)
    names: dict[bytes, str] = {}
    with WeightBlob(folder / WEIGHTS, names) as blob:
        for verb, file in GRAPH_FILES.items():
            graph = ir.load(floats / file)
            lowering.apply(graph)
            for name, value in graph.graph.initializers.items():
                if value.const_value is not None:
                    names.setdefault(content_key(value.const_value.numpy()), name)
            blob.take_from(graph)
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            ir.save(graph, path)
            check_graph(path, verb)
    return lowering


def _refusal(precision: Precision, failure: ExaminationError, kept: int, count: int) -> ExportError:
    return ExportError(
        f"{precision} does not pass, with {kept} of {count} weights in float32 neither: {_found(failure)}. "
        "Nothing was written"
    )


def _found(failure: ExaminationError) -> str:
    """The figures that failed, or what else did."""
    figures = [
        f"{figure.name} is {figure.value:.3g}, {'at least' if figure.at_least else 'at most'} {figure.limit:g} is asked"
        for figure in failure.report.figures
        if not figure.passed
    ]
    return "; ".join(figures) or str(failure)

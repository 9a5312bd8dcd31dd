"""From a model to a bundle that has passed: graphs, blob, exam, passport, and what a bundle must stand."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import onnx_ir as ir

from models.config import ModelConfig
from models.files import emerging
from models.transformer import Transformer
from runtime.bundle import (
    EXAM_ROLE,
    FORMAT,
    PASSPORT,
    WEIGHTS,
    Bundle,
    Passport,
    Quantization,
    record_files,
    write_passport,
)
from runtime.contract import GRAPH_FILES
from runtime.exam import Exam, save_exam
from runtime.generation import GenerationConfig
from runtime.parity import Report
from runtime.session import OrtBackend
from runtime.verify import record, sit_bundle

from .checking import check_graph
from .companions import model_settings, search_defaults, write_companions
from .errors import ExaminationError, ExportError
from .golden import Examiner, light_sizes, recorded_sizes, share_own_errors, special_ids, sweep_sizes, tool_versions
from .graphs import dims_of, export_graphs
from .lowering import lower
from .precision import check_opset
from .quantize import Precision
from .source import Source, exam_sentences, open_source
from .transformersjs import write_transformersjs
from .weights import WeightBlob, content_key

Layout = Literal["optimum", "transformersjs"]
GOLDEN, FLOATS = "golden", "floats"
EXAM_SEED, SWEEP_SEED = 20, 21


def export_bundle(
    checkpoint: Path,
    target: Path,
    *,
    opset: int = 23,
    precision: Precision = "fp32",
    layout: Layout = "optimum",
    sentences: Path | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> Report:
    """Export the model in folder `checkpoint` to the bundle `target`.

    Args:
        checkpoint: Holds settings, weights and tokenizer; ours, or of a library that `models.importers` knows.
        target: Appears only when everything has passed.
        opset: Of the graphs, 18 to 23; int8 needs 21.
        precision: Of weights and products. Weights without which a lower one does not pass the gate stay in float32,
            up to a quarter of them.
        layout: With "transformersjs" the files that transformers.js opens, too.
        sentences: Source sentences that the exam asks for, one a line; None for the checkpoint's own, or for made-up
            ones where another library's folder has none.
        force: Replace a bundle that stands at `target`.
        say: Called with the name of each stage as it begins.
        note: Called with what the user should know of the folder.

    Returns:
        What the ladder found on the recorded exam.

    Raises:
        ModelError: the model cannot be loaded or imported.
        TokenizerError: a file of the tokenizer is missing or damaged.
        GenerationError: an option of the search is impossible or not supported.
        ExportError: the model cannot be exported, or an examination failed. In every case nothing is left behind.
    """
    _refuse_to_overwrite(target, force=force)
    _refuse_precision(precision, opset, layout)
    say("loading the checkpoint")
    source = open_source(checkpoint)
    model = source.model
    asked = exam_sentences(checkpoint, source, sentences)
    search = search_defaults(checkpoint, model.config)
    for line in search.notes:
        note(line)
    with emerging(target) as folder:
        floats = folder if precision == "fp32" else folder.parent / FLOATS
        floats.mkdir(exist_ok=True)
        versions = _write_graphs(model, floats, opset, say)
        say("writing the exam")
        exam, sweep = _exams(source, asked, light=precision != "fp32")
        save_exam(exam, folder / GOLDEN)
        write_companions(checkpoint, folder, model_settings(model.config, source.settings), search.file)

        def attempt(made: Quantization | None) -> Report:
            if layout == "transformersjs":
                say("writing the layout of transformers.js")
                write_transformersjs(folder, dims_of(model.config), exam)
            write_passport(
                folder, _passport(folder, model.config, search.config, versions, precision=precision, quantization=made)
            )
            return _examine(Bundle(folder), sweep, say)

        if precision == "fp32":
            return attempt(None)
        return lower(model, floats, folder, precision, cases=exam.tokens, attempt=attempt, say=say, note=note)


def _refuse_precision(precision: Precision, opset: int, layout: Layout) -> None:
    check_opset(precision, opset)
    if precision != "fp32" and layout == "transformersjs":
        raise ExportError(f"the layout of transformers.js is written in fp32 alone, not in {precision}")


def _exams(source: Source, asked: Mapping[str, Sequence[int]], *, light: bool) -> tuple[Exam, Exam]:
    """What is recorded, and the sweep."""
    model, positions = source.model, source.model.config.max_positions
    sizes = light_sizes(positions) if light else recorded_sizes(positions)
    exam = Examiner(model, EXAM_SEED, source.tokenizer).write(sizes, asked)
    sweep = Examiner(model, SWEEP_SEED, source.tokenizer).write(sweep_sizes(positions), asked)
    share_own_errors(exam, sweep)
    return exam, sweep


def _examine(bundle: Bundle, sweep: Exam, say: Callable[[str], None]) -> Report:
    """What `bundle` must stand; the verdict is recorded in it.

    Raises:
        ExaminationError: it does not.
    """
    say("sweeping over sizes that were not traced")
    backend = OrtBackend(bundle)
    _require(sit_bundle(bundle, backend, sweep), "the sweep over sizes that were not traced")
    say("sitting the exam")
    report = _require(sit_bundle(bundle, backend), "its exam")
    record(bundle, report)
    return report


def fresh_exam(
    checkpoint: Path, bundle: Bundle, seed: int, sentences: Path | None = None, *, explain_all: bool = False
) -> Exam:
    """A new exam about `checkpoint` for `bundle`, with random inputs of `seed`; see `export_bundle` for `sentences`.

    With `explain_all` every case tells what the modules inside the graphs give, which takes memory.

    Raises:
        ExportError: the bundle was exported from a model of other sizes.
    """
    source = open_source(checkpoint)
    model = source.model
    expected, found = dims_of(model.config), bundle.passport.dims
    if expected != found:
        raise ExportError(f"{bundle.folder} is not of {checkpoint}: it has {found}, the checkpoint {expected}")
    asked = exam_sentences(checkpoint, source, sentences)
    sizes = sweep_sizes(model.config.max_positions)
    return Examiner(model, seed, source.tokenizer).write(sizes, asked, explain_all=explain_all)


def _refuse_to_overwrite(target: Path, *, force: bool) -> None:
    if not target.exists():
        return
    if not (target / PASSPORT).is_file():
        raise ExportError(f"{target} exists already and is not a bundle: choose another folder")
    if not force:
        raise ExportError(f"{target} exists already: choose another folder, or replace it with --force")


def _write_graphs(model: Transformer, folder: Path, opset: int, say: Callable[[str], None]) -> dict[str, int]:
    """The graphs and their one blob; returns opset and IR version."""
    names = {content_key(tensor.numpy()): name for name, tensor in _named_tensors(model)}
    written = {}
    with WeightBlob(folder / WEIGHTS, names) as blob:
        for verb, graph in export_graphs(model, opset, say):
            blob.take_from(graph)
            path = folder / GRAPH_FILES[verb]
            path.parent.mkdir(exist_ok=True)
            ir.save(graph, path)
            written[verb] = graph
    say("checking the graphs")
    for verb in written:
        check_graph(folder / GRAPH_FILES[verb], verb)
    return {"opset": opset, "ir_version": max(graph.ir_version for graph in written.values())}


def _named_tensors(model: Transformer) -> Iterator[tuple[str, Any]]:
    yield from ((name, tensor.detach()) for name, tensor in model.named_buffers())
    yield from ((name, tensor.detach()) for name, tensor in model.named_parameters())


def _passport(
    folder: Path,
    config: ModelConfig,
    search: GenerationConfig,
    versions: dict[str, int],
    *,
    precision: Precision,
    quantization: Quantization | None,
) -> Passport:
    files = [
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != PASSPORT
    ]
    return Passport(
        format=FORMAT,
        roles={**GRAPH_FILES, "weights": WEIGHTS, EXAM_ROLE: GOLDEN},
        files=record_files(folder, files),
        dims=dims_of(config),
        special=special_ids(config),
        generation=search,
        model=msgspec.to_builtins(config),
        opset=versions["opset"],
        ir_version=versions["ir_version"],
        precision=precision,
        tools=tool_versions("torch", "onnx", "onnx-ir", "onnxscript"),
        quantization=quantization,
    )


def _require(report: Report, what: str) -> Report:
    if not report.passed:
        raise ExaminationError(what, report)
    return report

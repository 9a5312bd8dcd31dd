"""From a checkpoint to a bundle that has passed: graphs, blob, exam, passport, and what a bundle must stand."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import onnx
import onnx_ir as ir

from models.checkpoint import load_checkpoint
from models.config import ModelConfig
from models.transformer import Transformer
from runtime.bundle import (
    EXAM_ROLE,
    FORMAT,
    PASSPORT,
    WEIGHTS,
    Bundle,
    Passport,
    record_files,
    write_passport,
)
from runtime.contract import GRAPH_FILES
from runtime.exam import Exam, save_exam
from runtime.generation import GenerationConfig
from runtime.parity import Report
from runtime.session import OrtBackend
from runtime.tokenizer import TOKENIZER_FILES, Tokenizer
from runtime.verify import record, sit_bundle

from .errors import ExportError
from .golden import Examiner, recorded_sizes, share_own_errors, special_ids, sweep_sizes, tool_versions
from .graphs import dims_of, export_graphs
from .weights import WeightBlob, content_key

GOLDEN = "golden"
SENTENCES = "sentences.txt"
"""In a checkpoint: source sentences, one a line, that the exam asks for."""
EXAM_SEED, SWEEP_SEED = 20, 21
BEAMS = 4
"""Of the search that a bundle proposes, the usual number for translation."""


def export_bundle(
    checkpoint: Path,
    target: Path,
    *,
    opset: int = 23,
    sentences: Path | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Export the checkpoint in folder `checkpoint` to the bundle `target`.

    Args:
        checkpoint: Holds settings, weights and tokenizer.
        target: Appears only when everything has passed.
        opset: Of the graphs, 18 to 23.
        sentences: Source sentences that the exam asks for, one a line; None for the checkpoint's own.
        force: Replace a bundle that stands at `target`.
        say: Called with the name of each stage as it begins.

    Returns:
        What the ladder found on the recorded exam.

    Raises:
        ExportError: the model cannot be exported, or an examination failed; nothing is left behind.
    """
    _refuse_to_overwrite(target, force=force)
    say("loading the checkpoint")
    model = load_checkpoint(checkpoint)
    asked = _sentences(checkpoint, model.config, sentences)
    with _emerging(target) as folder:
        versions = _write_graphs(model, folder, opset, say)
        say("writing the exam")
        tokenizer, positions = Tokenizer(checkpoint), model.config.max_positions
        exam = Examiner(model, EXAM_SEED, tokenizer).write(recorded_sizes(positions), asked)
        sweep = Examiner(model, SWEEP_SEED, tokenizer).write(sweep_sizes(positions), asked)
        share_own_errors(exam, sweep)
        save_exam(exam, folder / GOLDEN)
        _write_companions(checkpoint, model.config, folder)
        passport = _passport(folder, model.config, versions)
        write_passport(folder, passport)
        say("sweeping over sizes that were not traced")
        bundle = Bundle(folder)
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
    model = load_checkpoint(checkpoint)
    expected, found = dims_of(model.config), bundle.passport.dims
    if expected != found:
        raise ExportError(f"{bundle.folder} is not of {checkpoint}: it has {found}, the checkpoint {expected}")
    asked = _sentences(checkpoint, model.config, sentences)
    sizes = sweep_sizes(model.config.max_positions)
    return Examiner(model, seed, Tokenizer(checkpoint)).write(sizes, asked, explain_all=explain_all)


def _refuse_to_overwrite(target: Path, *, force: bool) -> None:
    if not target.exists():
        return
    if not (target / PASSPORT).is_file():
        raise ExportError(f"{target} exists already and is not a bundle: choose another folder")
    if not force:
        raise ExportError(f"{target} exists already: choose another folder, or replace it with --force")


@contextmanager
def _emerging(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place in the end, or vanishes."""
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    # One name, so that an export finds and clears what a killed one left.
    workshop = target.with_name(f".{target.name}.partial")
    shutil.rmtree(workshop, ignore_errors=True)
    folder = workshop / "new"
    folder.mkdir(parents=True)
    try:
        yield folder
        if target.exists():
            target.rename(workshop / "old")
        folder.rename(target)
    finally:
        if (workshop / "old").exists() and not target.exists():  # interrupted between the two moves
            (workshop / "old").rename(target)
        shutil.rmtree(workshop, ignore_errors=True)


def _sentences(checkpoint: Path, config: ModelConfig, path: Path | None) -> dict[str, list[int]]:
    """Source ids of the sentences in `path`, or of the checkpoint's own."""
    tokenizer = Tokenizer(checkpoint)
    if tokenizer.size > config.encoder_vocab_size:
        raise ExportError(
            f"{checkpoint}: the tokenizer has {tokenizer.size} entries, "
            f"the model's source vocabulary {config.encoder_vocab_size}"
        )
    path = path or checkpoint / SENTENCES
    if not path.is_file():
        raise ExportError(f"{path} is missing: one source sentence a line, for the exam")
    try:
        lines = [line.strip() for line in path.read_text("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8: {error}") from None
    chosen = {line: tokenizer.encode(line) for line in lines if line}
    if not chosen:
        raise ExportError(f"{path} holds no sentence")
    longest = max(map(len, chosen.values()))
    if longest > config.max_positions:
        raise ExportError(f"{path}: a sentence has {longest} tokens, the model has {config.max_positions} positions")
    return chosen


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
        try:
            onnx.checker.check_model(str(folder / GRAPH_FILES[verb]), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise ExportError(f"{verb}: onnx.checker refuses the graph: {error}") from error
    return {"opset": opset, "ir_version": max(graph.ir_version for graph in written.values())}


def _named_tensors(model: Transformer) -> Iterator[tuple[str, Any]]:
    yield from ((name, tensor.detach()) for name, tensor in model.named_buffers())
    yield from ((name, tensor.detach()) for name, tensor in model.named_parameters())


def _write_companions(checkpoint: Path, config: ModelConfig, folder: Path) -> None:
    """Tokenizer, and the configurations by which transformers and Optimum open the folder."""
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
    special = {name: getattr(config, name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    settings = {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "scale_embedding": config.scale_embedding,
        "share_encoder_decoder_embeddings": config.share_embeddings,
        "tie_word_embeddings": config.tie_output,
        "num_hidden_layers": config.encoder_layers,
        **{
            name: getattr(config, name)
            for side in ("encoder", "decoder")
            for name in (f"{side}_layers", f"{side}_attention_heads", f"{side}_ffn_dim")
        },
        "d_model": config.d_model,
        "activation_function": config.activation_function,
        "dropout": config.dropout,
        "use_cache": True,
        **special,
    }
    generation = {**special, "max_length": config.max_positions, "num_beams": BEAMS}
    for name, content in (("config.json", settings), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _passport(folder: Path, config: ModelConfig, versions: dict[str, int]) -> Passport:
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return Passport(
        format=FORMAT,
        roles={**GRAPH_FILES, "weights": WEIGHTS, EXAM_ROLE: GOLDEN},
        files=record_files(folder, files),
        dims=dims_of(config),
        special=special_ids(config),
        generation=GenerationConfig(num_beams=BEAMS, max_length=config.max_positions),
        model=msgspec.to_builtins(config),
        opset=versions["opset"],
        ir_version=versions["ir_version"],
        precision="fp32",
        tools=tool_versions("torch", "onnx", "onnx-ir", "onnxscript"),
    )


def _require(report: Report, what: str) -> Report:
    if not report.passed:
        problems = [f"rung {rung.rung} ({rung.name}): {rung.problems[0]}" for rung in report.rungs if rung.problems]
        raise ExportError(f"the export failed {what}: {'; '.join(problems)}. Nothing was written")
    return report

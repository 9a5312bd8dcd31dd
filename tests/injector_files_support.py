"""The fault injector's hand on files: weights, passport, tokenizer and exam of a copied bundle."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
from exporters_support import random_model
from runtime_support import TINY, edit_passport

from exporters.golden import Examiner, recorded_sizes
from models.config import ModelConfig
from runtime.backend import Array
from runtime.bundle import COMPANIONS, PASSPORT, WEIGHTS, Bundle, record_files
from runtime.contract import GRAPH_FILES, VERBS
from runtime.exam import CacheCheck, Exam, load_exam, save_exam
from runtime.tokenizer import open_tokenizer

Edit = Callable[[Path], None]
GOLDEN = "golden"


def sign(folder: Path) -> None:
    """Let the passport say that the files are right as they are."""
    passport = json.loads((folder / PASSPORT).read_text("utf-8"))
    records = msgspec.to_builtins(record_files(folder, passport["files"]))
    edit_passport(folder, lambda content: content.update(files=records))


# Weights


@cache
def weight_places() -> dict[str, tuple[int, tuple[int, ...]]]:
    """Offset in weights.bin and shape of every tensor of the bundle in tests/data."""
    places = {}
    for verb in VERBS:
        for name, value in ir.load(TINY / GRAPH_FILES[verb]).graph.initializers.items():
            if isinstance(tensor := value.const_value, ir.ExternalTensor):
                places[name] = (tensor.offset or 0, tuple(tensor.shape.numpy()))
    return places


def weights_edit(change: Callable[[dict[str, Array]], None]) -> Edit:
    """What lets `change` write into the weights of a folder, arrays by name, and signs the result."""

    def edit(folder: Path) -> None:
        blob = np.memmap(folder / WEIGHTS, np.uint8, "r+")
        arrays: dict[str, Array] = {
            name: np.ndarray(shape, np.float32, blob, offset) for name, (offset, shape) in weight_places().items()
        }
        change(arrays)
        blob.flush()
        sign(folder)

    return edit


def change_one(name: str, place: tuple[int, ...], number: float = 0.01) -> Edit:
    """Add `number` to one weight."""

    def change(arrays: dict[str, Array]) -> None:
        arrays[name][place] += number

    return weights_edit(change)


def nudge(name: str, place: tuple[int, ...], sign: int) -> Edit:
    """Move one weight by a hundredth of itself, and by no less than 0.01."""

    def change(arrays: dict[str, Array]) -> None:
        arrays[name][place] += sign * max(0.01, 0.01 * abs(float(arrays[name][place])))

    return weights_edit(change)


def zero_a_head(arrays: dict[str, Array]) -> None:
    """The second of the four heads of the encoder's first layer says nothing."""
    arrays["encoder.layers.0.self_attention.out_proj.weight.T"][8:16] = 0


def swap_layers(arrays: dict[str, Array]) -> None:
    """The encoder's second layer comes before its first."""
    for name in [name for name in arrays if "encoder.layers.0." in name]:
        one, other = arrays[name], arrays[name.replace("layers.0.", "layers.1.")]
        one[:], other[:] = other.copy(), one.copy()


def transpose_a_square(arrays: dict[str, Array]) -> None:
    """A matrix that fits either way round."""
    square = arrays["decoder.layers.0.cross_attention.q_proj.weight.T"]
    square[:] = square.T.copy()


def round_to_half(arrays: dict[str, Array]) -> None:
    """All weights as float16 holds them."""
    with np.errstate(over="ignore"):
        for array in arrays.values():
            array[:] = array.astype(np.float16)


def overflow_in_half(arrays: dict[str, Array]) -> None:
    """One inner unit scaled up and scaled down again: the same function in float32, infinite in float16."""
    arrays["encoder.layers.0.feed_forward.fc1.weight.T"][:, 5] *= 2.0**24
    arrays["encoder.layers.0.feed_forward.fc1.bias"][5] *= 2.0**24
    arrays["encoder.layers.0.feed_forward.fc2.weight.T"][5] *= 2.0**-24
    round_to_half(arrays)


def another_epoch(arrays: dict[str, Array]) -> None:
    """All trained weights as they might be after some more training."""
    random = np.random.default_rng(1)
    for name, array in arrays.items():
        if not name.endswith("positions.table"):
            array[...] *= 1 + 0.01 * random.standard_normal(array.shape).astype(np.float32)


def stale_unsigned(folder: Path) -> None:
    """Weights of another training state under the passport of this one."""
    before = (folder / PASSPORT).read_bytes()
    weights_edit(another_epoch)(folder)
    (folder / PASSPORT).write_bytes(before)


def truncate(folder: Path) -> None:
    """The second half is lost, as when a disk is full."""
    blob = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(blob[: len(blob) // 2])


def truncate_and_sign(folder: Path) -> None:
    """The passport says that half of the weights is all."""
    truncate(folder)
    sign(folder)


# Passport, tokenizer, exam


def passport_edit(change: Callable[[dict[str, Any]], object]) -> Edit:
    """What lets `change` write into the passport of a folder."""
    return lambda folder: edit_passport(folder, change)


def another_start_for_others(folder: Path) -> None:
    """The decoder starts from the token 5, say the files by which transformers and Optimum open the folder."""
    for name in COMPANIONS:
        content = json.loads((folder / name).read_text("utf-8"))
        (folder / name).write_text(json.dumps(content | {"decoder_start_token_id": 5}), "utf-8")
    sign(folder)


def another_start(folder: Path) -> None:
    """The decoder starts from the token 5, say all files."""
    another_start_for_others(folder)
    edit_passport(folder, lambda passport: passport.update(special=[0, 5, 3]))


def permute_vocabulary(folder: Path) -> None:
    """The pieces that are no special tokens change places."""
    path = folder / "vocab.json"
    vocabulary: dict[str, int] = json.loads(path.read_text("utf-8"))
    plain = [piece for piece in vocabulary if not piece.startswith("<")]
    ids = [vocabulary[piece] for piece in plain]
    vocabulary.update(zip(plain, [*ids[1:], ids[0]], strict=True))
    path.write_text(json.dumps(vocabulary), "utf-8")
    sign(folder)


def damage_tokenizer(folder: Path) -> None:
    """A signed file that is no SentencePiece model."""
    (folder / "source.spm").write_bytes(b"no pieces")
    sign(folder)


def exam_edit(change: Callable[[Exam], Exam]) -> Edit:
    """What puts what `change` makes of the exam into its place, and signs the result."""

    def edit(folder: Path) -> None:
        save_exam(change(load_exam(folder / GOLDEN)), folder / GOLDEN)
        sign(folder)

    return edit


def without(*parts: str) -> Callable[[Exam], Exam]:
    """What leaves nothing in `parts` of an exam."""
    nothing: dict[str, Any] = {part: [] for part in parts}
    if "cache" in nothing:
        nothing["cache"] = CacheCheck(prefixes=0, error=0.0)
    return lambda exam: msgspec.structs.replace(exam, **nothing)


def without_answers(exam: Exam) -> Exam:
    """An exam whose first question has lost its answers; others ask for the same outputs."""
    first, *others = exam.graphs
    return msgspec.structs.replace(exam, graphs=[msgspec.structs.replace(first, reference={}, own_error={}), *others])


def with_broken_cache(exam: Exam) -> Exam:
    """An exam by a reference whose steps are not its forward."""
    return msgspec.structs.replace(exam, cache=CacheCheck(prefixes=11, error=1e-3))


@cache
def exam_of_another(**changes: int) -> Exam:
    """An exam about a random model, with the settings of the one in tests/data but for `changes`."""
    bundle = Bundle(TINY)
    config = msgspec.convert(bundle.passport.model | changes, ModelConfig)
    sentences = {case.text: case.source_ids for case in load_exam(TINY / GOLDEN).tokens[:4]}
    examiner = Examiner(random_model(config, 1), 1, open_tokenizer(TINY))
    return examiner.write(recorded_sizes(config.max_positions), sentences)

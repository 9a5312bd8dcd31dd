"""The fault injector: a table of broken bundles, the lowest rung that can see each, and what is to be said about it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import injector_files_support as files
import injector_graphs_support as graphs
import injector_search_support as search
import numpy as np
from injector_files_support import Edit, exam_edit, passport_edit, weights_edit
from injector_graphs_support import graph_edit
from runtime_support import tiny_copy

from runtime.bundle import Bundle
from runtime.contract import BATCH, BEGIN, BRANCH, ENCODE, PREFILL, RANK, SELECT, SOURCE, STEP
from runtime.errors import RuntimeFault
from runtime.exam import Exam
from runtime.session import OrtBackend
from runtime.verify import sit_bundle

REFUSED, PASSED = "refused", "passed"


class Fault(NamedTuple):
    """One way to break a bundle."""

    edit: Edit
    """Changes a copy of the bundle in tests/data, in place."""
    rung: str
    """The lowest that can see it; `REFUSED` where the bundle is not even opened."""
    message: str
    """What must be said, as a regular expression."""


class Finding(NamedTuple):
    """What the examiner says about a bundle."""

    rung: str
    """The lowest that failed, `REFUSED` or `PASSED`."""
    message: str


def plant(fault: Fault, folder: Path) -> Path:
    """A copy of the bundle in tests/data at `folder`, with the fault in it."""
    fault.edit(tiny_copy(folder))
    return folder


def verdict(folder: Path, exam: Exam | None = None) -> Finding:
    """The lowest rung on which the bundle in `folder` fails, and the first sentence about it."""
    try:
        bundle = Bundle(folder)
        report = sit_bundle(bundle, OrtBackend(bundle, threads=1), exam)
    except RuntimeFault as refusal:
        return Finding(REFUSED, str(refusal))
    failed = [rung for rung in report.rungs if not rung.passed]
    return Finding(str(failed[0].rung), failed[0].problems[0]) if failed else Finding(PASSED, "")


def fewer_positions(passport: dict[str, Any]) -> None:
    passport["dims"].update(max_positions=12)
    passport["generation"].update(max_length=12)


def _weights(change: Callable[[dict[str, Any]], None], rung: str, message: str) -> Fault:
    return Fault(weights_edit(change), rung, message)


def _passport(rung: str, message: str, **changes: Any) -> Fault:
    return Fault(passport_edit(lambda passport: passport.update(changes)), rung, message)


def _dims(rung: str, message: str, **changes: int) -> Fault:
    return Fault(passport_edit(lambda passport: passport["dims"].update(changes)), rung, message)


def _exam(change: Callable[[Exam], Exam], rung: str, message: str) -> Fault:
    return Fault(exam_edit(change), rung, message)


def _graph(verb: str, change: graphs.Change, rung: str, message: str) -> Fault:
    return Fault(graph_edit(verb, change), rung, message)


def _at_precision(precision: str, edit: Edit, rung: str, message: str) -> Fault:
    def both(folder: Path) -> None:
        edit(folder)
        passport_edit(lambda passport: passport.update(precision=precision))(folder)

    return Fault(both, rung, message)


MEMORY = "encode: last_hidden_state is"
WEIGHTS: dict[str, Fault] = {
    "one weight changed": Fault(files.change_one("encoder.layers.1.feed_forward.fc2.weight.T", (7, 9)), "2", MEMORY),
    "one weight NaN": Fault(
        files.change_one("decoder.layers.0.feed_forward.fc2.bias", (3,), float("nan")), "2", "prefill: logits is nan"
    ),
    "one head zeroed": _weights(files.zero_a_head, "2", MEMORY),
    "encoder layers in another order": _weights(files.swap_layers, "2", MEMORY),
    "square weight transposed": _weights(files.transpose_a_square, "2", "prefill: logits is"),
    "weights rounded to fp16, passport says fp32": _weights(files.round_to_half, "2", MEMORY),
    "fp16 bundle, one weight beyond fp16": _at_precision(
        "fp16", weights_edit(files.overflow_in_half), "2", f"{MEMORY} (nan|inf)"
    ),
    "weights.bin of another training state": Fault(
        files.stale_unsigned, REFUSED, "weights.bin has other contents than recorded"
    ),
    "weights.bin of another training state, signed": _weights(files.another_epoch, "2", MEMORY),
    "weights.bin cut short": Fault(files.truncate, REFUSED, r"weights.bin has \d+ bytes, expected \d+"),
    "weights.bin cut short, signed": Fault(
        files.truncate_and_sign, REFUSED, r"cannot load .*encoder_model.onnx: .*out of bounds"
    ),
}
PASSPORT: dict[str, Fault] = {
    "passport with an unknown field": _passport(REFUSED, "bundle.json is damaged: .*unknown field `hue`", hue="blue"),
    "passport with another digest": Fault(
        passport_edit(lambda passport: passport["files"]["decoder_model.onnx"].update(sha256="0" * 64)),
        REFUSED,
        "decoder_model.onnx has other contents than recorded",
    ),
    "passport with an unknown precision": _passport(REFUSED, "'fp8' has no thresholds", precision="fp8"),
    "passport with other heads": _dims(
        "0", r"present.0.decoder.key is float32 \(batch_size, 2, .*, 16\), expected .*4, .*, 8\)", heads=4, head_dim=8
    ),
    "passport with one layer more": _dims("0", "prefill: present.1.decoder.key is missing", layers=2),
    "passport with more positions": _dims("0", "has 48 positions, the exam goes as far as 24", max_positions=48),
    "passport with fewer positions than outputs have tokens": _dims(
        REFUSED, "outputs have up to 24 tokens, the model 12 positions", max_positions=12
    ),
    "passport with fewer positions": Fault(
        passport_edit(fewer_positions), "0", "has 12 positions, the exam goes as far as 24"
    ),
    "passport with fewer source words": _dims(
        "0", "the exam has the source id 44, the passport 40", source_vocab_size=40
    ),
    "passport with another start id": _passport(
        REFUSED, r"generation_config\.json: decoder_start_token_id is 2, the passport says 5", special=[0, 5, 3]
    ),
    "another start id everywhere": Fault(files.another_start, "0", "the start id is 5 in the passport, PyTorch's is 2"),
    "another start id for other readers": Fault(
        files.another_start_for_others, REFUSED, r"config\.json: decoder_start_token_id is 5, the passport says 2"
    ),
    "graphs in each other's roles": Fault(
        passport_edit(
            lambda passport: passport["roles"].update(prefill="decoder_with_past_model.onnx", step="decoder_model.onnx")
        ),
        "0",
        "prefill: encoder_hidden_states is missing",
    ),
    "tokenizer with a permuted vocabulary": Fault(
        files.permute_vocabulary, "4", "the tokenizer makes other source ids of '.*' than the one of the exam"
    ),
    "tokenizer that is no tokenizer": Fault(files.damage_tokenizer, REFUSED, "source.spm is not a SentencePiece model"),
}
EXAM: dict[str, Fault] = {
    "exam emptied": _exam(files.without("cache", "graphs", "rollouts", "tokens"), "1", "nothing was compared"),
    "exam without graph cases": _exam(files.without("graphs"), "2", f"{MEMORY[:-2]}was never compared"),
    "exam with a question that has no answers": _exam(
        files.without_answers, "0", "the exam answers encode B=5 S=1 with other outputs than the contract has"
    ),
    "exam without rollouts": _exam(files.without("rollouts"), "3", "nothing was compared"),
    "exam without sentences": _exam(files.without("tokens"), "4", "nothing was compared"),
    "exam by a reference with a broken cache": _exam(
        files.with_broken_cache, "1", "prefill and steps differ from one forward by 0.001, allowed is 1e-09"
    ),
    "exam of another model": _exam(lambda _: files.exam_of_another(), "2", MEMORY),
    "exam of a model with more layers": _exam(
        lambda _: files.exam_of_another(decoder_layers=2),
        "0",
        "the exam gives step past_key_values.1.decoder.key, which",
    ),
    "exam of a wider model": _exam(
        lambda _: files.exam_of_another(d_model=48),
        "0",
        r"prefill encoder_hidden_states as float32 \(5, 1, 48\), expected",
    ),
    "exam of a model with more words": _exam(
        lambda _: files.exam_of_another(vocab_size=61), "0", "the exam has the source id 60, the passport 45 entries"
    ),
}
OUTPUTS: dict[str, Fault] = {
    "two outputs swapped": _graph(STEP, graphs.swap_outputs("decoder"), "2", "step: present.0.decoder.key is"),
    "cache in another memory order": _graph(PREFILL, graphs.turn_cache, "2", "prefill: present.0.decoder.key is"),
    "cross cache of another sentence": _graph(
        PREFILL, graphs.roll_cross_cache, "2", "prefill: present.0.encoder.key is"
    ),
    "cache that does not grow": _graph(
        STEP, graphs.forget_to_grow, "2", r"step: present.0.decoder.key is .*its shape is \(5, 2, 1, 16\), expected"
    ),
    "cache that grows in front": _graph(
        STEP, graphs.grow_in_front, "2", "step: present.0.decoder.key is .*does not begin with the past that went in"
    ),
    "output missing": _graph(PREFILL, graphs.drop_output, "0", "prefill: present.0.encoder.value is missing"),
    "output in float16": _graph(
        STEP, graphs.halve_logits, "0", r"step: logits is tensor\(float16\) .*expected float32"
    ),
}
STEPS = "from what steps give, earned is"
SEARCH: dict[str, Fault] = {
    "beginnings that mix keys and values": _graph(
        BEGIN, graphs.swap_outputs("encoder"), "2", r"begin: present.0.encoder.key is [\d.]+ from the reference"
    ),
    "beginnings with the source of another sentence": _graph(
        BEGIN, graphs.roll_cross_cache, "2", "begin: present.0.encoder.key is"
    ),
    "beginnings without a bias": _graph(
        BEGIN, graphs.drop_bias("cross_attention.v_proj/Add"), "2", "begin: present.0.encoder.value is"
    ),
    "beginnings that hold a token already": _graph(BEGIN, search.begin_with_a_token, "3", "at position 0 the error is"),
    "a prefill in the role of beginnings": Fault(
        passport_edit(lambda passport: passport["roles"].update(begin="decoder_model.onnx")),
        "0",
        "begin: encoder_attention_mask is not in the contract",
    ),
    "branches one position before their own": _graph(
        BRANCH, search.place_one_before, "2", rf"branch: logits is [\d.]+ {STEPS}"
    ),
    "branches at the end of the whole cache": _graph(
        BRANCH, search.place_at_the_end, "2", rf"branch: logits is [\d.]+ {STEPS}"
    ),
    "branches that see the whole cache": _graph(
        BRANCH, search.see_all_of("past"), "2", rf"branch: logits is [\d.]+ {STEPS}"
    ),
    "branches that see each other": _graph(
        BRANCH, search.see_all_of("others"), "2", rf"branch: logits is [\d.]+ {STEPS}"
    ),
    "branches that go on from another one's past": _graph(
        BRANCH, search.mirror_seen, "2", rf"branch: logits is [\d.]+ {STEPS}"
    ),
    "branches that mix keys and values": _graph(BRANCH, search.swap_grown, "2", rf"branch: logits is [\d.]+ {STEPS}"),
    "new keys of branches in another memory order": _graph(
        BRANCH, search.turn_new_keys, "2", rf"branch: present.0.decoder.key is [\d.]+ {STEPS}"
    ),
    "branches by another weight": _graph(BRANCH, search.read_another_weight, "2", rf"branch: logits is [\d.]+ {STEPS}"),
    "cross mask dropped in branches": _graph(
        BRANCH, graphs.drop_mask("cross"), "2", rf"branch: logits is [\d.]+ {STEPS}"
    ),
    "a step in the role of branches": Fault(
        passport_edit(lambda passport: passport["roles"].update(branch="decoder_with_past_model.onnx")),
        "0",
        "branch: seen is missing",
    ),
    "tokens ranked with the forbidden ones": _graph(
        RANK,
        graphs.drop_bias("rank/Add"),
        "2",
        r"rank: of the best 1 without \d+ .*some are tokens that were forbidden",
    ),
    "tokens normed over positions": _graph(
        RANK, search.norm_over(1), "2", "rank: of the best 1, a log-probability is .* from its token's"
    ),
    "tokens ranked by logits": _graph(
        RANK, search.forget_the_norm, "2", "rank: of the best 1, a log-probability is .* from its token's"
    ),
    "tokens in any order": _graph(RANK, search.leave_unsorted, "2", "rank: of the best 8, some are not in order"),
    "tokens ranked from the worst": _graph(
        RANK, search.take_the_worst, "2", "rank: of the best 1, some are not the best"
    ),
    "other rows picked for the beams": _graph(
        SELECT, graphs.pick_other_rows, "2", "select: decoder_key of layer 0 has other rows"
    ),
}
SIZES: dict[str, Fault] = {
    "batch frozen": _graph(ENCODE, graphs.declare_size(BATCH), "0", r"encode: input_ids is int64 \(4, encoder"),
    "source length frozen": _graph(
        PREFILL, graphs.declare_size(SOURCE), "0", r"prefill: encoder_attention_mask is int64 \(batch_size, 5\)"
    ),
    "batch frozen inside": _graph(ENCODE, graphs.hide_size(BATCH), "2", f"{MEMORY} inf .*gave up in encode: .*Reshape"),
    "source length frozen inside": _graph(
        ENCODE, graphs.hide_size(SOURCE), "2", f"{MEMORY} inf .*gave up in encode: .*Reshape"
    ),
    "position off by one": _graph(STEP, graphs.move_positions(graphs.one_before), "2", "step: logits is"),
    "position of the traced past": _graph(STEP, graphs.move_positions(graphs.traced), "2", "step: logits is"),
    "positions that end at 20": _graph(STEP, graphs.move_positions(graphs.at_most(20)), "2", "step: logits .*P=23"),
    "position wrong at a past of 20 alone": _graph(
        STEP, graphs.move_positions(graphs.off_at(20)), "3", "at position 20 the error is"
    ),
    "step that gives up at a past of 20 alone": _graph(
        STEP, graphs.move_positions(graphs.nowhere_at(20)), "3", "at position 20 the error is inf.*gave up in step"
    ),
    "causal mask of 8 tokens": _graph(
        PREFILL, graphs.look_ahead_from(8), "3", "at position 8 of one long prefill the error is"
    ),
}
MASKS: dict[str, Fault] = {
    "mask inverted": _graph(ENCODE, graphs.invert_mask, "2", MEMORY),
    "mask dropped in the encoder": _graph(ENCODE, graphs.drop_mask("self"), "2", MEMORY),
    "mask dropped in a step": _graph(STEP, graphs.drop_mask("cross"), "2", "step: logits is"),
    "causal mask dropped": _graph(PREFILL, graphs.drop_mask("self"), "2", "prefill: logits is"),
    "NaN in rows of padding alone": _graph(ENCODE, graphs.mask_by_infinity, "2", f"{MEMORY} nan"),
}
MATHEMATICS: dict[str, Fault] = {
    "bias dropped": _graph(STEP, graphs.drop_bias("cross_attention.out_proj/Add"), "2", "step: logits is"),
    "embedding not scaled by sqrt(E)": _graph(
        PREFILL, graphs.replace_input("decoder.embedding/Mul", 1, np.float32(1)), "2", "prefill: logits is"
    ),
    "scores scaled by 1/D": _graph(STEP, graphs.forget_the_root, "2", "step: logits is"),
    "epsilon of the norms 1e-3, not 1e-5": _graph(ENCODE, graphs.set_epsilon(1e-3), "2", MEMORY),
    "epsilon of the norms 1e-6, not 1e-5": _graph(PREFILL, graphs.set_epsilon(1e-6), "2", "prefill: .* is"),
    "GELU, not ReLU": _graph(PREFILL, graphs.smooth_the_activation, "2", "prefill: logits is"),
    "cross cache of the first sentence for all": _graph(
        STEP, graphs.read_the_first_source_from(0), "2", "step: logits is"
    ),
    "cross cache of the first sentence from row 8 on": _graph(
        STEP, graphs.read_the_first_source_from(8), "5", "logits twice in one batch: a logit moves by"
    ),
    "int8 bundle, activations scaled by the batch": _at_precision(
        "int8", graph_edit(STEP, graphs.quantise_by_the_batch), "5", "logits .*: a logit moves by"
    ),
}
FAULTS: dict[str, Fault] = {**WEIGHTS, **PASSPORT, **EXAM, **OUTPUTS, **SEARCH, **SIZES, **MASKS, **MATHEMATICS}

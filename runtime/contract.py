"""What goes in and out of each graph: names, types, axes. The exporter conforms to this page; rung 0 checks it.

The names are those of Hugging Face Optimum, so that a bundle opens there unchanged.
Letters: B batch, S source, T target of this call, P past, L layers, H heads, D head size, E model width, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

BATCH = "batch_size"
SOURCE = "encoder_sequence_length"
TARGET = "decoder_sequence_length"
PAST = "past_decoder_sequence_length"
GROWN = "past_decoder_sequence_length + decoder_sequence_length"

ENCODE, PREFILL, STEP = "encode", "prefill", "step"
VERBS = (ENCODE, PREFILL, STEP)
"""The spine: what every runtime of such models has."""
BEGIN, BRANCH, RANK, SELECT = "begin", "branch", "rank", "select"
"""What a search has besides: caches of no tokens, several hypotheses about one source, the best tokens, chosen rows."""

GRAPH_FILES = {
    ENCODE: "encoder_model.onnx",
    PREFILL: "decoder_model.onnx",
    STEP: "decoder_with_past_model.onnx",
    BEGIN: "begin_model.onnx",
    BRANCH: "branch_model.onnx",
    RANK: "search/rank_tokens.onnx",
    SELECT: "search/select_rows.onnx",
}
"""Where each graph lies in a bundle. `rank` and `select` have no weights: they work on tensors where these are."""


class Dims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes that do not change from call to call."""

    layers: int
    """L, of the decoder."""
    heads: int
    """H, of the decoder."""
    head_dim: int
    """D, of the decoder."""
    width: int
    """E"""
    vocab_size: int
    """V"""
    source_vocab_size: int
    max_positions: int
    """Longest source, and longest target with its start token."""


class TensorSpec(NamedTuple):
    """One input or output: a string in `shape` names an axis whose size may change from call to call."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class GraphSpec(NamedTuple):
    """Inputs and outputs of one graph, in order."""

    verb: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def graph_specs(dims: Dims) -> dict[str, GraphSpec]:
    """The contract of every graph of a model with these `dims`, by verb."""
    source_mask = TensorSpec("encoder_attention_mask", "int64", (BATCH, SOURCE))
    memory = (BATCH, SOURCE, dims.width)
    return {
        ENCODE: GraphSpec(
            ENCODE,
            (
                TensorSpec("input_ids", "int64", (BATCH, SOURCE)),
                TensorSpec("attention_mask", "int64", (BATCH, SOURCE)),
            ),
            (TensorSpec("last_hidden_state", "float32", memory),),
        ),
        PREFILL: GraphSpec(
            PREFILL,
            (
                source_mask,
                TensorSpec("input_ids", "int64", (BATCH, TARGET)),
                TensorSpec("encoder_hidden_states", "float32", memory),
            ),
            (
                TensorSpec("logits", "float32", (BATCH, TARGET, dims.vocab_size)),
                *_cache(dims, "present", {"decoder": TARGET, "encoder": SOURCE}),
            ),
        ),
        STEP: GraphSpec(
            STEP,
            (
                source_mask,
                TensorSpec("input_ids", "int64", (BATCH, 1)),
                *_cache(dims, "past_key_values", {"decoder": PAST, "encoder": SOURCE}),
            ),
            (
                TensorSpec("logits", "float32", (BATCH, 1, dims.vocab_size)),
                *_cache(dims, "present", {"decoder": GROWN}),
            ),
        ),
        BEGIN: GraphSpec(
            BEGIN,
            (TensorSpec("encoder_hidden_states", "float32", memory),),
            tuple(_cache(dims, "present", {"decoder": 0, "encoder": SOURCE})),
        ),
        BRANCH: GraphSpec(
            BRANCH,
            (
                source_mask,
                TensorSpec("input_ids", "int64", (BATCH, TARGET)),
                TensorSpec("seen", "int64", (BATCH, TARGET, PAST)),
                *_cache(dims, "past_key_values", {"decoder": PAST, "encoder": SOURCE}),
            ),
            (
                TensorSpec("logits", "float32", (BATCH, TARGET, dims.vocab_size)),
                *_cache(dims, "present", {"decoder": GROWN}),
            ),
        ),
        RANK: GraphSpec(
            RANK,
            (
                TensorSpec("logits", "float32", (BATCH, TARGET, dims.vocab_size)),
                TensorSpec("bias", "float32", (dims.vocab_size,)),
                TensorSpec("count", "int64", (1,)),
            ),
            (
                TensorSpec("log_probabilities", "float32", (BATCH, TARGET, "count")),
                TensorSpec("tokens", "int64", (BATCH, TARGET, "count")),
            ),
        ),
        SELECT: _select_spec(dims),
    }


def contract_problems(contract: Mapping[str, GraphSpec], found: Mapping[str, GraphSpec]) -> list[str]:
    """Where the graphs that were `found` differ from the `contract`, every difference a line."""
    problems = []
    for verb, expected in contract.items():
        for side in ("inputs", "outputs"):
            wanted: tuple[TensorSpec, ...] = getattr(expected, side)
            actual: tuple[TensorSpec, ...] = getattr(found[verb], side)
            theirs, ours = {spec.name: spec for spec in wanted}, {spec.name: spec for spec in actual}
            problems += [f"{verb}: {name} is missing" for name in theirs if name not in ours]
            problems += [f"{verb}: {name} is not in the contract" for name in ours if name not in theirs]
            problems += [
                f"{verb}: {name} is {_described(ours[name])}, expected {_described(spec)}"
                for name, spec in theirs.items()
                if name in ours and ours[name] != spec
            ]
            if theirs.keys() == ours.keys() and list(theirs) != list(ours):
                problems.append(f"{verb}: {side} are in another order than in the contract")
    return problems


def _described(spec: TensorSpec) -> str:
    return f"{spec.dtype} ({', '.join(map(str, spec.shape))})"


def _select_spec(dims: Dims) -> GraphSpec:
    def caches(prefix: str, rows: str) -> tuple[TensorSpec, ...]:
        shape = (rows, dims.heads, "length", dims.head_dim)
        return tuple(TensorSpec(f"{prefix}.{index}", "float32", shape) for index in range(2 * dims.layers))

    return GraphSpec(
        SELECT, (TensorSpec("rows", "int64", ("selected",)), *caches("cache", BATCH)), caches("selected", "selected")
    )


def _cache(dims: Dims, prefix: str, lengths: Mapping[str, int | str]) -> Iterator[TensorSpec]:
    """Caches layer by layer; `lengths` has the length axis of each side, "decoder" for self-attention."""
    for layer in range(dims.layers):
        for side, length in lengths.items():
            for kind in ("key", "value"):
                name = f"{prefix}.{layer}.{side}.{kind}"
                yield TensorSpec(name, "float32", (BATCH, dims.heads, length, dims.head_dim))

"""PyTorch writes the exam: inputs, float64 answers, and how far PyTorch-float32 is from these."""

import copy
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import NamedTuple

import numpy as np

from models.transformer import Transformer
from runtime.backend import Array
from runtime.contract import ENCODE, PREFILL, STEP
from runtime.decoding import SpecialIds
from runtime.exam import CacheCheck, Exam, GraphCase, RolloutCase, TokenCase
from runtime.generation import GenerationConfig, generate, pad
from runtime.parity.candidate import rollout
from runtime.parity.tolerance import largest_error, worst
from runtime.tokenizer import Tokenizer
from runtime.verbs import call

from .modules import module_outputs
from .reference import TorchBackend

COLUMNS = 32
"""Logits that a rollout keeps at each position: the most probable ones, which decide what comes next."""
TOPS = {1: 16, 4: 5}
"""Most probable tokens that are kept beside an output, by beams: divergence is measured along the greedy ones."""
WHOLE = 2**14
"""Entries of the largest vocabulary that a sweep feeds whole; beyond, it would take minutes."""
ALL_TOKENS = "all tokens"
"""In the labels of cases that feed a whole vocabulary."""
EMPTY_ROW = 5
"""From so many rows on, the last one of a batch is nothing but padding."""


class Sizes(NamedTuple):
    """Which sizes an exam asks for: batch, source, prefix and past of each verb's cases."""

    encode: Sequence[tuple[int, int]]
    prefill: Sequence[tuple[int, int, int]]
    step: Sequence[tuple[int, int, int]]
    rollout: Sequence[tuple[int, int, int]]
    """Batch, source and number of target tokens."""
    pool: int
    """Of so many vectors of the reference's memory and caches the inputs of the decoder's graphs are put together."""
    columns: int | None
    """Most logits that are kept of each position; None for all."""
    whole: bool
    """Whether every token of both vocabularies is fed once, as far as these have at most `WHOLE` entries."""
    light: bool = False
    """For a lower precision, see `light_sizes`: numbers of 11 bits, and nothing about the modules inside the graphs."""


def recorded_sizes(max_positions: int) -> Sizes:
    """Every size once: what goes into a bundle. The rollout passes through every past that the model has room for."""
    batches, sources, pasts = (5, 3, 2, 1), _sources(max_positions), _pasts(max_positions)
    return Sizes(
        encode=list(zip(batches, sources, strict=True)),
        prefill=list(zip(batches, sources, (1, 4, 1, 4), strict=True)),
        step=list(zip(batches, sources, pasts, strict=True)),
        rollout=_rollouts(max_positions),
        pool=16,
        columns=2048,
        whole=False,
    )


def light_sizes(max_positions: int) -> Sizes:
    """What goes into a bundle of lower precision, whose thresholds need less: a few MB would undo what it saves.

    The longest source and the longest past come together in a chain through all positions, beside 32 logits of each,
    instead of with every number of every cache.
    """
    whole, most = recorded_sizes(max_positions), min(33, max_positions)
    short = [size for size in whole.encode if size[1] <= most]
    return whole._replace(
        encode=short,
        prefill=[size for size in whole.prefill if size[:2] in short],
        step=[size for size in whole.step if size[:2] in short],
        rollout=[whole.rollout[0], (1, max_positions, max_positions)],
        pool=8,
        columns=1024,
        light=True,
    )


def sweep_sizes(max_positions: int) -> Sizes:
    """Every pair of sizes: what an export must pass. None of them is a size that was traced."""
    batches, sources, prefixes, pasts = (1, 2, 3, 5), _sources(max_positions), (1, 4), _pasts(max_positions)
    # A square in which each row and each column has every batch size once.
    squares = [(batches[(row + column) % 4], row, column) for row in range(4) for column in range(4)]
    return Sizes(
        encode=[(batch, sources[row]) for batch, row, _ in squares],
        prefill=[(batch, sources[row], prefixes[(row + column // 2) % 2]) for batch, row, column in squares],
        step=[(batch, sources[row], pasts[column]) for batch, row, column in squares],
        rollout=_rollouts(max_positions),
        pool=64,
        columns=None,
        whole=True,
    )


def _sources(max_positions: int) -> list[int]:
    return [1, min(7, max_positions), min(33, max_positions), max_positions]


def _pasts(max_positions: int) -> list[int]:
    return [1, 2, min(17, max_positions - 1), max_positions - 1]


def _rollouts(max_positions: int) -> list[tuple[int, int, int]]:
    source = min(7, max_positions)
    return [(3, source, min(65, max_positions)), (1, source, max_positions)]


class Examiner:
    """Writes exams about one model.

    Args:
        model: In float32; it is not changed.
        seed: Of the random inputs. The same seed, model and versions give the same exam.
        tokenizer: Reads the reference's outputs.
    """

    def __init__(self, model: Transformer, seed: int, tokenizer: Tokenizer) -> None:
        self._config = model.config
        self._seed = seed
        self._tokenizer = tokenizer
        self._reference = TorchBackend(copy.deepcopy(model).double())
        self._float32 = TorchBackend(copy.deepcopy(model).float())
        self._random = np.random.default_rng(seed)
        self._decks: dict[str, list[int]] = {}
        self._pool: dict[str, Array] = {}
        self._light = False

    def write(self, sizes: Sizes, sentences: Mapping[str, Sequence[int]], *, explain_all: bool = False) -> Exam:
        """An exam with cases of `sizes`, and token cases for `sentences`, source ids by text.

        Three small cases besides tell what the modules inside the graphs give; with `explain_all` every case does.
        """
        self._light = sizes.light
        self._pool = self._vectors(sizes.pool)
        small = min(2, self._config.max_positions)
        questions: list[tuple[str, tuple[int, ...]]] = [
            *((ENCODE, size) for size in sizes.encode),
            *((PREFILL, size) for size in sizes.prefill),
            *((STEP, size) for size in sizes.step),
        ]
        explained = (
            [] if sizes.light else [(ENCODE, (2, small)), (PREFILL, (2, small, small)), (STEP, (2, small, small))]
        )
        return Exam(
            seed=self._seed,
            tools=tool_versions("torch"),
            special=special_ids(self._config),
            cache=self.check_cache(),
            graphs=[
                *(
                    self._graph_case(verb, size, sizes.columns, explained=explain_all)
                    for verb, size in dict.fromkeys(questions)
                ),
                *(self._graph_case(verb, size, sizes.columns, explained=True) for verb, size in explained),
                *self._whole(sizes),
            ],
            rollouts=[self._rollout_case(*size) for size in sizes.rollout],
            tokens=[self._token_case(text, ids, beams) for text, ids in sentences.items() for beams in TOPS],
        )

    def _whole(self, sizes: Sizes) -> Iterator[GraphCase]:
        """As many long rows as it takes until every token has been dealt."""
        longest = self._config.max_positions
        for verb, row, size in (
            (ENCODE, (1, longest), self._config.encoder_vocab_size),
            (PREFILL, (1, 1, longest), self._config.vocab_size),
        ):
            for place in range(math.ceil(size / (longest - 1)) if sizes.whole and size <= WHOLE else 0):
                case = self._graph_case(verb, row, COLUMNS, explained=False)
                case.label += f", {ALL_TOKENS} {place + 1}"
                yield case

    def check_cache(self, length: int = 12) -> CacheCheck:
        """Rung 1: of `length` target tokens, none, one and so on in one prefill and the rest in steps."""
        length = min(length, self._config.max_positions)
        source_ids, mask = self._sources(2, min(7, self._config.max_positions))
        fed = partial(rollout, self._reference, source_ids, mask, self._targets(2, length))
        whole = np.stack(fed(prompt=length), 1)  # (B, N, V)
        errors = [float(np.abs(np.stack(fed(prompt=prompt), 1) - whole).max()) for prompt in range(length)]
        return CacheCheck(prefixes=length, error=worst(errors) / float(np.abs(whole).max()))

    def _graph_case(self, verb: str, sizes: tuple[int, ...], columns: int | None, *, explained: bool) -> GraphCase:
        inputs = self._inputs(verb, *sizes)
        exact, own = (
            _without_past(call(backend, verb, inputs), inputs) for backend in (self._reference, self._float32)
        )
        answers = {name: array.astype(np.float32) for name, array in exact.items()}
        errors = {name: largest_error(own[name], answer) for name, answer in answers.items()}
        reference = {name: self._stored(answer) for name, answer in answers.items()}
        letters = {ENCODE: "BS", PREFILL: "BST", STEP: "BSP"}[verb]
        case = GraphCase(
            verb=verb,
            label=" ".join(f"{letter}={size}" for letter, size in zip(letters, sizes, strict=True)),
            inputs=inputs,
            reference=reference,
            own_error=errors,
        )
        if "logits" in reference and columns is not None and columns < self._config.vocab_size:
            case.columns = np.sort(self._draw((columns,), "columns"))  # (C,)
            case.reference["logits"] = reference["logits"][..., case.columns]
        if explained:
            self._tell_of_modules(case)
        return case

    def _tell_of_modules(self, case: GraphCase) -> None:
        exact, own = (
            module_outputs(backend.model, partial(call, backend, case.verb, case.inputs))
            for backend in (self._reference, self._float32)
        )
        case.modules = {path: array.astype(np.float32) for path, array in exact.items()}
        case.module_errors = {path: largest_error(own[path], answer) for path, answer in case.modules.items()}

    def _inputs(self, verb: str, batch: int, source: int, target: int = 0) -> dict[str, Array]:
        """What `verb` reads; memory and caches are put together of vectors of the reference's, in float32."""
        ids, mask = self._sources(batch, source)
        if verb == ENCODE:
            return {"input_ids": ids, "attention_mask": mask}
        states = self._places((batch, source), "encoder_hidden_states")
        if verb == PREFILL:
            return {
                "encoder_attention_mask": mask,
                "input_ids": self._targets(batch, target),
                "encoder_hidden_states": self._pool["encoder_hidden_states"][states],  # (B, S, E)
            }
        own = self._places((batch, target), "past_key_values.0.decoder.key")
        past = {
            name: vectors[states if ".encoder." in name else own].swapaxes(1, 2)  # (B, H, P, D)
            for name, vectors in self._pool.items()
            if name.startswith("past_key_values")
        }
        return {"encoder_attention_mask": mask, "input_ids": self._draw((batch, 1), "target"), **past}

    def _vectors(self, count: int) -> dict[str, Array]:
        """`count` vectors of memory `(N, E)`, and as many of each cache `(N, H, D)`."""
        length = min(count // 2, self._config.max_positions)
        ids = self._draw((2, length), "source")
        encode = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        memory = call(self._reference, ENCODE, encode)["last_hidden_state"].astype(np.float32)
        prefill = {
            "encoder_attention_mask": np.ones_like(ids),
            "input_ids": self._targets(2, length),
            "encoder_hidden_states": memory,
        }
        present = call(self._reference, PREFILL, prefill)
        caches = {
            name.replace("present.", "past_key_values."): array.swapaxes(1, 2)  # (2, N / 2, H, D)
            for name, array in present.items()
            if name != "logits"
        }
        return {
            name: self._stored(array.reshape(-1, *array.shape[2:]))
            for name, array in {"encoder_hidden_states": memory, **caches}.items()
        }

    def _places(self, shape: tuple[int, int], name: str) -> Array:
        return self._deal(shape, name, len(self._pool[name]))

    def _rollout_case(self, batch: int, source: int, length: int) -> RolloutCase:
        ids, mask = self._sources(batch, min(source, self._config.max_positions))
        target_ids = self._targets(batch, length)
        reference, own = (
            np.stack(rollout(backend, ids, mask, target_ids), 1) for backend in (self._reference, self._float32)
        )  # (B, N, V)
        columns = np.argsort(-reference, axis=-1, kind="stable")[:, :, :COLUMNS]  # (B, N, C)
        answers = np.take_along_axis(reference, columns, 2).astype(np.float32)
        errors = np.abs(np.take_along_axis(own, columns, 2).astype(np.float64) - answers).max((0, 2))  # (N,)
        return RolloutCase(
            label=f"B={batch} S={source} N={length}",
            source_ids=ids,
            source_mask=mask,
            target_ids=target_ids,
            columns=columns.astype(np.int64),
            reference=self._stored(answers),
            own_error=errors.tolist(),
        )

    def _token_case(self, text: str, source_ids: Sequence[int], beams: int) -> TokenCase:
        special = special_ids(self._config)
        longest = min(self._config.max_positions, 3 * len(source_ids) + 20)
        config = GenerationConfig(num_beams=beams, max_length=longest)
        ((best,),) = generate(self._reference, [source_ids], config, special, self._config.max_positions)
        top_ids, top_log_probs = self._tops(source_ids, best.ids, TOPS[beams])
        return TokenCase(
            label=f"{text}, {beams} beam{'s' * (beams > 1)}",
            text=text,
            source_ids=list(source_ids),
            config=config,
            ids=best.ids,
            score=best.score,
            translation=self._tokenizer.decode(best.ids),
            top_ids=top_ids,
            top_log_probs=top_log_probs,
        )

    def _tops(self, source_ids: Sequence[int], ids: Sequence[int], count: int) -> tuple[Array, Array]:
        """The reference's most probable tokens before each of `ids`, and their log-probabilities: `(N, count)` each."""
        source, mask = map(self._reference.put, pad([source_ids], self._config.pad_token_id))
        fed = self._reference.put(np.array([[self._config.decoder_start_token_id, *ids[:-1]]]))
        logits, _ = self._reference.prefill(fed, self._reference.encode(source, mask), mask)
        top = logits[0].log_softmax(-1).topk(min(count, self._config.vocab_size), dim=-1)  # (N, count)
        return self._reference.get(top.indices), self._reference.get(top.values).astype(np.float32)

    def _stored(self, array: Array) -> Array:
        """`array` as the exam keeps it: float32, of which a light one leaves out what no threshold of its can see."""
        single = array.astype(np.float32)
        return shortened(single) if self._light else single

    def _sources(self, batch: int, length: int) -> tuple[Array, Array]:
        """Random ids and a ragged mask: the first row is full, the others are shorter where they can be."""
        lengths = [length, *self._random.integers(1, max(length, 2), batch - 1).tolist()]
        if batch >= EMPTY_ROW:
            lengths[-1] = 0
        rows = [self._draw((size,), "source").tolist() for size in lengths]
        return pad(rows, self._config.pad_token_id)

    def _targets(self, batch: int, length: int) -> Array:
        """The start token and random ids after it."""
        start = np.full((batch, 1), self._config.decoder_start_token_id, np.int64)
        return np.concatenate([start, self._draw((batch, length - 1), "target")], 1)

    def _draw(self, shape: tuple[int, ...], kind: str) -> Array:
        """Random ids."""
        return self._deal(shape, kind, self._config.encoder_vocab_size if kind == "source" else self._config.vocab_size)

    def _deal(self, shape: tuple[int, ...], kind: str, size: int) -> Array:
        """Numbers below `size`, dealt like cards: none comes again before all have come, so that neighbours differ."""
        deck = self._decks.setdefault(kind, [])
        count = int(np.prod(shape))
        while len(deck) < count:
            deck.extend(self._random.permutation(size).tolist())
        dealt, self._decks[kind] = deck[:count], deck[count:]
        return np.array(dealt, np.int64).reshape(shape)


def share_own_errors(exam: Exam, wider: Exam) -> None:
    """Raise PyTorch's own errors in `exam` to the largest that `wider` measured for the same outputs.

    A few cases see too few numbers to show how far float32 goes astray.
    """
    largest: dict[tuple[str, str], float] = {}
    for case in (*wider.graphs, *exam.graphs):
        for name, error in case.own_error.items():
            largest[case.verb, name] = worst([error, largest.get((case.verb, name), 0.0)])
    for case in exam.graphs:
        case.own_error = {name: largest[case.verb, name] for name in case.own_error}


def shortened(array: Array) -> Array:
    """float32 numbers rounded to 11 significant bits, as many as float16 has: half the size, compressed."""
    # Adding half of the last bit that stays carries into the exponent where it must.
    bits = (np.ascontiguousarray(array, np.float32).view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)
    result: Array = bits.view(np.float32)
    return result


def _without_past(outputs: Mapping[str, Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Of a cache that grew, the new position alone: the rest stands in the inputs."""
    return {
        name: array[:, :, -1:] if name.replace("present.", "past_key_values.") in inputs else array
        for name, array in outputs.items()
    }


def special_ids(config: object) -> SpecialIds:
    """The ids that a search over this model must know."""
    return SpecialIds(*(getattr(config, f"{name}_token_id") for name in ("pad", "decoder_start", "eos")))


def tool_versions(*packages: str) -> dict[str, str]:
    """Versions of Python, this project and `packages`."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("seq2onnx", "numpy", *packages)},
    }

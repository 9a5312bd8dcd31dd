"""What an exam asks: sizes of which none was traced, rows of padding, every token, every logit."""

import copy
from collections.abc import Callable, Iterator
from itertools import combinations, product

import numpy as np
import pytest
from exporters_support import SMALL, VARIANTS, examiner, random_model

from exporters.golden import ALL_TOKENS, EMPTY_ROW, Sizes, recorded_sizes, sweep_sizes
from exporters.graphs import TRACED
from exporters.reference import TorchBackend
from models.config import ModelConfig
from models.transformer import Transformer
from runtime.backend import Array
from runtime.contract import BATCH, PAST, SOURCE, TARGET
from runtime.exam import Exam, GraphCase
from runtime.verbs import call

Asking = Callable[[int], Sizes]
POSITIONS, VOCABULARY = 40, 45
BATCHES, PREFIXES = {1, 2, 3, 5}, {1, 4}
VERBS = ("encode", "prefill", "step")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(ModelConfig(vocab_size=VOCABULARY, **{**SMALL, "max_positions": POSITIONS}), seed=3)


@pytest.fixture(scope="module")
def recorded(model: Transformer) -> Exam:
    return examiner(model, 20).write(recorded_sizes(POSITIONS), {"a": [9, 3]})


@pytest.fixture(scope="module")
def sweep(model: Transformer) -> Exam:
    return examiner(model, 21).write(sweep_sizes(POSITIONS), {"a": [9, 3]})


def asked_of(exam: Exam, verb: str) -> list[GraphCase]:
    return [case for case in exam.graphs if case.verb == verb]


def shape_of(case: GraphCase) -> tuple[int, ...]:
    """Batch, source, and prefix or past."""
    mask = case.inputs["attention_mask" if case.verb == "encode" else "encoder_attention_mask"]
    if case.verb == "encode":
        return mask.shape
    last = case.inputs["input_ids"] if case.verb == "prefill" else case.inputs["past_key_values.0.decoder.key"][:, 0]
    return *mask.shape, last.shape[1]


# Sizes


def pairs(sizes: list[tuple[int, ...]]) -> set[tuple[int, int, int, int]]:
    """Every two sizes that come together: axis and size of one and the other."""
    return {(one, size[one], other, size[other]) for size in sizes for one, other in combinations(range(len(size)), 2)}


def wanted(positions: int) -> dict[str, list[set[int]]]:
    sources = {1, 7, 33, positions}
    pasts = {1, 2, 17, positions - 1}
    return {"encode": [BATCHES, sources], "prefill": [BATCHES, sources, PREFIXES], "step": [BATCHES, sources, pasts]}


@pytest.mark.parametrize("positions", [40, 512])
@pytest.mark.parametrize("asking", [recorded_sizes, sweep_sizes])
def test_every_size_is_asked_for(asking: Asking, positions: int) -> None:
    asked = asking(positions)
    for verb, axes in wanted(positions).items():
        sizes = getattr(asked, verb)
        assert [{size[axis] for size in sizes} for axis in range(len(axes))] == axes


@pytest.mark.parametrize("positions", [40, 512])
def test_the_sweep_asks_for_every_two_sizes_together(positions: int) -> None:
    asked = sweep_sizes(positions)
    for verb, axes in wanted(positions).items():
        every = {
            (one, size, other, another)
            for (one, sizes), (other, others) in combinations(enumerate(axes), 2)
            for size, another in product(sizes, others)
        }
        assert pairs(list(getattr(asked, verb))) == every, verb


def sizes_of(asked: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    for verb in (*VERBS, "rollout"):
        yield from ((verb, size) for size in getattr(asked, verb))


@pytest.mark.parametrize("positions", [8, 9, 12, 18, 20, 33, 64, 65, 200, 512])
@pytest.mark.parametrize("asking", [recorded_sizes, sweep_sizes])
def test_no_exam_asks_for_a_size_that_was_traced_or_has_no_room(asking: Asking, positions: int) -> None:
    asked = asking(positions)
    sizes = list(sizes_of(asked))
    batches, sources = ({size[axis] for _, size in sizes} for axis in (0, 1))
    targets, pasts = ({size[2] for verb, size in sizes if verb == name} for name in ("prefill", "step"))
    assert TRACED[BATCH] not in batches
    assert TRACED[SOURCE] not in sources
    assert TRACED[TARGET] not in targets
    assert TRACED[PAST] not in pasts
    assert max(sources | targets) <= positions
    assert max(pasts) < positions
    assert min(sources | targets | pasts | batches) == 1
    assert max(length for _, _, length in asked.rollout) == positions


def test_traced_sizes_are_different_and_neither_0_nor_1() -> None:
    assert len(set(TRACED.values())) == len(TRACED)
    assert min(TRACED.values()) >= 2


def test_cases_are_about_what_was_asked_for_and_none_is_of_a_traced_size(recorded: Exam, sweep: Exam) -> None:
    for exam, asking in ((recorded, recorded_sizes), (sweep, sweep_sizes)):
        for verb in VERBS:
            shapes = [shape_of(case) for case in asked_of(exam, verb) if ALL_TOKENS not in case.label]
            small = (2,) * len(shapes[0])
            assert shapes == [*dict.fromkeys(getattr(asking(POSITIONS), verb)), small]
            traced = (TRACED[BATCH], TRACED[SOURCE], TRACED[TARGET if verb == "prefill" else PAST])
            assert not any(size == theirs for shape in shapes for size, theirs in zip(shape, traced, strict=False))
        for case in exam.graphs:
            assert case.label.split(",")[0] == " ".join(
                f"{letter}={size}"
                for letter, size in zip(
                    {"encode": "BS", "prefill": "BST", "step": "BSP"}[case.verb], shape_of(case), strict=True
                )
            )
        labels = [(case.verb, case.label) for case in exam.graphs]
        assert len(set(labels)) == len(labels)


# Padding


def masks(exam: Exam) -> list[Array]:
    found = [
        case.inputs["attention_mask" if case.verb == "encode" else "encoder_attention_mask"] for case in exam.graphs
    ]
    return found + [case.source_mask for case in exam.rollouts]


def test_batches_are_ragged_and_their_first_row_is_full(recorded: Exam, sweep: Exam) -> None:
    for exam in (recorded, sweep):
        for mask in masks(exam):
            assert mask[0].all()
            assert (np.diff(mask, axis=1) <= 0).all()
            assert (mask[: EMPTY_ROW - 1].sum(1) >= 1).all()
        assert sum(len(set(mask.sum(1).tolist())) > 2 for mask in masks(exam)) > 2


def test_a_row_of_nothing_but_padding_is_asked_of_every_graph(recorded: Exam, sweep: Exam) -> None:
    for exam in (recorded, sweep):
        for verb in VERBS:
            found = [mask for case, mask in zip(exam.graphs, masks(exam), strict=False) if case.verb == verb]
            empty = [mask for mask in found if not mask[-1].any()]
            assert empty
            assert all(len(mask) == EMPTY_ROW for mask in empty)
            assert all(not mask[-1].any() for mask in found if len(mask) >= EMPTY_ROW)


def test_what_is_padding_has_the_padding_id(recorded: Exam, model: Transformer) -> None:
    for case in asked_of(recorded, "encode"):
        ids, mask = case.inputs["input_ids"], case.inputs["attention_mask"]
        assert (ids[mask == 0] == model.config.pad_token_id).all()


# Ids and vectors


def dealt(exam: Exam, verb: str) -> list[int]:
    """The ids that were drawn for the cases of `verb`, in their order, as far as the graphs see them."""
    ids: list[int] = []
    for case in asked_of(exam, verb):
        given = case.inputs["input_ids"]
        if verb == "encode":
            given = given[case.inputs["attention_mask"] == 1]
        elif verb == "prefill":
            given = given[:, 1:]
        ids += given.ravel().tolist()
    return ids


@pytest.mark.parametrize("verb", ["encode", "prefill"])
def test_no_token_comes_again_before_all_have_come(model: Transformer, verb: str) -> None:
    """What was drawn before these cases has begun the first round; the rounds after it are whole."""
    many = recorded_sizes(POSITIONS)._replace(
        encode=[(3, 33), (3, 34), (3, 35)], prefill=[(3, 1, 17), (3, 1, 18), (3, 1, 19)]
    )
    ids = dealt(examiner(model, 4).write(many, {"a": [9, 3]}), verb)
    assert len(ids) > 3 * VOCABULARY
    first = next(place for place in range(len(ids)) if ids[place] in ids[:place])
    rounds = 0
    for offset in range(first + 1):
        whole = [ids[start : start + VOCABULARY] for start in range(offset, len(ids) - VOCABULARY, VOCABULARY)]
        rounds += all(len(set(found)) == VOCABULARY for found in whole)
    assert rounds >= 1
    assert set(ids) == set(range(VOCABULARY))


def test_two_vocabularies_are_dealt_each_for_itself() -> None:
    config = ModelConfig(
        vocab_size=61,
        source_vocab_size=50,
        share_embeddings=False,
        tie_output=False,
        **{**SMALL, "max_positions": POSITIONS},
    )
    exam = examiner(random_model(config), 1).write(sweep_sizes(POSITIONS), {"a": [9, 3]})
    assert set(dealt(exam, "encode")) == set(range(50))
    assert set(dealt(exam, "prefill")) | set(dealt(exam, "step")) == set(range(61))


def test_states_and_caches_are_put_together_of_few_vectors_of_the_reference(model: Transformer, sweep: Exam) -> None:
    """An exam of many cases stays small, and no case is fed with what the model would never give."""
    for name, pool in (("encoder_hidden_states", 64), ("past_key_values.0.decoder.key", 64)):
        cases = [case for case in sweep.graphs if name in case.inputs]
        rows = [
            case.inputs[name].reshape(-1, case.inputs[name].shape[-1])
            if name == "encoder_hidden_states"
            else case.inputs[name].swapaxes(1, 2).reshape(-1, model.config.d_model)
            for case in cases
        ]
        distinct = np.unique(np.concatenate(rows), axis=0)
        assert pool // 2 < len(distinct) <= pool
        assert all(array.dtype == np.float32 for case in cases for array in [case.inputs[name]])


def test_keys_and_values_of_one_position_belong_together(sweep: Exam) -> None:
    """A cache is no cache where keys come from one token and values from another."""
    for side in ("decoder", "encoder"):
        known: dict[bytes, bytes] = {}
        for case in asked_of(sweep, "step"):
            key, value = (
                case.inputs[f"past_key_values.0.{side}.{kind}"].swapaxes(1, 2).reshape(-1, SMALL["d_model"])
                for kind in ("key", "value")
            )
            for one, other in zip(key, value, strict=True):
                assert known.setdefault(one.tobytes(), other.tobytes()) == other.tobytes()
        assert len(known) > 10


# Logits of which some are kept


def test_every_logit_has_its_turn_where_some_are_kept(model: Transformer) -> None:
    narrow = recorded_sizes(POSITIONS)._replace(columns=10)
    exam = examiner(model, 5).write(narrow, {"a": [9, 3]})
    exact = TorchBackend(copy.deepcopy(model).double())
    seen: list[int] = []
    for case in exam.graphs:
        if case.verb == "encode":
            assert case.columns is None
            continue
        assert case.columns is not None
        assert case.columns.shape == (10,)
        assert (np.diff(case.columns) >= 0).all()
        seen += case.columns.tolist()
        whole = call(exact, case.verb, case.inputs)["logits"].astype(np.float32)
        np.testing.assert_array_equal(case.reference["logits"], whole[..., case.columns])
    assert len(seen) == 100
    assert set(seen) == set(range(VOCABULARY))
    assert max(seen.count(column) for column in range(VOCABULARY)) - min(map(seen.count, range(VOCABULARY))) <= 1


def test_all_logits_are_kept_where_there_is_room_for_them(recorded: Exam, sweep: Exam) -> None:
    for exam in (recorded, sweep):
        cases = [case for case in exam.graphs if ALL_TOKENS not in case.label]
        assert all(case.columns is None for case in cases)
        assert all(case.reference["logits"].shape[-1] == VOCABULARY for case in cases if "logits" in case.reference)


def test_pytorch_s_own_error_is_that_of_all_logits(model: Transformer) -> None:
    sizes = recorded_sizes(POSITIONS)
    few, whole = (
        examiner(model, 5).write(sizes._replace(columns=columns, step=()), {"a": [9, 3]}) for columns in (3, None)
    )
    assert asked_of(few, "prefill")[0].own_error == asked_of(whole, "prefill")[0].own_error


def test_a_sweep_feeds_every_token_of_both_vocabularies() -> None:
    model = random_model(VARIANTS["post-norm, nothing shared"].config)
    exam = examiner(model, 3).write(sweep_sizes(model.config.max_positions), {})
    fed = {
        verb: set(np.concatenate([case.inputs["input_ids"].ravel() for case in exam.graphs if case.verb == verb]))
        for verb in ("encode", "prefill")
    }
    assert fed["encode"] == set(range(model.config.encoder_vocab_size))
    assert fed["prefill"] == set(range(model.config.vocab_size))

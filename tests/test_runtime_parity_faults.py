"""Planted faults: each fails on the lowest rung of the ladder that can see it."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from runtime_support import (
    DEPLOYMENT,
    GRAPH,
    INVARIANCE,
    ROLLOUT,
    STRUCTURE,
    TOKENS,
    Delegate,
    failed,
    graph_results,
    judge,
)

from runtime.backend import Array, Cache, LayerCache
from runtime.bundle import Bundle
from runtime.contract import graph_specs
from runtime.errors import GraphError
from runtime.exam import Exam
from runtime.parity import sit
from runtime.parity.candidate import Candidate
from runtime.parity.chain import rollout_rung
from runtime.parity.graphs import graph_rung
from runtime.session import OrtBackend
from runtime.tokenizer import open_tokenizer

OUTPUTS = ["encoder_key", "encoder_value", "decoder_key", "decoder_value"]


# One wrong element


def one_wrong(array: Array) -> Array:
    array.flat[array.size // 2] += 1e-3
    return array


class WrongMemory(Delegate):
    def encode(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.changed(super().encode(input_ids, attention_mask), one_wrong)


class WrongPrefillLogit(Delegate):
    def prefill(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().prefill(*inputs)
        return self.changed(logits, one_wrong), cache


class WrongStepLogit(Delegate):
    def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().step(*inputs)
        return self.changed(logits, one_wrong), cache


@pytest.mark.parametrize("fault", [WrongMemory, WrongPrefillLogit, WrongStepLogit])
def test_one_wrong_element_fails_on_the_graph_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate]
) -> None:
    assert failed(judge(tiny_bundle, exam, fault(tiny_backend)))[0] == GRAPH


@pytest.mark.parametrize("name", OUTPUTS)
def test_one_wrong_element_in_a_cache_of_prefill_fails_on_the_graph_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, name: str
) -> None:
    class Fault(Delegate):
        def prefill(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
            logits, cache = super().prefill(*inputs)
            return logits, self.changed_caches(cache, (name,), one_wrong)

    report = judge(tiny_bundle, exam, Fault(tiny_backend))
    assert failed(report)[0] == GRAPH
    (problem,) = report.rungs[GRAPH].problems
    assert problem.startswith(f"prefill: present.0.{name.replace('_', '.')} is 0.001 from the reference")


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("name", OUTPUTS[2:])
def test_one_wrong_element_of_a_grown_cache_fails_in_the_past_and_in_the_new_position(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, name: str, place: int
) -> None:
    def wrong(array: Array) -> Array:
        array[0, 0, place, 0] += 1e-3
        return array

    class Fault(Delegate):
        def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
            logits, cache = super().step(*inputs)
            return logits, self.changed_caches(cache, (name,), wrong)

    report = judge(tiny_bundle, exam, Fault(tiny_backend))
    assert failed(report)[0] == GRAPH
    assert f"step: present.0.{name.replace('_', '.')}" in report.rungs[GRAPH].problems[0]


# Wrong wiring


class SwappedInPrefill(Delegate):
    def prefill(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().prefill(*inputs)
        return logits, tuple(LayerCache(layer[1], layer[0], *layer[2:]) for layer in cache)


class SwappedInStep(Delegate):
    def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().step(*inputs)
        return logits, tuple(LayerCache(layer[1], layer[0], *layer[2:]) for layer in cache)


class TransposedCache(Delegate):
    """Keys and values in another memory layout under the right shape."""

    def prefill(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().prefill(*inputs)
        turned = self.changed_caches(
            cache, ("decoder_key", "decoder_value"), lambda array: array.transpose(0, 2, 1, 3).reshape(array.shape)
        )
        return logits, turned


class TransposedShape(Delegate):
    def prefill(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().prefill(*inputs)
        return logits, self.changed_caches(cache, ("encoder_key",), lambda array: array.transpose(0, 2, 1, 3))


class PositionOffByOne(Delegate):
    """A step that takes itself to be one position earlier than it is."""

    def step(self, input_ids: Any, encoder_attention_mask: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
        if cache[0].decoder_key.shape()[2] < 2:
            return super().step(input_ids, encoder_attention_mask, cache)
        names = ("decoder_key", "decoder_value")
        shorter = self.changed_caches(cache, names, lambda array: array[:, :, 1:])
        logits, grown = super().step(input_ids, encoder_attention_mask, shorter)
        whole = [
            new._replace(
                **{
                    name: self.put(
                        np.concatenate([self.get(getattr(old, name))[:, :, :1], self.get(getattr(new, name))], 2)
                    )
                    for name in names
                }
            )
            for old, new in zip(cache, grown, strict=True)
        ]
        return logits, tuple(whole)


class StaleCrossCache(Delegate):
    """Steps that read the source of the first batch of that size for ever."""

    def __init__(self, inner: OrtBackend) -> None:
        super().__init__(inner)
        self._kept: dict[tuple[int, ...], Cache[Any]] = {}

    def step(self, input_ids: Any, encoder_attention_mask: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
        stale = self._kept.setdefault(tuple(cache[0].encoder_key.shape()), cache)
        mixed = tuple(LayerCache(*layer[:2], *old[2:]) for layer, old in zip(cache, stale, strict=True))
        logits, grown = super().step(input_ids, encoder_attention_mask, mixed)
        return logits, tuple(LayerCache(*new[:2], *layer[2:]) for new, layer in zip(grown, cache, strict=True))


class MissingOutput(Delegate):
    def prefill(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().prefill(*inputs)
        return logits, cache[:-1]


class NoMask(Delegate):
    """An encoder that reads padding."""

    def encode(self, input_ids: Any, attention_mask: Any) -> Any:
        return super().encode(input_ids, self.changed(attention_mask, np.ones_like))


@pytest.mark.parametrize(
    "fault", [SwappedInPrefill, SwappedInStep, TransposedCache, TransposedShape, PositionOffByOne, NoMask]
)
def test_wrong_wiring_fails_on_the_graph_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate]
) -> None:
    assert failed(judge(tiny_bundle, exam, fault(tiny_backend)))[0] == GRAPH


def test_a_stale_cross_cache_fails_on_the_rollout_rung_at_the_latest(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    assert failed(judge(tiny_bundle, exam, StaleCrossCache(tiny_backend)))[0] in (GRAPH, ROLLOUT)


def test_a_missing_output_fails_on_the_graph_rung(tiny_backend: OrtBackend, exam: Exam) -> None:
    cases = [case for case in exam.graphs if case.verb == "prefill"]
    results = {result.tensor: result for result in graph_results(cases, MissingOutput(tiny_backend))}
    assert results["logits"].passed
    assert results["present.0.decoder.key"].error == math.inf
    assert not results["present.0.decoder.key"].passed


class GivesUp(Delegate):
    """A graph into which the number of rows of the first case was baked."""

    def encode(self, input_ids: Any, attention_mask: Any) -> Any:
        if input_ids.shape()[0] != 1:
            raise GraphError("gave up in encode: Reshape")
        return super().encode(input_ids, attention_mask)


def test_a_graph_that_gives_up_fails_on_the_graph_rung_with_its_reason(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    report = judge(tiny_bundle, exam, GivesUp(tiny_backend))
    assert failed(report) == [GRAPH, ROLLOUT, INVARIANCE, DEPLOYMENT]
    assert report.drift[0] == math.inf
    (problem,) = report.rungs[GRAPH].problems
    assert problem.startswith("encode: last_hidden_state is inf from the reference")
    assert problem.endswith("(B=5 S=1: gave up in encode: Reshape)")
    assert "gave up in encode: Reshape" in report.rungs[ROLLOUT].problems[0]
    assert report.rungs[INVARIANCE].problems == ["gave up in encode: Reshape"]


# Faults that only a chain shows


class CrossCacheLostOnTheWay(Delegate):
    """Each step is right, but hands on a cross-attention cache of zeros."""

    def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().step(*inputs)
        return logits, self.changed_caches(cache, ("encoder_key", "encoder_value"), np.zeros_like)


class WrongAtOnePast(Delegate):
    """Right for every past that a graph case asks for, wrong for one of the others."""

    def step(self, input_ids: Any, encoder_attention_mask: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
        logits, grown = super().step(input_ids, encoder_attention_mask, cache)
        wrong = cache[0].decoder_key.shape()[2] == 11
        return self.changed(logits, lambda array: array + 0.01) if wrong else logits, grown


class NanInTheChain(WrongAtOnePast):
    def step(self, input_ids: Any, encoder_attention_mask: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
        logits, grown = Delegate.step(self, input_ids, encoder_attention_mask, cache)
        wrong = cache[0].decoder_key.shape()[2] == 11
        return self.changed(logits, lambda array: array * np.nan) if wrong else logits, grown


@pytest.mark.parametrize("fault", [CrossCacheLostOnTheWay, WrongAtOnePast, NanInTheChain])
def test_a_fault_of_the_chain_fails_on_the_rollout_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate]
) -> None:
    assert failed(judge(tiny_bundle, exam, fault(tiny_backend)))[0] == ROLLOUT


def test_the_rollout_names_the_first_position_that_is_wrong(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    report = judge(tiny_bundle, exam, WrongAtOnePast(tiny_backend))
    assert report.rungs[ROLLOUT].problems[0].startswith("at position 11 the error is 0.01")
    assert math.isnan(judge(tiny_bundle, exam, NanInTheChain(tiny_backend)).drift[11])


class WrongInALongPrefill(Delegate):
    """Right for every prefix that a graph case has."""

    def prefill(self, input_ids: Any, memory: Any, encoder_attention_mask: Any) -> tuple[Any, Cache[Any]]:
        def change(logits: Array) -> Array:
            logits[:, 13] += 0.01
            return logits

        logits, cache = super().prefill(input_ids, memory, encoder_attention_mask)
        return (self.changed(logits, change) if input_ids.shape()[1] > 13 else logits), cache


def test_what_only_a_long_prefill_shows_fails_on_the_rollout_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    report = judge(tiny_bundle, exam, WrongInALongPrefill(tiny_backend))
    assert failed(report) == [ROLLOUT, DEPLOYMENT]
    whole, handed_over = report.rungs[ROLLOUT].problems
    assert whole.startswith("at position 13 of one long prefill the error is 0.01")
    assert handed_over.startswith("at position 13 of a long prefill and a step the error is 0.01")
    assert [case.passed for case in report.rungs[ROLLOUT].cases] == [False, False]


class WrongCacheOfALongPrefill(Delegate):
    """Right for every prefix that a graph case has, and in all logits."""

    def prefill(self, input_ids: Any, memory: Any, encoder_attention_mask: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().prefill(input_ids, memory, encoder_attention_mask)
        if input_ids.shape()[1] <= 13:
            return logits, cache
        return logits, self.changed_caches(cache, ("decoder_value",), lambda array: array + np.float32(0.1))


def test_what_only_a_step_after_a_long_prefill_shows_fails_on_the_rollout_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    report = judge(tiny_bundle, exam, WrongCacheOfALongPrefill(tiny_backend))
    assert failed(report) == [ROLLOUT, DEPLOYMENT]
    (problem,) = report.rungs[ROLLOUT].problems
    assert problem.startswith("at position 23 of a long prefill and a step the error is")


class TooFewLogits(Delegate):
    """The last tokens of the vocabulary are lost, those of every answer among them."""

    def prefill(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().prefill(*inputs)
        return self.changed(logits, lambda array: array[..., :20]), cache

    def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().step(*inputs)
        return self.changed(logits, lambda array: array[..., :20]), cache


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_too_few_logits_are_a_verdict_on_every_rung_and_no_accident(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, precision: str
) -> None:
    passport = msgspec.structs.replace(tiny_bundle.passport, precision=precision)
    candidate = Candidate(TooFewLogits(tiny_backend), passport, open_tokenizer(tiny_bundle.folder), "as tested")
    specs = graph_specs(passport.dims)
    report = sit(exam, candidate, specs, specs)
    assert failed(report) == [GRAPH, ROLLOUT, TOKENS, INVARIANCE, DEPLOYMENT]
    assert report.drift[0] == math.inf
    assert all(not math.isfinite(figure.value) for figure in report.figures if figure.name != "invariance")


def test_a_chain_that_gives_up_on_the_way_is_infinitely_wrong_from_there(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    class Fault(Delegate):
        def step(self, input_ids: Any, encoder_attention_mask: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
            if cache[0].decoder_key.shape()[2] == 11:
                raise GraphError("gave up in step: Concat")
            return super().step(input_ids, encoder_attention_mask, cache)

    report = judge(tiny_bundle, exam, Fault(tiny_backend))
    assert failed(report) == [ROLLOUT, INVARIANCE, DEPLOYMENT]
    assert max(report.drift[:11]) < report.drift_tolerance
    assert report.drift[11:] == [math.inf] * 13
    assert report.rungs[ROLLOUT].problems == [
        f"at position 11 the error is inf, earned is {report.drift_tolerance:.3g} (gave up in step: Concat)"
    ]


# NaN


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("case", range(5))
def test_a_number_that_is_none_fails_in_whichever_case_it_comes(
    tiny_backend: OrtBackend, exam: Exam, case: int, number: float
) -> None:
    """The other cases, before and after, must not hide it."""
    cases = [question for question in exam.graphs if question.verb == "encode"]
    seen = iter(range(5))

    class Fault(Delegate):
        def encode(self, *inputs: Any) -> Any:
            memory = super().encode(*inputs)
            return self.changed(memory, lambda array: array * number) if next(seen) == case else memory

    (result,) = graph_results(cases, Fault(tiny_backend))
    assert not result.error < math.inf
    assert not result.passed
    assert result.worst == cases[case].label


def test_a_reference_that_is_not_a_number_passes_nothing(tiny_backend: OrtBackend, exam: Exam) -> None:
    case = next(case for case in exam.graphs if case.verb == "encode")
    broken = msgspec.structs.replace(
        case, reference={"last_hidden_state": case.reference["last_hidden_state"] * np.nan}
    )
    assert not graph_results([broken], tiny_backend)[0].passed


@pytest.mark.parametrize("own_error", [math.nan, math.inf])
def test_an_error_of_pytorch_that_is_no_number_earns_nothing(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, own_error: float
) -> None:
    graphs = [msgspec.structs.replace(case, own_error=dict.fromkeys(case.own_error, own_error)) for case in exam.graphs]
    rollouts = [msgspec.structs.replace(case, own_error=[own_error] * len(case.own_error)) for case in exam.rollouts]
    changed = msgspec.structs.replace(exam, graphs=graphs, rollouts=rollouts)
    below = [GRAPH, ROLLOUT, TOKENS, INVARIANCE, DEPLOYMENT]
    # An infinite one is not even that of float32, which is found before anything runs.
    assert failed(judge(tiny_bundle, changed, tiny_backend)) == ([STRUCTURE, *below] if own_error > 1 else below)
    candidate = Candidate(tiny_backend, tiny_bundle.passport, open_tokenizer(tiny_bundle.folder), "as tested")
    rung, tensors = graph_rung(graphs, candidate, graph_specs(tiny_bundle.passport.dims))
    assert not rung.passed
    assert not any(result.passed for result in tensors)
    assert not rollout_rung(rollouts, candidate)[0].passed

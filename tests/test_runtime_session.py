"""The three verbs on ONNX Runtime: providers, threads, caches that stay where they are."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime import OrtValue
from runtime_support import TINY, VOCABULARY, damage

from runtime import session
from runtime.backend import Array, Cache
from runtime.bundle import Bundle
from runtime.contract import GRAPH_FILES, graph_specs
from runtime.errors import BundleError, GraphError, ProviderError
from runtime.ranking import rank_tokens
from runtime.session import OPTIMIZATIONS, Optimization, OrtBackend
from runtime.threads import available_cpus
from runtime.verbs import call

SOURCE = np.array([[4, 9, 7, 3], [5, 6, 3, 0], [8, 3, 0, 0]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
TARGET = np.array([[2, 7], [2, 6], [2, 8]])
HEADS, HEAD_DIM, WIDTH = 2, 16, 32


class Prefilled:
    """A batch of three after prefill with two tokens."""

    def __init__(self, backend: OrtBackend) -> None:
        self.mask = backend.put(MASK)
        self.memory = backend.encode(backend.put(SOURCE), self.mask)
        self.logits, self.cache = backend.prefill(backend.put(TARGET), self.memory, self.mask)


@pytest.fixture
def prefilled(tiny_backend: OrtBackend) -> Prefilled:
    return Prefilled(tiny_backend)


def arrays(cache: Cache[OrtValue]) -> list[list[Array]]:
    return [[tensor.numpy() for tensor in layer] for layer in cache]


def cuda_is_usable() -> bool:
    """Whether ONNX Runtime itself takes CUDA here, asked where its remarks disturb nobody."""
    code = (
        "import sys, onnxruntime as ort; ort.preload_dlls(); name = 'CUDAExecutionProvider';"
        "sys.exit(name not in ort.InferenceSession(sys.argv[1], providers=[name]).get_providers())"
    )
    graph = TINY / "search" / "select_rows.onnx"
    return subprocess.run([sys.executable, "-c", code, graph], check=False, capture_output=True).returncode == 0


def test_shapes_of_the_three_verbs(tiny_backend: OrtBackend, prefilled: Prefilled) -> None:
    assert prefilled.memory.shape() == [3, 4, WIDTH]
    assert prefilled.logits.shape() == [3, 2, VOCABULARY]
    assert [list(array.shape) for array in arrays(prefilled.cache)[0]] == [
        [3, HEADS, 2, HEAD_DIM],
        [3, HEADS, 2, HEAD_DIM],
        [3, HEADS, 4, HEAD_DIM],
        [3, HEADS, 4, HEAD_DIM],
    ]
    logits, cache = tiny_backend.step(tiny_backend.put(TARGET[:, :1]), prefilled.mask, prefilled.cache)
    assert logits.shape() == [3, 1, VOCABULARY]
    assert cache[0].decoder_key.shape() == cache[0].decoder_value.shape() == [3, HEADS, 3, HEAD_DIM]


def test_caches_stay_ort_values_and_cross_attention_is_the_same_object(
    tiny_backend: OrtBackend, prefilled: Prefilled
) -> None:
    cache = prefilled.cache
    for _ in range(3):
        _, grown = tiny_backend.step(tiny_backend.put(TARGET[:, :1]), prefilled.mask, cache)
        for layer, before in zip(grown, cache, strict=True):
            assert all(isinstance(tensor, OrtValue) for tensor in layer)
            assert layer.encoder_key is before.encoder_key
            assert layer.encoder_value is before.encoder_value
            assert layer.decoder_key is not before.decoder_key
        cache = grown


def test_a_step_keeps_the_past_and_adds_one_position(tiny_backend: OrtBackend, prefilled: Prefilled) -> None:
    _, cache = tiny_backend.step(tiny_backend.put(TARGET[:, :1]), prefilled.mask, prefilled.cache)
    for grown, before in zip(arrays(cache)[0][:2], arrays(prefilled.cache)[0][:2], strict=True):
        np.testing.assert_array_equal(grown[:, :, :-1], before)


def test_steps_give_what_one_prefill_over_everything_gives(tiny_backend: OrtBackend, prefilled: Prefilled) -> None:
    longer = np.concatenate([TARGET, [[9, 4], [5, 5], [30, 3]]], 1)
    whole, _ = tiny_backend.prefill(tiny_backend.put(longer), prefilled.memory, prefilled.mask)
    cache = prefilled.cache
    for place in (2, 3):
        logits, cache = tiny_backend.step(tiny_backend.put(longer[:, place : place + 1]), prefilled.mask, cache)
        np.testing.assert_allclose(logits.numpy()[:, 0], whole.numpy()[:, place], atol=1e-4)


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 1], [1], [0, 0, 2, 2, 1]])
def test_select_takes_rows_of_both_kinds_of_caches(
    tiny_backend: OrtBackend, prefilled: Prefilled, rows: list[int]
) -> None:
    selected = tiny_backend.select(prefilled.cache, np.array(rows))
    for taken, before in zip(arrays(selected), arrays(prefilled.cache), strict=True):
        for ours, theirs in zip(taken, before, strict=True):
            np.testing.assert_array_equal(ours, theirs[rows])


def test_branches_give_what_one_prefill_over_each_hypothesis_gives(
    tiny_backend: OrtBackend, prefilled: Prefilled
) -> None:
    """Two beams, then two that both go on from the second: the first is in the cache and seen by nobody."""
    first, second = np.array([[9, 4], [5, 5], [30, 3]]), np.array([[7, 9], [8, 4], [4, 11]])
    rounds: list[tuple[Array, list[list[int]], list[Array]]] = [
        (first, [[1, 1]] * 2, []),
        (second, [[1, 1, 0, 1]] * 2, [first[:, 1:]]),
    ]
    cache = prefilled.cache
    for ids, seen, parent in rounds:
        told = tiny_backend.put(np.array([seen] * 3))
        logits, grown = tiny_backend.branch(tiny_backend.put(ids), prefilled.mask, told, cache)
        for beam in range(2):
            row = tiny_backend.put(np.concatenate([TARGET, *parent, ids[:, beam, None]], 1))
            whole, _ = tiny_backend.prefill(row, prefilled.memory, prefilled.mask)
            np.testing.assert_allclose(logits.numpy()[:, beam], whole.numpy()[:, -1], atol=1e-4)
        for layer, old in zip(grown, cache, strict=True):
            assert layer.encoder_key is old.encoder_key
            assert layer.encoder_value is old.encoder_value
            np.testing.assert_array_equal(layer.decoder_key.numpy()[:, :, :-2], old.decoder_key.numpy())
        cache = grown


def test_the_best_tokens_are_those_that_numpy_finds(tiny_backend: OrtBackend, prefilled: Prefilled) -> None:
    for forbidden, count in (((), 1), ((4, 9), 8), ((), 3), ((4, 9), 4), ((9,), VOCABULARY + 5)):
        scores, tokens = tiny_backend.rank(prefilled.logits, forbidden, count)
        wanted = rank_tokens(prefilled.logits.numpy(), forbidden, count)
        np.testing.assert_array_equal(tokens, wanted[1])
        np.testing.assert_allclose(scores, wanted[0], rtol=1e-5, atol=1e-6)
        assert tokens.shape == (3, 2, min(count, VOCABULARY))


def test_put_and_get_are_inverse(tiny_backend: OrtBackend) -> None:
    for array in (SOURCE, SOURCE.T, np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)[:, ::2]):
        np.testing.assert_array_equal(tiny_backend.get(tiny_backend.put(array)), array)


def test_what_was_put_is_a_copy_that_lives_as_long_as_somebody_looks_at_it(tiny_backend: OrtBackend) -> None:
    array = np.full((500, 500), 3.0, np.float32)
    value = tiny_backend.put(array)
    array[:] = 4
    seen = tiny_backend.get(value)
    del value, array
    others = [np.full((500, 500), 9.0, np.float32) for _ in range(5)]
    assert (seen == 3).all()
    assert len(others) == 5


def test_the_graphs_have_the_contract_s_names(tiny_bundle: Bundle, tiny_backend: OrtBackend) -> None:
    assert tiny_backend.found_specs() == graph_specs(tiny_bundle.passport.dims)


def test_verbs_by_name_speak_the_contract(tiny_bundle: Bundle, tiny_backend: OrtBackend, prefilled: Prefilled) -> None:
    specs = graph_specs(tiny_bundle.passport.dims)
    encoded = call(tiny_backend, "encode", {"input_ids": SOURCE, "attention_mask": MASK})
    inputs: dict[str, Array] = {
        "encoder_attention_mask": MASK,
        "input_ids": TARGET,
        "encoder_hidden_states": encoded["last_hidden_state"],
    }
    first = call(tiny_backend, "prefill", inputs)
    past = {name.replace("present.", "past_key_values."): array for name, array in first.items() if "present" in name}
    stepped = call(tiny_backend, "step", {"encoder_attention_mask": MASK, "input_ids": TARGET[:, :1], **past})
    for verb, outputs in (("encode", encoded), ("prefill", first), ("step", stepped)):
        assert list(outputs) == [tensor.name for tensor in specs[verb].outputs]
    np.testing.assert_array_equal(encoded["last_hidden_state"], prefilled.memory.numpy())
    np.testing.assert_array_equal(first["logits"], prefilled.logits.numpy())
    np.testing.assert_array_equal(first["present.0.encoder.value"], prefilled.cache[0].encoder_value.numpy())
    _, cache = tiny_backend.step(tiny_backend.put(TARGET[:, :1]), prefilled.mask, prefilled.cache)
    np.testing.assert_array_equal(stepped["present.0.decoder.key"], cache[0].decoder_key.numpy())


def test_an_unknown_verb_is_an_error(tiny_backend: OrtBackend) -> None:
    with pytest.raises(ValueError, match="verb is 'speak', expected one of encode, prefill, step, begin, branch"):
        call(tiny_backend, "speak", {"input_ids": SOURCE, "encoder_attention_mask": MASK})


def test_what_onnx_runtime_cannot_compute_is_one_line_with_the_verb(tiny_backend: OrtBackend) -> None:
    outside = np.full_like(SOURCE, VOCABULARY)
    with pytest.raises(GraphError, match=r"gave up in encode: .*indices") as caught:
        tiny_backend.encode(tiny_backend.put(outside), tiny_backend.put(MASK))
    assert "Traceback" not in str(caught.value)


def test_a_graph_that_is_none_is_refused_though_its_digest_is_right(tiny: Path) -> None:
    damage(tiny, "encoder_model.onnx", b"not a graph")
    backend = OrtBackend(Bundle(tiny))
    with pytest.raises(BundleError, match=r"cannot load .*encoder_model\.onnx"):
        Prefilled(backend)


def test_an_unknown_provider_is_refused(tiny_bundle: Bundle) -> None:
    provider: Any = "tpu"
    with pytest.raises(ProviderError, match="provider is 'tpu', expected one of cpu, cuda"):
        OrtBackend(tiny_bundle, provider=provider)


@pytest.mark.parametrize("threads", [0, -2, 257, 10**9])
def test_a_senseless_number_of_threads_is_refused(tiny_bundle: Bundle, threads: int) -> None:
    with pytest.raises(ProviderError, match=f"threads is {threads}, expected 1 to 256"):
        OrtBackend(tiny_bundle, threads=threads)


def options(backend: OrtBackend, name: str) -> set[Any]:
    """What the sessions of all graphs say."""
    return {getattr(backend._graphs[verb]._session.get_session_options(), name) for verb in GRAPH_FILES}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many threads each graph that is loaded asks for."""
    asked: list[int] = []
    monkeypatch.setattr(session, "set_threads", lambda _options, _verb, count: asked.append(count))
    return asked


def test_all_graphs_compute_with_the_threads_that_were_asked_for(tiny_bundle: Bundle, counts: list[int]) -> None:
    OrtBackend(tiny_bundle, threads=2).found_specs()
    assert counts == [2] * len(GRAPH_FILES)


def test_threads_default_to_the_cpus_of_this_process(
    tiny_bundle: Bundle, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5, 8}, raising=False)
    assert available_cpus() == 3
    OrtBackend(tiny_bundle).found_specs()
    assert counts == [3] * len(GRAPH_FILES)


def test_threads_default_to_the_machine_s_cpus_where_there_is_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    assert available_cpus() == 7


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_does_not_change_what_is_computed(
    tiny_bundle: Bundle, prefilled: Prefilled, threads: int
) -> None:
    logits = Prefilled(OrtBackend(tiny_bundle, threads=threads)).logits
    np.testing.assert_allclose(logits.numpy(), prefilled.logits.numpy(), atol=1e-5)


@pytest.mark.parametrize("level", OPTIMIZATIONS)
def test_all_graphs_are_rewritten_as_much_as_was_asked_for(
    tiny_bundle: Bundle, prefilled: Prefilled, level: Optimization
) -> None:
    backend = OrtBackend(tiny_bundle, threads=1, optimization=level)
    assert options(backend, "graph_optimization_level") == {OPTIMIZATIONS[level]}
    ours = Prefilled(backend)
    np.testing.assert_allclose(ours.logits.numpy(), prefilled.logits.numpy(), atol=1e-4)
    assert backend.found_specs() == graph_specs(tiny_bundle.passport.dims)


def test_graphs_are_rewritten_from_nothing_to_everything_and_by_default_as_much_as_can_be(tiny_bundle: Bundle) -> None:
    assert list(OPTIMIZATIONS) == ["none", "basic", "extended", "all"]
    assert len(set(OPTIMIZATIONS.values())) == 4
    assert options(OrtBackend(tiny_bundle, threads=1), "graph_optimization_level") == {OPTIMIZATIONS["all"]}


def test_an_unknown_optimization_is_refused(tiny_bundle: Bundle) -> None:
    level: Any = "most"
    with pytest.raises(ProviderError, match="optimization is 'most', expected one of none, basic, extended, all"):
        OrtBackend(tiny_bundle, optimization=level)


@pytest.fixture(scope="module")
def no_cuda() -> None:
    if cuda_is_usable():
        pytest.skip("CUDA works here")


@pytest.mark.usefixtures("no_cuda")
def test_a_provider_that_would_not_be_used_is_refused_in_one_line_and_in_silence(
    tiny_bundle: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProviderError) as caught:
        OrtBackend(tiny_bundle, provider="cuda")
    message = str(caught.value)
    assert "\n" not in message
    assert message.count("cannot use CUDAExecutionProvider here") == 1
    # True for all that ask for a provider: not each of them has a fallback to allow.
    assert message.endswith("Install what it needs, or run it on the CPU")
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("no_cuda")
def test_an_allowed_fallback_runs_on_the_cpu_and_says_so(
    tiny_bundle: Bundle, prefilled: Prefilled, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = OrtBackend(tiny_bundle, provider="cuda", allow_fallback=True, threads=1)
    assert backend.provider == "cpu"
    np.testing.assert_array_equal(Prefilled(backend).logits.numpy(), prefilled.logits.numpy())
    assert capfd.readouterr() == ("", "")


class Node:
    def __init__(self, op_type: str) -> None:
        self.op_type = op_type


class Part:
    """A part of a graph as ONNX Runtime reports where it runs."""

    def __init__(self, ep_name: str, *operators: str) -> None:
        self.ep_name = ep_name
        self._operators = operators

    def get_nodes(self) -> list[Node]:
        return [Node(operator) for operator in self._operators]


@pytest.mark.parametrize(
    ("on_cpu", "expected"),
    [
        (("Shape", "Concat"), None),
        (("Shape", "MatMul", "Attention"), "Attention, MatMul of step would run on the CPU"),
    ],
)
def test_heavy_operators_left_to_the_cpu_are_a_missed_provider(
    tiny_backend: OrtBackend, monkeypatch: pytest.MonkeyPatch, on_cpu: tuple[str, ...], expected: str | None
) -> None:
    graph = tiny_backend._graphs["step"]
    parts = [Part("CUDAExecutionProvider", "MatMul"), Part("CPUExecutionProvider", *on_cpu)]

    class Session:
        def get_providers(self) -> list[str]:
            return ["CUDAExecutionProvider", "CPUExecutionProvider"]

        def get_provider_graph_assignment_info(self) -> list[Part]:
            return parts

    monkeypatch.setattr(graph, "_session", Session())
    assert graph.missed("cuda") == expected

"""Which graphs of a bundle are loaded, when, and where."""

from pathlib import Path

import pytest
from runtime_support import TINY, damage

from runtime import session
from runtime.bundle import Bundle
from runtime.contract import GRAPH_FILES, GraphSpec
from runtime.errors import BundleError
from runtime.generation import GenerationConfig, generate
from runtime.session import Optimization, OrtBackend


@pytest.mark.parametrize(
    ("beams", "needed"), [(1, {"encode", "begin", "step", "rank"}), (3, {"encode", "begin", "branch", "rank"})]
)
def test_a_search_loads_no_graph_that_it_does_not_use(tiny_bundle: Bundle, beams: int, needed: set[str]) -> None:
    backend = OrtBackend(tiny_bundle, threads=1)
    assert loaded(backend) == set()
    config = GenerationConfig(num_beams=beams, early_stopping=True)
    generate(backend, [[4, 9, 7, 3]], config, tiny_bundle.passport.special, 24)
    assert loaded(backend) == needed
    generate(backend, [[4, 9, 7, 12, 8, 30, 3], [5, 3]], config, tiny_bundle.passport.special, 24)
    assert loaded(backend) == {*needed, "select"}


@pytest.mark.parametrize(("beams", "other"), [(1, "step"), (3, "branch")])
def test_a_prefix_goes_through_prefill_and_no_beginning_is_loaded(tiny_bundle: Bundle, beams: int, other: str) -> None:
    backend = OrtBackend(tiny_bundle, threads=1)
    config = GenerationConfig(num_beams=beams, early_stopping=True, decoder_input_ids=(7,))
    generate(backend, [[4, 9, 7, 3]], config, tiny_bundle.passport.special, 24)
    assert loaded(backend) - {"rank", "select"} == {"encode", "prefill", other}


def loaded(backend: OrtBackend) -> set[str]:
    return set(backend._graphs._loaded)


@pytest.mark.parametrize("verb", GRAPH_FILES)
def test_what_runs_step_after_step_alone_keeps_its_memory(tiny_bundle: Bundle, verb: str) -> None:
    graph = OrtBackend(tiny_bundle, threads=1)._graphs[verb]
    keeps = verb in {"step", "branch", "rank", "select"}
    assert graph._session.get_session_options().enable_cpu_mem_arena == keeps


@pytest.mark.parametrize("name", ["branch_model.onnx", "search/rank_tokens.onnx"])
def test_a_damaged_graph_is_one_line_when_it_is_first_used(tiny: Path, name: str) -> None:
    damage(tiny, name, b"not a graph")
    bundle = Bundle(tiny)
    backend = OrtBackend(bundle, threads=1)
    generate(backend, [[4, 9, 3]], GenerationConfig(repetition_penalty=1.5), bundle.passport.special, 24)
    with pytest.raises(BundleError, match=rf"cannot load .*{name}: ") as caught:
        generate(backend, [[4, 9, 3]], GenerationConfig(num_beams=2), bundle.passport.special, 24)
    assert "\n" not in str(caught.value)


def test_who_translates_refuses_a_graph_that_is_not_the_contract_s_and_who_examines_wants_to_see_it(tiny: Path) -> None:
    damage(tiny, "branch_model.onnx", (TINY / "decoder_with_past_model.onnx").read_bytes())
    bundle = Bundle(tiny)
    config = GenerationConfig(num_beams=2)
    with pytest.raises(BundleError, match=r"branch_model\.onnx is not what its passport says: branch: seen is missing"):
        generate(OrtBackend(bundle, threads=1, checked=True), [[4, 3]], config, bundle.passport.special, 24)
    found = OrtBackend(bundle, threads=1).found_specs()["branch"]
    assert "seen" not in [tensor.name for tensor in found.inputs]


def test_a_fallback_loads_every_graph_anew_on_the_cpu(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph that misses the provider must not leave the others on it."""
    placed: list[tuple[str, str, int | None, str]] = []

    class Observed(session._Graph):
        def __init__(
            self,
            spec: GraphSpec,
            path: Path,
            provider: session.Provider,
            threads: int | None,
            optimization: Optimization,
        ) -> None:
            placed.append((spec.verb, provider, threads, optimization))
            super().__init__(spec, path, "cpu", threads, optimization)

        def missed(self, _: session.Provider) -> str | None:
            return "no" if self._spec.verb == "step" else None

    monkeypatch.setattr(session, "_Graph", Observed)
    backend = OrtBackend(tiny_bundle, provider="cuda", threads=2, optimization="basic", allow_fallback=True)
    assert backend.provider == "cpu"
    assert placed == [(verb, "cuda", 2, "basic") for verb in GRAPH_FILES]
    placed.clear()
    backend.found_specs()
    assert placed == [(verb, "cpu", 2, "basic") for verb in GRAPH_FILES]

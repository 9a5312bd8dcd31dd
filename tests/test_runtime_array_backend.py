"""The verbs on runtimes that take and give arrays: ONNX Runtime's sessions called plainly, and OpenVINO."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from runtime_support import GRAPH, TINY, VOCABULARY, edit_passport, failed, judge

from runtime.array_backend import ArrayBackend, Run
from runtime.backend import Array, Cache
from runtime.bundle import Bundle, record_files
from runtime.contract import BEGIN, BRANCH, PREFILL, STEP, VERBS
from runtime.errors import BundleError, GraphError, ProviderError
from runtime.exam import Exam
from runtime.generation import GenerationConfig, generate
from runtime.ranking import rank_tokens
from runtime.session import SLOWER, OrtBackend

Change = Callable[[bytes], bytes]

SENTENCES = [[4, 9, 7, 12, 8, 30, 3], [5, 3], [8, 21, 6, 3], [40, 17, 17, 5, 9, 3]]
SOURCE = np.array([[4, 9, 7, 3], [0, 0, 0, 0], [8, 3, 0, 0]])
MASK = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
"""The second row may see nothing."""
TARGET = np.array([[2, 7], [2, 6], [2, 8]])
SEEN = np.array([[[1, 1, 1, 1], [1, 0, 1, 0]]] * 3)


def run_of(bundle: Bundle) -> Run:
    """ONNX Runtime, one plain session a graph."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    sessions = {
        verb: ort.InferenceSession(
            bundle.path(verb), options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOWER
        )
        for verb in (*VERBS, BEGIN, BRANCH)
    }

    def run(verb: str, inputs: dict[str, Array]) -> dict[str, Array]:
        names = [output.name for output in sessions[verb].get_outputs()]
        return dict(zip(names, sessions[verb].run(names, inputs), strict=True))

    return run


@pytest.fixture(scope="module")
def run(tiny_bundle: Bundle) -> Run:
    return run_of(tiny_bundle)


@pytest.fixture(scope="module")
def backend(tiny_bundle: Bundle, run: Run) -> ArrayBackend:
    return ArrayBackend("sessions 1.0", run, tiny_bundle.passport.dims)


@pytest.fixture(scope="module")
def openvino() -> Any:
    """The module; importing OpenVINO itself would tell its makers so."""
    return pytest.importorskip("runtime.openvino_backend", reason="needs the extra openvino")


def everything(backend: Any) -> list[Array]:
    """All tensors of all verbs for three rows, after two steps and a branch of two hypotheses about each."""
    mask = backend.put(MASK)
    memory = backend.encode(backend.put(SOURCE), mask)
    logits, cache = backend.prefill(backend.put(TARGET), memory, mask)
    tensors = [memory, logits, *(tensor for layer in cache for tensor in layer)]
    for token in (5, 9):
        logits, cache = backend.step(backend.put(np.full((3, 1), token)), mask, cache)
        tensors += [logits, *(tensor for layer in cache for tensor in layer)]
    logits, cache = backend.branch(backend.put(TARGET), mask, backend.put(SEEN), cache)
    tensors += [logits, *(tensor for layer in cache for tensor in layer)]
    return [backend.get(tensor) for tensor in tensors]


def prefilled(backend: ArrayBackend) -> Cache[Array]:
    return backend.prefill(TARGET, backend.encode(SOURCE, MASK), MASK)[1]


def forged(folder: Path, name: str, change: Change) -> Bundle:
    """The bundle in `folder` with the file `name` changed, and recorded as if it had always been so."""
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    (record,) = record_files(folder, [name]).values()
    edit_passport(
        folder, lambda passport: passport["files"].update({name: {"size": record.size, "sha256": record.sha256}})
    )
    return Bundle(folder)


def test_every_verb_gives_what_the_bound_sessions_give(backend: ArrayBackend, tiny_backend: OrtBackend) -> None:
    for ours, theirs in zip(everything(backend), everything(tiny_backend), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_search_finds_the_same_ids(
    tiny_bundle: Bundle, backend: ArrayBackend, tiny_backend: OrtBackend, num_beams: int
) -> None:
    config = GenerationConfig(num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=12)
    ours, theirs = (
        generate(runtime, SENTENCES, config, tiny_bundle.passport.special, tiny_bundle.passport.dims.max_positions)
        for runtime in (backend, tiny_backend)
    )
    assert [[found.ids for found in each] for each in ours] == [[found.ids for found in each] for each in theirs]
    # Where tokens are ranked, in numpy or by a graph, decides the last bits of a score.
    scores = [[found.score for each in outputs for found in each] for outputs in (ours, theirs)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5, abs=1e-6)
    assert len({len(best.ids) for best, *_ in ours}) > 1


def test_the_exam_gets_the_same_report(
    tiny_bundle: Bundle, exam: Exam, backend: ArrayBackend, tiny_backend: OrtBackend
) -> None:
    report = judge(tiny_bundle, exam, backend)
    assert failed(report) == []
    assert report == judge(tiny_bundle, exam, tiny_backend)


def test_a_runtime_that_computes_something_else_fails_the_exam(tiny_bundle: Bundle, exam: Exam, run: Run) -> None:
    def swapped(verb: str, inputs: dict[str, Array]) -> dict[str, Array]:
        key, value = "present.0.decoder.key", "present.0.decoder.value"
        outputs = run(verb, inputs)
        return outputs | {key: outputs[value], value: outputs[key]} if verb == STEP else outputs

    assert GRAPH in failed(judge(tiny_bundle, exam, ArrayBackend("swapped", swapped, tiny_bundle.passport.dims)))


def test_a_step_carries_the_cross_attention_over(backend: ArrayBackend) -> None:
    before = prefilled(backend)
    _, after = backend.step(TARGET[:, :1], MASK, before)
    for grown, layer in zip(after, before, strict=True):
        assert grown.encoder_key is layer.encoder_key
        assert grown.encoder_value is layer.encoder_value
        np.testing.assert_array_equal(grown.decoder_key[:, :, :-1], layer.decoder_key)


def test_a_branch_keeps_the_past_and_carries_the_cross_attention_over(backend: ArrayBackend) -> None:
    before = prefilled(backend)
    logits, after = backend.branch(TARGET, MASK, SEEN[:, :, :2], before)
    assert logits.shape == (3, 2, VOCABULARY)
    for grown, layer in zip(after, before, strict=True):
        assert grown.encoder_key is layer.encoder_key
        assert grown.encoder_value is layer.encoder_value
        np.testing.assert_array_equal(grown.decoder_value[:, :, :-2], layer.decoder_value)


def test_select_takes_rows_of_both_kinds_of_caches(backend: ArrayBackend) -> None:
    rows = np.array([2, 0, 0])
    cache = prefilled(backend)
    for taken, layer in zip(backend.select(cache, rows), cache, strict=True):
        for ours, theirs in zip(taken, layer, strict=True):
            np.testing.assert_array_equal(ours, theirs[rows])


def test_ranks_are_those_of_numpy(backend: ArrayBackend) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 3, VOCABULARY)).astype(np.float32)
    for ours, theirs in zip(backend.rank(logits, [4], 5), rank_tokens(logits, [4], 5), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_was_put_lies_in_one_piece(backend: ArrayBackend) -> None:
    put = backend.put(SOURCE.T)
    assert put.flags.c_contiguous
    np.testing.assert_array_equal(backend.get(put), SOURCE.T)


def test_whatever_the_runtime_raises_is_one_line_with_its_name_and_the_verb(tiny_bundle: Bundle) -> None:
    def broken(verb: str, inputs: dict[str, Array]) -> dict[str, Array]:
        raise MemoryError(f"no room\n  for {len(inputs)} inputs of {verb}\n")

    backend = ArrayBackend("Abacus 2.1", broken, tiny_bundle.passport.dims)
    with pytest.raises(GraphError) as caught:
        backend.encode(SOURCE, MASK)
    assert str(caught.value) == "Abacus 2.1 gave up in encode: MemoryError: no room for 2 inputs of encode"


def test_an_output_that_does_not_come_is_named(tiny_bundle: Bundle, run: Run) -> None:
    def silent(verb: str, inputs: dict[str, Array]) -> dict[str, Array]:
        outputs = run(verb, inputs)
        return {name: array for name, array in outputs.items() if verb != PREFILL or name != "logits"}

    with pytest.raises(GraphError, match=r"^Mute 1 gave up in prefill: it computed no logits$"):
        prefilled(ArrayBackend("Mute 1", silent, tiny_bundle.passport.dims))


def test_what_onnx_runtime_cannot_compute_is_a_graph_error(backend: ArrayBackend) -> None:
    with pytest.raises(GraphError, match=r"^sessions 1\.0 gave up in encode: .*indices"):
        backend.encode(np.full_like(SOURCE, VOCABULARY), MASK)


def test_openvino_climbs_the_ladder(openvino: Any, tiny_bundle: Bundle, exam: Exam) -> None:
    assert failed(judge(tiny_bundle, exam, openvino.openvino_backend(tiny_bundle, threads=1))) == []


def test_openvino_gives_a_row_that_may_see_nothing_what_onnx_runtime_gives(
    openvino: Any, tiny_bundle: Bundle, tiny_backend: OrtBackend
) -> None:
    found = everything(openvino.openvino_backend(tiny_bundle, threads=1))
    for ours, theirs in zip(found, everything(tiny_backend), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_openvino_computes_in_float32_with_the_threads_that_were_asked_for(
    openvino: Any, tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[dict[str, Any]] = []
    core = openvino.ov.Core

    class Observed:
        def compile_model(self, model: Any, device: str, given: dict[str, Any]) -> Any:
            settings.append(given | {"device": device})
            return core().compile_model(model, device, given)

    monkeypatch.setattr(openvino.ov, "Core", Observed)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5, 8}, raising=False)
    for threads, expected in ((2, 2), (None, 3)):
        settings.clear()
        openvino.openvino_backend(tiny_bundle, threads)
        assert len(settings) == len((*VERBS, BEGIN, BRANCH))
        for given in settings:
            assert given["device"] == "CPU"
            assert given["INFERENCE_PRECISION_HINT"] == "f32"
            assert given["INFERENCE_NUM_THREADS"] == expected


@pytest.mark.parametrize("threads", [0, -2, 257, 10**9])
def test_openvino_refuses_a_senseless_number_of_threads(openvino: Any, tiny_bundle: Bundle, threads: int) -> None:
    with pytest.raises(ProviderError, match=f"threads is {threads}, expected 1 to 256"):
        openvino.openvino_backend(tiny_bundle, threads)


def test_what_openvino_cannot_compute_is_one_line_with_the_verb(openvino: Any, tiny_bundle: Bundle) -> None:
    backend = openvino.openvino_backend(tiny_bundle, threads=1)
    with pytest.raises(GraphError, match=r"^OpenVINO [\d.]+ gave up in encode: ") as caught:
        backend.encode(SOURCE[None], MASK)
    assert "\n" not in str(caught.value)


def unknown_operator(graph: bytes) -> bytes:
    return graph.replace(b"Attention", b"Attentive")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("encoder_model.onnx", lambda _: b"not a graph"),
        ("encoder_model.onnx", lambda graph: graph[:5000]),
        ("weights.bin", lambda weights: weights[:1000]),
    ],
)
def test_a_damaged_file_is_refused_in_one_line_and_in_silence(
    openvino: Any, tiny: Path, file: str, change: Change, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = forged(tiny, file, change)
    with pytest.raises(BundleError, match=r"^OpenVINO [\d.]+ cannot \w+ .*encoder_model\.onnx[:,]") as caught:
        openvino.openvino_backend(bundle, threads=1)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("opset", "ending"), [(23, "toolkit export --opset 18"), (18, "Attentive-23")])
def test_an_operator_that_openvino_does_not_have_is_named_with_what_to_do(
    openvino: Any, tiny: Path, opset: int, ending: str
) -> None:
    edit_passport(tiny, lambda passport: passport.update({"opset": opset}))
    bundle = forged(tiny, "encoder_model.onnx", lambda graph: graph.replace(b"Attention", b"Attentive"))
    with pytest.raises(BundleError, match=rf"encoder_model\.onnx, opset {opset}: .*Attentive") as caught:
        openvino.openvino_backend(bundle, threads=1)
    assert str(caught.value).endswith(ending)
    assert "\n" not in str(caught.value)


WATCHED = """
import sys
from pathlib import Path

def watch(event, _):
    if event.partition(".")[0] in ("socket", "subprocess", "urllib") or event in ("os.fork", "os.system"):
        raise SystemExit(f"{event} was called")

sys.addaudithook(watch)
from runtime.bundle import Bundle
from runtime.openvino_backend import openvino_backend
openvino_backend(Bundle(Path(sys.argv[1])), 1)
sys.exit(any(name.startswith("openvino_telemetry") for name, module in sys.modules.items() if module))
"""


@pytest.mark.usefixtures("openvino")
def test_openvino_reports_to_nobody(tmp_path: Path) -> None:
    """Left to itself it does so at each import, in the name of an identity that it keeps in the home folder."""
    environment = {name: text for name, text in os.environ.items() if name not in ("CI", "TF_BUILD", "JENKINS_URL")}
    environment |= {"HOME": str(tmp_path), "LOCALAPPDATA": str(tmp_path), "ORT_DISABLE_TELEMETRY": "1"}
    shown = subprocess.run(
        [sys.executable, "-c", WATCHED, TINY], capture_output=True, text=True, check=False, env=environment
    )
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []

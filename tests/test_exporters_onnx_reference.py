"""The reference evaluator of ONNX sits exams: the graphs mean what PyTorch computes, whatever runs them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exporters_support import Export
from runtime_support import GRAPH, VOCABULARY, edit_passport, failed, judge

from exporters.onnx_reference import reference_backend
from runtime.bundle import Bundle, record_files
from runtime.errors import BundleError, GraphError
from runtime.exam import Exam, load_exam
from runtime.session import OrtBackend
from runtime.verbs import call

IDS = np.array([[4, 9, 7, 3], [0, 0, 0, 0], [8, 3, 0, 0]])
MASK = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
"""The second row may see nothing."""


def forged(folder: Path, name: str, change: Callable[[bytes], bytes]) -> Bundle:
    """The bundle in `folder` with the file `name` changed, and recorded as if it had always been so."""
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    (record,) = record_files(folder, [name]).values()
    edit_passport(
        folder, lambda passport: passport["files"].update({name: {"size": record.size, "sha256": record.sha256}})
    )
    return Bundle(folder)


def test_it_climbs_the_ladder(tiny_bundle: Bundle, exam: Exam) -> None:
    assert failed(judge(tiny_bundle, exam, reference_backend(tiny_bundle))) == []


def test_it_climbs_the_ladder_where_attention_is_spelt_out(exports: Callable[[str], Export]) -> None:
    bundle = exports("as Marian, opset 18").bundle
    assert failed(judge(bundle, load_exam(bundle.path("exam")), reference_backend(bundle))) == []


def test_so_does_openvino(exports: Callable[[str], Export]) -> None:
    openvino = pytest.importorskip("runtime.openvino_backend", reason="needs the extra openvino")
    bundle = exports("as Marian, opset 18").bundle
    assert failed(judge(bundle, load_exam(bundle.path("exam")), openvino.openvino_backend(bundle, 1))) == []


def test_a_row_that_may_see_nothing_gets_what_onnx_runtime_gives(tiny_bundle: Bundle, tiny_backend: OrtBackend) -> None:
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    ours, theirs = (call(backend, "encode", inputs) for backend in (reference_backend(tiny_bundle), tiny_backend))
    memory = ours["last_hidden_state"]
    np.testing.assert_allclose(memory, theirs["last_hidden_state"], atol=1e-4)
    inputs = {"encoder_attention_mask": MASK, "input_ids": IDS, "encoder_hidden_states": memory}
    ours, theirs = (call(backend, "prefill", inputs) for backend in (reference_backend(tiny_bundle), tiny_backend))
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, atol=1e-4, err_msg=name)


def test_one_wrong_weight_fails_the_exam(tiny: Path, exam: Exam) -> None:
    def turned(weights: bytes) -> bytes:
        numbers = np.frombuffer(weights, np.float32).copy()
        numbers[np.abs(numbers).argmax()] *= -1
        return numbers.tobytes()

    bundle = forged(tiny, "weights.bin", turned)
    assert GRAPH in failed(judge(bundle, exam, reference_backend(bundle)))


def test_what_it_cannot_compute_is_one_line_with_the_verb(tiny_bundle: Bundle) -> None:
    with pytest.raises(GraphError, match=r"^ONNX reference evaluator [\d.]+ gave up in encode: IndexError: ") as caught:
        reference_backend(tiny_bundle).encode(np.full_like(IDS, VOCABULARY), MASK)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("encoder_model.onnx", lambda _: b"not a graph"),
        ("encoder_model.onnx", lambda graph: graph[:5000]),
        ("encoder_model.onnx", lambda graph: graph.replace(b"Attention", b"Attentive")),
        ("weights.bin", lambda weights: weights[:1000]),
    ],
)
def test_what_it_cannot_read_is_refused_in_one_line_and_in_silence(
    tiny: Path, file: str, change: Callable[[bytes], bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = forged(tiny, file, change)
    with pytest.raises(
        BundleError, match=r"^ONNX reference evaluator .* cannot read .*encoder_model\.onnx: "
    ) as caught:
        reference_backend(bundle)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")

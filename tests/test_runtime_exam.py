"""The exam on disk: what is written comes back, what is damaged is refused in one line."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from runtime_support import TINY

from runtime.decoding import SpecialIds
from runtime.errors import ExamError
from runtime.exam import CacheCheck, Exam, GraphCase, RolloutCase, TokenCase, load_exam, save_exam
from runtime.formats import ARRAYS, EXAM
from runtime.generation import GenerationConfig

GOLDEN = TINY / "golden"


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN, tmp_path / "golden")


def plain(value: Any) -> Any:
    """`value` with arrays as what can be compared."""
    return msgspec.to_builtins(value, enc_hook=lambda array: [str(array.dtype), array.shape, array.tolist()])


def refusal(folder: Path) -> str:
    with pytest.raises(ExamError) as caught:
        load_exam(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_recorded_exam_asks_about_everything() -> None:
    exam = load_exam(GOLDEN)
    assert {case.verb for case in exam.graphs} == {"encode", "prefill", "step"}
    assert exam.cache.prefixes > 0
    assert exam.rollouts
    assert {case.config.num_beams for case in exam.tokens} == {1, 4}
    assert exam.special == SpecialIds(pad=0, start=2, eos=3)
    assert all(case.top_ids.shape == (len(case.ids), 16) for case in exam.tokens if case.config.num_beams == 1)
    assert all(case.text and case.translation for case in exam.tokens)
    assert {case.verb for case in exam.graphs if case.modules} == {"encode", "prefill", "step"}


def test_the_recorded_exam_is_small() -> None:
    """It lies in a repository and in every bundle."""
    assert (GOLDEN / ARRAYS).stat().st_size < 120_000
    assert (GOLDEN / EXAM).stat().st_size < 60_000


def test_an_exam_survives_writing_and_reading(tmp_path: Path) -> None:
    exam = load_exam(GOLDEN)
    save_exam(exam, tmp_path)
    assert plain(load_exam(tmp_path)) == plain(exam)


def test_the_same_exam_makes_the_same_files(tmp_path: Path) -> None:
    exam = load_exam(GOLDEN)
    for name in ("one", "two"):
        save_exam(exam, tmp_path / name)
    for file in (EXAM, ARRAYS):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


floats = arrays.arrays(np.float32, arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=30)
@given(floats, finite, st.text(max_size=20), st.lists(st.integers(0, 2**40), max_size=5))
def test_any_answer_survives(
    tmp_path_factory: pytest.TempPathFactory, array: Any, number: float, text: str, ids: list[int]
) -> None:
    exam = Exam(
        seed=1,
        tools={text: text},
        special=SpecialIds(0, len(ids), 3),
        cache=CacheCheck(prefixes=3, error=number),
        graphs=[
            GraphCase(
                verb="encode",
                label=text,
                inputs={"in": np.array(ids, np.int64)},
                reference={"out": array},
                own_error={"out": number},
                columns=np.arange(len(ids)),
                modules={text: array, "other": array[:0]},
                module_errors={text: number, "other": 0.0},
            )
        ],
        rollouts=[
            RolloutCase(
                label=text,
                source_ids=np.zeros((2, 1), np.int64),
                source_mask=np.ones((2, 1), np.int64),
                target_ids=np.ones((2, 2), np.int64),
                columns=np.zeros((2, 2, 3), np.int64),
                reference=np.ones((2, 2, 3), np.float32),
                own_error=[number, 0.0],
            )
        ],
        tokens=[
            TokenCase(
                label=text,
                text=text,
                source_ids=ids,
                config=GenerationConfig(num_beams=2),
                ids=ids,
                score=number,
                translation=text,
                top_ids=np.zeros((len(ids), 3), np.int64),
                top_log_probs=np.full((len(ids), 3), -np.inf, np.float32),
            )
        ],
    )
    folder = tmp_path_factory.mktemp("exam")
    save_exam(exam, folder)
    again = load_exam(folder)
    np.testing.assert_array_equal(again.graphs[0].reference["out"], array)
    np.testing.assert_array_equal(again.graphs[0].modules["other"], array[:0])
    assert json.dumps(plain(again)) == json.dumps(plain(exam))


@pytest.mark.parametrize("name", [EXAM, ARRAYS])
def test_a_missing_file_is_named(golden: Path, name: str) -> None:
    (golden / name).unlink()
    assert refusal(golden) == f"no exam in {golden}: {name} is missing"


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert f"no exam in {tmp_path / 'nothing'}" in refusal(tmp_path / "nothing")


def test_arrays_that_are_truncated_anywhere_are_refused(golden: Path) -> None:
    content = (golden / ARRAYS).read_bytes()
    for size in (0, 1, 10, len(content) // 2, len(content) - 1):
        (golden / ARRAYS).write_bytes(content[:size])
        assert "is damaged" in refusal(golden)


def test_arrays_that_are_something_else_are_refused(golden: Path) -> None:
    for content in (b"no arrays at all", b"PK\x03\x04 and then nothing"):
        (golden / ARRAYS).write_bytes(content)
        assert "is damaged" in refusal(golden)


def outcome(folder: Path) -> Any:
    """What is in the exam of `folder`, or how it is refused."""
    try:
        return plain(load_exam(folder))
    except ExamError as error:
        return str(error)


@pytest.mark.parametrize("bits", [0x01, 0x80, 0xFF])
def test_whatever_byte_changes_the_arrays_are_refused_or_the_same(tmp_path: Path, bits: int) -> None:
    """Times and comments in an archive are no part of the exam."""
    exam = load_exam(GOLDEN)
    save_exam(msgspec.structs.replace(exam, graphs=exam.graphs[:1], rollouts=[], tokens=exam.tokens[:1]), tmp_path)
    content = (tmp_path / ARRAYS).read_bytes()
    assert len(content) < 3000
    whole, found = outcome(tmp_path), []
    # Headers, some of the numbers, and all of what the archive says about itself.
    places = [*range(100), *range(100, len(content) - 300, 7), *range(len(content) - 300, len(content))]
    for place in places:
        changed = bytearray(content)
        changed[place] ^= bits
        (tmp_path / ARRAYS).write_bytes(changed)
        found.append(outcome(tmp_path))
    refused = [message for message in found if message != whole]
    assert len(places) > len(refused) > len(places) // 3
    assert all(isinstance(message, str) and "is damaged: " in message for message in refused)
    assert not any("\n" in message for message in refused)


def test_every_changed_byte_of_the_numbers_is_refused(golden: Path) -> None:
    save_exam(load_exam(golden), golden)
    content = (golden / ARRAYS).read_bytes()
    with zipfile.ZipFile(golden / ARRAYS) as archive:
        assert [entry.compress_type for entry in archive.infolist()] == [zipfile.ZIP_LZMA] * 2
        last = archive.infolist()[-1]
    start = last.header_offset + 30 + len(last.filename) + 10
    for place in range(start, start + last.compress_size - 20, 1499):
        changed = bytearray(content)
        changed[place] ^= 0xFF
        (golden / ARRAYS).write_bytes(changed)
        assert "is damaged" in refusal(golden)


def test_one_row_of_numbers_is_stored_for_each_type() -> None:
    with np.load(GOLDEN / ARRAYS) as stored:
        assert {name: (stored[name].dtype.name, stored[name].ndim) for name in stored.files} == {
            "int64": ("int64", 1),
            "float32": ("float32", 1),
        }


def test_arrays_of_a_type_that_is_missing_are_refused(golden: Path) -> None:
    with np.load(golden / ARRAYS) as stored:
        numbers = stored["float32"]
    np.savez(golden / ARRAYS, float32=numbers)
    assert "expected an array of exam.npz, got ['int64', 0, [5, 1]]" in refusal(golden)


def test_too_few_numbers_are_refused(golden: Path) -> None:
    with np.load(golden / ARRAYS) as stored:
        ids, numbers = stored["int64"], stored["float32"]
    np.savez(golden / ARRAYS, int64=ids, float32=numbers[:-1])
    assert "expected an array of exam.npz, got ['float32', " in refusal(golden)


def test_pickled_arrays_are_refused(golden: Path) -> None:
    np.savez(golden / ARRAYS, np.array([{"a": 1}], object))
    assert "is damaged" in refusal(golden)


def pop_answer(exam: dict[str, Any]) -> None:
    case = exam["graphs"][0]
    case["reference"].pop("last_hidden_state")


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda exam: exam.update(format="seq2onnx-exam-9"), "this version reads"),
    "a missing part": (lambda exam: exam.pop("tokens"), "missing required field `tokens`"),
    "a type that is not there": (
        lambda exam: exam["graphs"][0]["inputs"].update(input_ids=["int8", 0, [5, 1]]),
        "expected an array of exam.npz, got ['int8', 0, [5, 1]]",
    ),
    "a place behind the end": (
        lambda exam: exam["graphs"][0]["inputs"].update(input_ids=["int64", 10**9, [5, 1]]),
        "expected an array of exam.npz, got ['int64', 1000000000, [5, 1]]",
    ),
    "a place before the beginning": (
        lambda exam: exam["graphs"][0]["inputs"].update(input_ids=["int64", -9, [5, 1]]),
        "expected an array of exam.npz, got ['int64', -9, [5, 1]]",
    ),
    "a shape that goes backwards": (
        lambda exam: exam["graphs"][0]["inputs"].update(input_ids=["int64", 0, [-5, -1]]),
        "expected an array of exam.npz",
    ),
    "an array of the older format": (
        lambda exam: exam["graphs"][0]["inputs"].update(input_ids={"array": "999"}),
        "is damaged: Expected `array`, got `object`",
    ),
    "numbers instead of an array": (
        lambda exam: exam["graphs"][0]["inputs"].update(input_ids=[1, 2]),
        "is damaged: Expected",
    ),
    "an unknown verb": (lambda exam: exam["graphs"][0].update(verb="speak"), "is about 'speak'"),
    "an answer without its error": (pop_answer, "has answers and errors of different outputs"),
    "a module without its error": (
        lambda exam: exam["graphs"][-1]["module_errors"].popitem(),
        "step B=2 S=2 P=2 has answers and errors of different modules",
    ),
    "most probable tokens of other positions": (
        lambda exam: exam["tokens"][0]["ids"].pop(),
        "l q j l c h t m, 1 beam has most probable tokens for other positions than its output",
    ),
    "a special id that is none": (lambda exam: exam.update(special=[0, 2]), "is damaged: "),
    "too few positions": (
        lambda exam: exam["rollouts"][0]["own_error"].pop(),
        "has answers for other positions than it feeds",
    ),
    "an impossible search": (lambda exam: exam["tokens"][0]["config"].update(num_beams=0), "num_beams is 0"),
    "an error that is not a number": (lambda exam: exam["cache"].update(error=None), "Expected `float`, got `null`"),
}


@pytest.mark.parametrize(("edit", "expected"), EDITS.values(), ids=EDITS)
def test_an_edited_exam_is_refused(golden: Path, edit: Callable[[dict[str, Any]], object], expected: str) -> None:
    exam = json.loads((golden / EXAM).read_text("utf-8"))
    edit(exam)
    (golden / EXAM).write_text(json.dumps(exam), "utf-8")
    assert expected in refusal(golden)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"])
def test_a_damaged_structure_is_refused(golden: Path, content: bytes) -> None:
    (golden / EXAM).write_bytes(content)
    assert f"{golden / EXAM} is damaged" in refusal(golden)


def test_only_arrays_can_be_stored_beside_the_structure(tmp_path: Path) -> None:
    strange: Any = {1j}
    exam = msgspec.structs.replace(load_exam(GOLDEN), tools=strange)
    with pytest.raises(TypeError, match="cannot store complex"):
        save_exam(exam, tmp_path)

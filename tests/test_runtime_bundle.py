"""What a bundle refuses, each with one line that says which file and why."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from runtime_support import TINY, edit_passport

from runtime.bundle import (
    COMPANIONS,
    FORMAT,
    PASSPORT,
    Bundle,
    FileRecord,
    Verification,
    read_passport,
    record_files,
    write_passport,
)
from runtime.contract import GRAPH_FILES
from runtime.errors import BundleError
from runtime.tokenizer import TOKENIZER_FILES

FILES = sorted(json.loads((TINY / PASSPORT).read_text("utf-8"))["files"])


def refusal(folder: Path) -> str:
    """The one line with which the bundle in `folder` is refused."""
    with pytest.raises(BundleError) as caught:
        Bundle(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_whole_bundle_opens(tiny_bundle: Bundle) -> None:
    assert tiny_bundle.passport.format == FORMAT
    for verb, name in GRAPH_FILES.items():
        assert tiny_bundle.path(verb) == TINY / name


def test_every_file_of_the_bundle_is_recorded() -> None:
    present = {path.relative_to(TINY).as_posix() for path in TINY.rglob("*") if path.is_file()}
    assert present - {PASSPORT} == set(FILES)


def test_a_bundle_may_be_moved_and_renamed(tiny: Path) -> None:
    elsewhere = tiny.rename(tiny.with_name("another name"))
    assert Bundle(elsewhere).path("encode").is_file()


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nothing") == (
        f"{tmp_path / 'nothing'} does not exist: expected a bundle, a folder that 'toolkit export' wrote"
    )


def test_a_file_is_no_bundle(tiny: Path) -> None:
    assert refusal(tiny / PASSPORT).startswith(f"{tiny / PASSPORT} is a file: expected a bundle")


def test_a_folder_without_passport_is_no_bundle(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} is not a bundle: it has no {PASSPORT}"


def test_another_format_is_refused_with_both_formats(tiny: Path) -> None:
    edit_passport(tiny, lambda passport: passport.update(format="seq2onnx-bundle-99"))
    message = refusal(tiny)
    assert "'seq2onnx-bundle-99'" in message
    assert f"reads {FORMAT!r}" in message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": "%s"}' % FORMAT.encode()])
def test_a_damaged_passport_is_refused(tiny: Path, content: bytes) -> None:
    (tiny / PASSPORT).write_bytes(content)
    assert refusal(tiny).startswith(f"{tiny / PASSPORT} is damaged: ")


EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"colour": "red"}, "unknown field `colour`"),
    "a field of another type": ({"opset": "23"}, "Expected `int`, got `str` - at `$.opset`"),
    "an impossible search": ({"generation": {"num_beams": 0}}, "num_beams is 0"),
    "an id outside the vocabulary": ({"special": [0, 2, 45]}, "the eos id is 45, the vocabulary has 45 entries"),
    "outputs longer than the model": (
        {"generation": {"max_length": 25}},
        "outputs have up to 25 tokens, the model 24 positions",
    ),
    "a negative id": ({"special": [-1, 2, 3]}, "the pad id is -1"),
    "no roles": ({"roles": {}}, "it names no file for 'encode'"),
    "no files": ({"files": {}}, "encode is 'encoder_model.onnx', which is not among its files"),
}


@pytest.mark.parametrize(("changes", "expected"), EDITS.values(), ids=EDITS)
def test_an_edited_passport_is_refused(tiny: Path, changes: dict[str, Any], expected: str) -> None:
    edit_passport(tiny, lambda passport: passport.update(changes))
    assert expected in refusal(tiny)


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret.onnx", "unrecorded.onnx"])
def test_a_graph_that_is_not_a_recorded_file_is_refused(tiny: Path, path: str) -> None:
    (tiny / "unrecorded.onnx").write_bytes(b"")
    edit_passport(tiny, lambda passport: passport["roles"].update(step=path))
    assert f"step is {path!r}, which is not among its files" in refusal(tiny)


@pytest.mark.parametrize("name", ["../outside.bin", "golden/../../outside.bin", "/etc/passwd"])
def test_a_recorded_file_outside_the_folder_is_refused(tiny: Path, name: str) -> None:
    (tiny.parent / "outside.bin").write_bytes(b"x")
    (record,) = record_files(tiny.parent, ["outside.bin"]).values()
    entry = {name: {"size": record.size, "sha256": record.sha256}}
    edit_passport(tiny, lambda passport: passport["files"].update(entry))
    assert f"{name} lies outside the folder" in refusal(tiny)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tiny: Path, name: str) -> None:
    (tiny / name).unlink()
    assert f"{name} is missing" in refusal(tiny)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named_with_both_sizes(tiny: Path, name: str) -> None:
    content = (tiny / name).read_bytes()
    (tiny / name).write_bytes(content[:-1])
    assert f"{name} has {len(content) - 1} bytes, expected {len(content)}" in refusal(tiny)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_one_changed_byte_is_noticed(tiny: Path, name: str, place: float) -> None:
    content = bytearray((tiny / name).read_bytes())
    content[round(place * (len(content) - 1))] ^= 1
    (tiny / name).write_bytes(content)
    assert f"{name} has other contents than recorded" in refusal(tiny)


@pytest.mark.parametrize("name", ["weights.bin", *TOKENIZER_FILES, "golden/exam.json", "golden/exam.npz"])
def test_what_the_runtime_reads_must_be_recorded(tiny: Path, name: str) -> None:
    """A change of it would not be noticed."""
    edit_passport(tiny, lambda passport: passport["files"].pop(name))
    assert f"{name} is not among its files" in refusal(tiny)


def test_the_weights_have_a_role(tiny: Path) -> None:
    edit_passport(tiny, lambda passport: passport["roles"].pop("weights"))
    assert "it names no file for 'weights'" in refusal(tiny)


def test_files_of_the_user_need_no_record(tiny: Path) -> None:
    (tiny / "notes.txt").write_text("mine", "utf-8")
    (tiny / "golden" / "notes.txt").write_text("mine too", "utf-8")
    assert "notes.txt" not in Bundle(tiny).passport.files


def test_all_problems_are_listed_at_once(tiny: Path) -> None:
    (tiny / "vocab.json").unlink()
    (tiny / "weights.bin").write_bytes(b"")
    edit_passport(tiny, lambda passport: passport["roles"].update(step="nowhere.onnx"))
    message = refusal(tiny)
    for part in ("vocab.json is missing", "weights.bin has 0 bytes", "step is 'nowhere.onnx'", "Export it again"):
        assert part in message


def test_a_role_that_the_passport_does_not_know_is_an_error(tiny_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="names no file for 'speech'"):
        tiny_bundle.path("speech")


def test_a_passport_survives_writing_and_reading(tiny: Path) -> None:
    passport = read_passport(tiny)
    (tiny / PASSPORT).unlink()
    write_passport(tiny, passport)
    assert read_passport(tiny) == passport
    assert not list(tiny.glob(f".{PASSPORT}*"))


def test_a_verification_with_numbers_that_are_none_survives_too(tiny: Path) -> None:
    found = Verification(
        passed=False,
        setting="here",
        versions={},
        rungs={"6": "not tried"},
        exam="fresh, seed 7",
        settings=["here"],
        thresholds={"chrf": None},
        figures={"chrf": None, "loops": 1},
    )
    passport = replace(read_passport(tiny), verification=found)
    write_passport(tiny, passport)
    assert read_passport(tiny) == passport


def test_records_are_size_and_sha256(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert record_files(tmp_path, ["folder/file"]) == {"folder/file": FileRecord(3, digest)}


def test_a_copy_without_the_passport_s_folders_is_refused(tiny: Path) -> None:
    shutil.rmtree(tiny / "golden")
    message = refusal(tiny)
    assert "golden/exam.json is missing" in message
    assert "golden/exam.npz is missing" in message


@pytest.mark.parametrize("name", COMPANIONS)
@pytest.mark.parametrize("key", ["pad_token_id", "decoder_start_token_id", "eos_token_id"])
def test_a_companion_that_contradicts_the_passport_is_refused(tiny: Path, name: str, key: str) -> None:
    """Others open the folder by it, and would search from another token."""
    content = json.loads((tiny / name).read_text("utf-8"))
    (tiny / name).write_text(json.dumps(content | {key: 7}), "utf-8")
    vouch(tiny, name)
    assert f"{name}: {key} is 7, the passport says {content[key]}" in refusal(tiny)


@pytest.mark.parametrize("name", COMPANIONS)
def test_a_damaged_companion_is_refused(tiny: Path, name: str) -> None:
    (tiny / name).write_text("{", "utf-8")
    vouch(tiny, name)
    assert f"{name} is damaged" in refusal(tiny)


def vouch(folder: Path, name: str) -> None:
    (record,) = record_files(folder, [name]).values()
    entry = {name: {"size": record.size, "sha256": record.sha256}}
    edit_passport(folder, lambda passport: passport["files"].update(entry))

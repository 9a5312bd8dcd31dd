"""`toolkit run`, as it is used from a shell."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_support import POSITIONS, TINY, edit_passport

Done = subprocess.CompletedProcess[bytes]
COMMAND = [sys.executable, "-m", "toolkit", "run"]
ENVIRONMENT = os.environ | {"TOOLKIT_BUNDLE": str(TINY), "OMP_NUM_THREADS": "1"}


def run(*arguments: str | Path, stdin: bytes = b"") -> Done:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, check=False, env=ENVIRONMENT, timeout=120)


def refused(done: Done, code: int = 1) -> str:
    """The one line by which a command refuses."""
    error = done.stderr.decode()
    assert done.returncode == code, error
    assert "Traceback" not in error
    assert done.stdout == b""
    return error.splitlines()[-1]


@pytest.fixture
def waiting() -> Iterator["subprocess.Popen[bytes]"]:
    """The command with its standard input open."""
    pipe = subprocess.PIPE
    with subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=pipe, env=ENVIRONMENT) as process:
        yield process
        process.kill()


def test_arguments_files_and_standard_input_give_the_same_lines_in_order(tmp_path: Path) -> None:
    texts = [" ".join("abcdefghij"[: 3 + place % 8]) for place in range(700)]
    content = "".join(f"{text}\n" for text in texts).encode()
    expected = "".join(f"{text[::-1]}\n" for text in texts).encode()
    (tmp_path / "input").write_bytes(content)
    assert run("--file", tmp_path / "input", "--beam", "1").stdout == expected
    assert run("--beam", "1", stdin=content).stdout == expected
    assert run("--beam", "1", *texts[:20]).stdout == b"".join(expected.splitlines(keepends=True)[:20])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", b""),
        (b"a b c", b"c b a\n"),
        (b"a b c\r\nd e f\r\n", b"c b a\nf e d\n"),
        (b"\n   \na b c\n\n", b"\n\nc b a\n\n"),
    ],
    ids=["nothing", "no end of line", "CRLF", "empty lines"],
)
def test_lines_end_as_they_end_anywhere(content: bytes, expected: bytes) -> None:
    done = run(stdin=content)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, b"")


def test_a_character_that_only_looks_like_the_end_of_a_line_is_text() -> None:
    done = run(stdin="a b\u2028c\x0bd\x0ce\u0085f\n".encode())
    assert done.returncode == 0
    assert done.stdout.count(b"\n") == 1


def test_a_line_that_cannot_be_translated_leaves_an_empty_line_and_the_others_go_on() -> None:
    long = b"a " * 30
    done = run(stdin=b"a b c\n\xff\xfe\n" + long + b"\nd e f\n")
    assert done.returncode == 1
    assert done.stdout == b"c b a\n\n\nf e d\n"
    first, second = done.stderr.decode().splitlines()
    assert first.startswith("line 2: not UTF-8: byte 0xff at column 1")
    assert second.startswith("line 3: ")
    assert f"31 tokens, the model has {POSITIONS} positions" in second


def test_a_line_of_ten_million_characters_is_refused_like_any_other_long_one() -> None:
    done = run(stdin=b"a " * 5_000_000 + b"\na b c\n")
    assert done.returncode == 1
    assert done.stdout == b"\nc b a\n"
    assert done.stderr.startswith(b"line 1: ")


def test_json_is_one_object_a_line() -> None:
    done = run("--json", "--n-best", "2", stdin=b"a b c\n\n\xff\n")
    assert done.returncode == 1
    first, empty, failed = map(json.loads, done.stdout.splitlines())
    assert (first["line"], first["source"], first["text"]) == (1, "a b c", "c b a")
    assert first["score"] > first["alternatives"][0]["score"]
    assert len(first["alternatives"]) == 1
    assert (empty["text"], empty["score"]) == ("", None)
    assert failed["error"].startswith("not UTF-8")


def test_n_best_outputs_have_a_line_each_with_number_and_score() -> None:
    done = run("--n-best", "3", "a b c", "d e f")
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    assert [row[0] for row in rows] == ["1"] * 3 + ["2"] * 3
    assert [row[2] for row in rows][::3] == ["c b a", "f e d"]
    assert [float(row[1]) for row in rows[:3]] == sorted((float(row[1]) for row in rows[:3]), reverse=True)


def test_outputs_are_as_long_as_they_are_wished() -> None:
    assert run("--max-new-tokens", "2", "a b c d").stdout == b"d c\n"
    assert len(run("--min-new-tokens", "9", "--beam", "1", "a b c").stdout.split()) >= 8
    scores = [
        float(run("--json", "--length-penalty", penalty, "a b c").stdout.split(b'"score": ')[1].split(b",")[0])
        for penalty in ("0", "1", "-1")
    ]
    assert scores == pytest.approx([scores[0], scores[0] / 4, scores[0] * 4], rel=1e-3)


def test_repetition_can_be_forbidden() -> None:
    assert run("a a a a a a").stdout == b"a a a a a a\n"
    words = run("--no-repeat-ngram", "1", "a a a a a a").stdout.split()
    assert len(words) == len(set(words)) > 1
    assert run("--repetition-penalty", "50", "--beam", "1", "a a a a a a").stdout.count(b"a") < 3


def test_samples_vary_and_a_seed_repeats_them() -> None:
    options = ("--sample", "--temperature", "3", "--n-best", "8", "--json", "a b c d")
    first, again, other = (json.loads(run("--seed", seed, *options).stdout) for seed in ("1", "1", "2"))
    assert first == again != other
    assert len({first["text"], *(found["text"] for found in first["alternatives"])}) > 1
    assert len(first["alternatives"]) == 7
    for certain in (("--top-k", "1"), ("--top-p", "0"), ("--beam", "2", "--temperature", "0.01", "--top-k", "2")):
        assert run("--sample", *certain, "a b c d").stdout == b"d c b a\n"


def test_sampling_of_the_bundle_can_be_switched_off(tiny: Path) -> None:
    edit_passport(
        tiny,
        lambda passport: passport["generation"].update(num_beams=1, do_sample=True, temperature=9.0, top_k=0, seed=4),
    )
    assert run("--bundle", tiny, "a b c d").stdout != b"d c b a\n"
    assert run("--bundle", tiny, "--temperature", "0.01", "a b c d").stdout == b"d c b a\n"
    assert run("--bundle", tiny, "--no-sample", "a b c d").stdout == b"d c b a\n"
    assert run("--bundle", tiny, "--no-sample", "--n-best", "3", "a b c d").stdout.count(b"\n") == 3


def test_an_answer_comes_before_the_input_ends(waiting: "subprocess.Popen[bytes]") -> None:
    assert waiting.stdin is not None
    assert waiting.stdout is not None
    for text, answer in ((b"a b c\n", b"c b a\n"), (b"q r s\n", b"s r q\n")):
        waiting.stdin.write(text)
        waiting.stdin.flush()
        assert select.select([waiting.stdout], [], [], 60)[0], "no answer while the input is open"
        assert waiting.stdout.readline() == answer


def test_a_reader_who_goes_away_ends_the_command_without_a_word() -> None:
    content = b"a b c d e f\n" * 5000
    shell = f"{sys.executable} -m toolkit run --beam 1 | head -n 1"
    done = subprocess.run(["sh", "-c", shell], input=content, capture_output=True, check=False, env=ENVIRONMENT)
    assert (done.stdout, done.stderr) == (b"f e d c b a\n", b"")


def test_ctrl_c_ends_the_command_without_a_traceback(waiting: "subprocess.Popen[bytes]") -> None:
    assert waiting.stdin is not None
    assert waiting.stdout is not None
    waiting.stdin.write(b"a b c\n")
    waiting.stdin.flush()
    waiting.stdout.readline()
    waiting.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 30
    while waiting.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert waiting.returncode == 130
    assert waiting.stderr is not None
    assert b"Traceback" not in waiting.stderr.read()


def test_wrong_command_lines_and_missing_things_are_one_line(tmp_path: Path) -> None:
    assert "no-such" in refused(run("--bundle", tmp_path / "no-such", "a"))
    assert "is not a bundle" in refused(run("--bundle", tmp_path, "a"))
    assert "missing.txt" in refused(run("--file", tmp_path / "missing.txt"))
    assert refused(run("--file", tmp_path)).startswith("Error: ")
    assert "not both" in refused(run("--file", tmp_path / "missing.txt", "a"), 2)
    assert "--n-best 3 is more than --beam 2" in refused(run("--n-best", "3", "--beam", "2", "a"), 2)
    assert "--no-such" in refused(run("--no-such", "a"), 2)
    assert "--beam" in refused(run("--beam", "0", "a"), 2)
    assert "without --sample there is no use for --top-k, --seed" in refused(run("--seed", "1", "--top-k", "3", "a"), 2)
    assert "--n-best 3 is more than --beam 2" in refused(run("--sample", "--n-best", "3", "--beam", "2", "a"), 2)
    assert "length_penalty is nan" in refused(run("--length-penalty", "nan", "a"))
    assert f"outputs of up to {POSITIONS + 1} tokens" in refused(run("--max-new-tokens", str(POSITIONS), "a"))


def test_cuda_is_refused_where_it_would_not_be_used_unless_the_fallback_is_allowed() -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.InferenceSession(TINY / "encoder_model.onnx").get_providers():
        pytest.skip("CUDA can be used here")
    assert "cuda was asked for" in refused(run("--provider", "cuda", "a b c"))
    done = run("--provider", "cuda", "--allow-fallback", "a b c")
    assert (done.returncode, done.stdout) == (0, b"c b a\n")
    assert done.stderr.decode().strip() == "cuda cannot be used here: running on cpu"


INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv = ["toolkit", "run"]
from toolkit.__main__ import run
run()
"""


@pytest.mark.parametrize("module", ["toolkit.cli", "click", "runtime", "numpy", "onnxruntime", "sentencepiece"])
def test_ctrl_c_while_the_program_starts_shows_no_traceback(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED.format(module=module)]
    done = subprocess.run(command, input=b"", capture_output=True, check=False, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 130, done.stderr
    assert b"Traceback" not in done.stderr


def test_ctrl_c_that_an_extension_module_mistakes_for_its_own_failure_is_still_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('initialization failed') from None\n",
        "utf-8",
    )
    environment = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(COMMAND, input=b"", capture_output=True, check=False, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"")

"""What is deployed works without what trained and exported it, in an environment that has all of it or none."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from runtime_support import TINY

import runtime

HEAVY = (
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "transformers",
    "safetensors",
    "accelerate",
    "sacrebleu",
    "matplotlib",
)
BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))\n"
COMMANDS = BLOCKED + "from toolkit.cli import main; main(sys.argv[1:], prog_name='toolkit')"


def python(program: str, *arguments: str | Path, text: str = "") -> "subprocess.CompletedProcess[str]":
    # -P: the checkout, in which the tests run, must not stand in for what is installed.
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )


def test_the_runtime_imports_nothing_heavy() -> None:
    shown = python("import sys, runtime, runtime.verify, toolkit.cli; print(*sys.modules)")
    assert shown.returncode == 0, shown.stderr
    assert not {name.partition(".")[0] for name in shown.stdout.split()} & set(HEAVY)


def test_where_torch_is_not_installed_the_wheel_is_what_is_tested() -> None:
    if find_spec("torch") is not None:
        pytest.skip("torch is installed here: the checkout is what is tested")
    assert "site-packages" in Path(runtime.__file__).parts
    assert not [name for name in HEAVY if find_spec(name) is not None]


def test_the_console_script_is_installed() -> None:
    shown = subprocess.run([Path(sys.executable).with_name("toolkit"), "--version"], capture_output=True, check=True)
    assert shown.stdout.startswith(b"seq2onnx ")


def test_help_is_there() -> None:
    shown = python(COMMANDS, "--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in ("train", "export", "run", "verify", "inspect"))


def test_nothing_is_reported_to_anybody(tmp_path: Path) -> None:
    """ONNX Runtime keeps what it will report, and an identity, in the user's folders."""
    program = f"from runtime import Translator; print(Translator.open({str(TINY)!r}).translate(['a b c'])[0].text)"
    homes = {name: str(tmp_path) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    clean = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    shown = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True, env=clean | homes)
    assert shown.stdout == b"c b a\n"
    assert list(tmp_path.iterdir()) == []


def test_run_translates() -> None:
    shown = python(COMMANDS, "run", "--bundle", TINY, text="a b c d e\n\nq r s t\n")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "e d c b a\n\nt s r q\n", "")


def test_verify_climbs_the_ladder() -> None:
    shown = python(COMMANDS, "verify", TINY)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.rstrip().endswith("PASS")


def test_inspect_shows_a_bundle() -> None:
    shown = python(COMMANDS, "inspect", TINY)
    assert shown.returncode == 0, shown.stderr
    assert "past_key_values.0.decoder.key" in shown.stdout


def test_bench_measures_a_bundle() -> None:
    shown = python(COMMANDS, "bench", TINY, "--batch", "2", "--threads", "1", "--rounds", "1", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert json.loads(shown.stdout)["rows"][0]["tokens_per_second"] > 0


@pytest.mark.parametrize("engine", ["torch", "ctranslate2", "transformers"])
def test_a_rival_that_is_not_installed_is_named(engine: str) -> None:
    # In the engine's own process nothing is blocked, so that this shows where nothing is installed.
    if find_spec("torch") is not None:
        pytest.skip("torch is installed here")
    shown = python(COMMANDS, "bench", TINY, "--against", engine, "--reference", TINY, "--threads", "1", "--rounds", "1")
    assert shown.returncode == 1
    (error,) = shown.stderr.splitlines()
    assert error.startswith(f"Error: {engine}: ")
    assert error.endswith("is not installed")


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["train", "--config", "settings.toml"], "train"),
        (["export", "checkpoint", "bundle"], "export"),
        (["verify", TINY, "--checkpoint", "checkpoint"], "export"),
        (["inspect", TINY, "--shapes", "a b c"], "export"),
        (["inspect", "checkpoint"], "export"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_what_needs_more_says_what_to_install(arguments: list[str | Path], extra: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.json").write_text("{}", "utf-8")
    shown = python(COMMANDS, *(tmp_path / word if word == "checkpoint" else word for word in arguments))
    assert shown.returncode == 1
    *progress, error = shown.stderr.splitlines()
    assert error.startswith("Error: ")
    assert error.endswith(f"pip install 'seq2onnx[{extra}]'")
    assert not any("Traceback" in line for line in progress)

"""`make interop`: whether other runtimes open a bundle and give what ours gives. The exit code says so.

Usage: interop.py BUNDLE ..., with Optimum in `.venv-interop` and npm's packages in `examples/node`. One more bundle is
made, of a small random OPUS-MT model that transformers saved. transformers.js is asked where a bundle has its layout.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from importers_support import quiet_transformers
from tokenizer_support import SENTENCES
from whole_support import TEXTS, write_whole

from exporters.export import export_bundle
from runtime.bundle import Bundle
from runtime.errors import InputTooLongError
from runtime.exam import load_exam
from runtime.tokenizer import open_tokenizer
from runtime.translator import Translator

ROOT = Path(__file__).parent.parent
NODE = ROOT / "examples" / "node"
OPTIMUM = (ROOT / ".venv-interop/bin/python", ROOT / "tests/interop_optimum.py")
BEAMS = (1, 4)


def imported_bundle(folder: Path) -> Path:
    """A bundle in `folder` of a model that transformers saved; the same one every time."""
    # Parts of what its tokenizer has learned from, too.
    parts = [" ".join(line.split()[start : start + 4]) for line in SENTENCES for start in range(len(line.split()) - 3)]
    (folder / "sentences.txt").write_text("".join(f"{text}\n" for text in (*TEXTS, *parts)), "utf-8")
    with quiet_transformers():
        write_whole("Marian", folder / "model")
        export_bundle(
            folder / "model", folder / "imported", layout="transformersjs", sentences=folder / "sentences.txt"
        )
    return folder / "imported"


def sentences(bundle: Bundle, translator: Translator) -> list[str]:
    """The examples, what the bundle's exam asks for, and a sample of test data; each once, as far as they fit."""
    lines = (ROOT / "examples/sentences.txt").read_text("utf-8").splitlines()
    lines += [case.text for case in load_exam(bundle.path("exam")).tokens]
    pairs = (ROOT / "tests/data/sample-zh-en/test.tsv").read_text("utf-8").splitlines()
    lines += [pair.split("\t")[0] for pair in pairs]
    return [line for line in dict.fromkeys(lines) if line and fits(translator, line)]


def fits(translator: Translator, line: str) -> bool:
    """Whether the model has positions enough for `line`."""
    try:
        translator.encode(line)
    except InputTooLongError:
        return False
    return True


def ask(command: Sequence[str | Path], lines: Sequence[str]) -> list[str]:
    """Lines of the answer of `command`, one for each of `lines`."""
    # Not our own path: the other environment has its own packages.
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        input="".join(f"{line}\n" for line in lines),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=ours | {"HF_HUB_OFFLINE": "1"},
    )
    return done.stdout.split("\n")[:-1]


def show(what: str, expected: Sequence[object], found: Sequence[object]) -> bool:
    """Print how many of `expected` were found, and the first that was not; whether all were."""
    equal = sum(ours == theirs for ours, theirs in zip(expected, found, strict=True))
    sys.stdout.write(f"{what:72}{equal:5} of {len(expected)} equal\n")
    for ours, theirs in zip(expected, found, strict=True):
        if ours != theirs:
            sys.stdout.write(f"  expected {ours}\n  found    {theirs}\n")
            break
    return 0 < equal == len(expected)


def compare_ids(bundle: Bundle) -> bool:
    """Optimum and onnxruntime-node against our ids, from the same source ids."""
    translator = Translator.open(bundle.folder)
    texts = sentences(bundle, translator)
    sources = [translator.encode(text) for text in texts]
    questions = [json.dumps(source) for source in sources]
    passed = True
    for beams in BEAMS:
        config = msgspec.structs.replace(translator.defaults, num_beams=beams)
        ours = [found[0].ids for found in translator.generate(sources, config)]
        askers: dict[str, tuple[str | Path, ...]] = {"Optimum": (*OPTIMUM, bundle.folder, str(beams))}
        if beams == 1:
            askers["onnxruntime-node"] = ("node", NODE / "translate.mjs", bundle.folder)
        for name, command in askers.items():
            theirs = [json.loads(line) for line in ask(command, questions)]
            passed &= show(f"{bundle.folder}: ids of {name}, beams {beams}", ours, theirs)
    return passed


def compare_texts(bundle: Bundle) -> bool:
    """transformers.js against our translations, from the same text."""
    translator, tokenizer = Translator.open(bundle.folder), open_tokenizer(bundle.folder)
    # What only the target's pieces know is unknown to us, and split by them there.
    texts = [text for text in sentences(bundle, translator) if tokenizer.unknown not in tokenizer.encode(text)]
    config = msgspec.structs.replace(translator.defaults, num_beams=1)
    ours = [found.text for found in translator.translate(texts, config)]
    theirs = ask(("node", NODE / "transformersjs.mjs", bundle.folder), texts)
    return show(f"{bundle.folder}: text of transformers.js", ours, theirs)


def main(folders: Sequence[str]) -> int:
    """Compare; the exit code."""
    with tempfile.TemporaryDirectory() as made:
        bundles = [Bundle(folder) for folder in (*map(Path, folders), imported_bundle(Path(made)))]
        passed = [compare_ids(bundle) for bundle in bundles]
        passed += [compare_texts(bundle) for bundle in bundles if (bundle.folder / "onnx").is_dir()]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

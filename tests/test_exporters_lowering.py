"""A bundle of lower precision has passed its gate, or is not there; what is damaged does not pass."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
import torch
from runtime_support import TINY

from exporters import export as module
from exporters.errors import ExportError
from exporters.export import export_bundle
from exporters.golden import light_sizes, recorded_sizes, shortened
from exporters.quantize import Precision, rounded
from exporters.restore import restore_model
from exporters.sensitivity import divergences, overflowing
from models.checkpoint import load_checkpoint, save_checkpoint
from models.transformer import Transformer
from runtime.bundle import WEIGHTS, Bundle, record_files, write_passport
from runtime.contract import ENCODE, GRAPH_FILES, PREFILL, STEP, VERBS
from runtime.exam import load_exam
from runtime.parity import Report
from runtime.parity.gate import THRESHOLDS
from runtime.session import OrtBackend
from runtime.tokenizer import TOKENIZER_FILES
from runtime.verify import sit_bundle

LOWER: tuple[Precision, ...] = ("fp16", "int8", "int4")
FC2 = "encoder.layers.0.feed_forward.fc2.weight"


def write_checkpoint(model: Transformer, folder: Path) -> Path:
    """`model` as the checkpoint that the bundle in tests/data came of."""
    save_checkpoint(model, folder)
    for name in TOKENIZER_FILES:
        shutil.copy(TINY / name, folder / name)
    sentences = dict.fromkeys(case.text for case in load_exam(TINY / "golden").tokens)
    (folder / "sentences.txt").write_text("\n".join(sentences), "utf-8")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(restore_model(Bundle(TINY)), tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights int4 can hold; those of the other have too few neighbours to make up for its rounding."""
    model = restore_model(Bundle(TINY))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(rounded(parameter.numpy(), "int4")))
    return write_checkpoint(model, tmp_path_factory.mktemp("coarse") / "checkpoint")


def tiny_graphs(model: Transformer, _: int, say: Callable[[str], None]) -> Iterator[tuple[str, ir.Model]]:
    """What takes the place of `export_graphs` and costs nothing: graphs in tests/data with the weights of `model`."""
    weights = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    for verb, file in GRAPH_FILES.items():
        say(f"loading {verb}")
        graph = ir.load(TINY / file)
        for name, value in graph.graph.initializers.items():
            if name in weights:
                value.const_value = ir.tensor(weights[name], name=name)
            elif name.removesuffix(".T") in weights:
                value.const_value = ir.tensor(weights[name.removesuffix(".T")].T.copy(), name=name)
        yield verb, graph


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "export_graphs", tiny_graphs)


@pytest.fixture(scope="module")
def bundles(checkpoint: Path, coarse: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Precision], Bundle]:
    """The tiny model in each lower precision, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("lower")

    def bundle(precision: Precision) -> Bundle:
        if not (folder / precision).exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "export_graphs", tiny_graphs)
                source = coarse if precision == "int4" else checkpoint
                export_bundle(source, folder / precision, precision=precision)
        return Bundle(folder / precision)

    return bundle


def sit_exam(bundle: Bundle) -> Report:
    return sit_bundle(bundle, OrtBackend(bundle, threads=1))


# What passes


@pytest.mark.parametrize("precision", LOWER)
def test_a_bundle_of_lower_precision_passed_its_gate_and_says_so(
    bundles: Callable[[Precision], Bundle], precision: Precision
) -> None:
    bundle = bundles(precision)
    passport = bundle.passport
    assert passport.precision == precision
    assert passport.quantization is not None
    assert (passport.quantization.scheme, passport.quantization.block) == {
        "fp16": ("none", None),
        "int8": ("rows", None),
        "int4": ("blocks", 32),
    }[precision]
    assert passport.verification is not None
    assert passport.verification.passed
    assert passport.verification.figures.keys() == THRESHOLDS.keys()
    assert sit_exam(bundle).passed
    assert {path.name for path in bundle.folder.parent.iterdir()} <= set(LOWER)
    full = Bundle(TINY)
    share = {"fp16": 0.53, "int8": 0.36, "int4": 0.31}[precision]
    if not passport.quantization.excluded:
        assert bundle.path("weights").stat().st_size <= share * full.path("weights").stat().st_size


def test_the_exam_of_a_lower_precision_is_light(bundles: Callable[[Precision], Bundle]) -> None:
    exam = load_exam(bundles("int8").path("exam"))
    assert not any(case.modules for case in exam.graphs)
    for case in exam.graphs:
        for array in (*case.reference.values(), *case.inputs.values()):
            if array.dtype == np.float32:
                np.testing.assert_array_equal(array, shortened(array))
    assert {case.verb for case in exam.graphs} == {ENCODE, PREFILL, STEP}


def test_a_light_exam_goes_as_far_as_the_full_one() -> None:
    full, light = recorded_sizes(512), light_sizes(512)
    assert max(source for _, source in light.encode) == 33
    assert len(light.encode) == len(light.prefill) == len(light.step) == 3
    assert max((source, length) for _, source, length in light.rollout) == (512, 512)
    assert light.rollout[0] == full.rollout[0]
    assert light_sizes(20).encode == recorded_sizes(20).encode


def test_numbers_are_shortened_to_11_bits() -> None:
    numbers = np.random.default_rng(0).normal(size=1000).astype(np.float32) * 10
    near = shortened(numbers)
    assert 0 < np.abs(near / numbers - 1).max() <= 2**-11
    assert not (near.view(np.uint32) & 0x1FFF).any()
    exact = np.array([0, 1, -2, 0.5, 1 + 2**-10, np.inf], np.float32)
    np.testing.assert_array_equal(shortened(exact), exact)


# What stays float32


def outlier(model: Transformer, factor: float) -> Transformer:
    """The same function, exactly: one hidden unit is `factor` times as large, a power of two, and counts as much less.

    In integers with one scale a row the other units are lost.
    """
    weights = dict(model.named_parameters())
    with torch.no_grad():
        weights[FC2.replace("fc2", "fc1")][3] *= factor
        weights[FC2.replace("fc2.weight", "fc1.bias")][3] *= factor
        weights[FC2][:, 3] /= factor
    return model


@pytest.mark.usefixtures("untraced")
def test_a_weight_that_spoils_the_words_stays_float32_and_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(outlier(restore_model(Bundle(TINY)), 2**12), tmp_path / "checkpoint")
    notes: list[str] = []
    stages: list[str] = []
    report = export_bundle(checkpoint, tmp_path / "bundle", precision="int8", note=notes.append, say=stages.append)
    assert report.passed
    bundle = Bundle(tmp_path / "bundle")
    assert bundle.passport.quantization is not None
    assert bundle.passport.quantization.excluded == [FC2]
    assert len(notes) == 1
    assert notes[0].endswith(f"weights: {FC2}")
    assert stages.count("rounding the weights to int8") == 2
    assert stages.count("measuring which weights spoil it") == 1
    names = ir.load(bundle.path(ENCODE)).graph.initializers.keys()
    assert f"{FC2}.T" in names
    assert not any(name.startswith(f"{FC2}.int8") for name in names)


def test_the_weight_that_moves_the_output_most_comes_first_and_the_model_is_left_alone(checkpoint: Path) -> None:
    model = outlier(load_checkpoint(checkpoint), 2**12)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, tensor in model.named_parameters() if tensor.ndim == 2]
    found = divergences(model, [*names, "stranger"], "int8", load_exam(TINY / "golden").tokens)
    assert found.keys() == set(names)
    assert next(iter(found)) == FC2
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    again = divergences(model, names, "int8", load_exam(TINY / "golden").tokens)
    assert again == found


def test_weights_whose_products_float16_cannot_hold_are_known(checkpoint: Path) -> None:
    cases = load_exam(TINY / "golden").tokens
    assert overflowing(load_checkpoint(checkpoint), cases) == []
    model = outlier(load_checkpoint(checkpoint), 2**20)
    assert overflowing(model, cases) == [FC2.replace("fc2", "fc1"), FC2]
    assert divergences(model, [FC2], "fp16", cases) == {FC2: float("inf")}


@pytest.mark.usefixtures("untraced")
def test_activations_beyond_float16_do_not_become_infinite_in_silence(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(outlier(restore_model(Bundle(TINY)), 2**20), tmp_path / "checkpoint")
    stages: list[str] = []
    export_bundle(checkpoint, tmp_path / "bundle", precision="fp16", say=stages.append)
    assert stages.count("rounding the weights to fp16") == 1  # the processor's ONNX Runtime would not have told
    quantization = Bundle(tmp_path / "bundle").passport.quantization
    assert quantization is not None
    assert quantization.excluded == [FC2.replace("fc2", "fc1"), FC2]


# What is refused


@pytest.mark.usefixtures("untraced")
def test_what_does_not_pass_is_refused_in_one_line_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(THRESHOLDS["kl_mean"].limits, "int4", 1e-12)
    stages: list[str] = []
    with pytest.raises(ExportError) as refused:
        export_bundle(checkpoint, tmp_path / "bundle", precision="int4", say=stages.append)
    line = str(refused.value)
    assert line.startswith("int4 does not pass, with 5 of 23 weights in float32 neither: ")
    assert stages.count("rounding the weights to int4") == 5  # with 0, 1, 2, 4 and 5 of them
    assert "kl_mean is " in line
    assert "at most 1e-12 is asked" in line
    assert "\n" not in line
    assert list(tmp_path.iterdir()) == []
    assert stages.count("tracing encode") + stages.count("loading encode") == 1
    assert stages.count("measuring which weights spoil it") == 1


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"precision": "int8", "opset": 18}, "int8 needs opset 21 or newer, not 18"),
        ({"precision": "int4", "layout": "transformersjs"}, "the layout of transformers.js is written in fp32 alone"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(tmp_path: Path, options: dict[str, Any], line: str) -> None:
    stages: list[str] = []
    with pytest.raises(ExportError, match=line):
        export_bundle(tmp_path / "nowhere", tmp_path / "bundle", say=stages.append, **options)
    assert stages == []


def test_a_rounded_model_is_not_restored_and_not_explained(bundles: Callable[[Precision], Bundle]) -> None:
    with pytest.raises(ExportError, match="is in int8: only fp32 holds the model's own weights"):
        restore_model(bundles("int8"))


# What is damaged does not pass


def damaged(bundle: Bundle, folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Bundle:
    """A copy of `bundle` with other scales and integers, signed again. `change` sees what is in the blob by name."""
    shutil.copytree(bundle.folder, folder)
    blob = np.memmap(folder / WEIGHTS, np.uint8, "r+")
    views = {}
    for verb in VERBS:
        for name, value in ir.load(folder / GRAPH_FILES[verb]).graph.initializers.items():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.offset is not None and tensor.length is not None:
                raw = blob[tensor.offset : tensor.offset + tensor.length]
                views[name] = raw.view(tensor.dtype.numpy()).reshape(tensor.shape.numpy())
    change(views)
    blob.flush()
    passport = bundle.passport
    write_passport(folder, msgspec.structs.replace(passport, files=record_files(folder, passport.files)))
    return Bundle(folder)


def scales_doubled(constants: dict[str, np.ndarray]) -> None:
    constants["decoder.layers.0.feed_forward.fc2.weight.scale"][:] *= 2


def scales_of_the_next_word(constants: dict[str, np.ndarray]) -> None:
    scales = constants["encoder.embedding.tokens.weight.scale"]
    scales[:] = np.roll(scales, 1, 0)


def integers_mirrored(constants: dict[str, np.ndarray]) -> None:
    (name,) = (name for name in constants if name.startswith("decoder.layers.0.feed_forward.fc2.weight.int"))
    constants[name][:] = constants[name][::-1].copy()


@pytest.mark.parametrize("fault", [scales_doubled, scales_of_the_next_word, integers_mirrored])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_damaged_scales_and_integers_do_not_pass(
    bundles: Callable[[Precision], Bundle],
    tmp_path: Path,
    fault: Callable[[dict[str, np.ndarray]], None],
    precision: Precision,
) -> None:
    report = sit_exam(damaged(bundles(precision), tmp_path / "damaged", fault))
    assert not report.passed, [(figure.name, figure.value) for figure in report.figures]
    assert [figure.name for figure in report.figures if not figure.passed]


@pytest.mark.parametrize("change", [4, -4])
def test_a_zero_point_that_is_off_does_not_pass(
    bundles: Callable[[Precision], Bundle], tmp_path: Path, change: int
) -> None:
    bundle, folder = bundles("int8"), tmp_path / "damaged"
    shutil.copytree(bundle.folder, folder)
    for verb in VERBS:
        graph = ir.load(folder / GRAPH_FILES[verb])
        (zero,) = (value for value in graph.graph.initializers.values() if value.dtype == ir.DataType.UINT8)
        zero.const_value = ir.tensor(np.array(128 + change, np.uint8), name=zero.name)
        ir.save(graph, folder / GRAPH_FILES[verb])
    passport = bundle.passport
    write_passport(folder, msgspec.structs.replace(passport, files=record_files(folder, passport.files)))
    assert not sit_exam(Bundle(folder)).passed


# The command, and the deployed side without torch


def toolkit(*arguments: str | Path, torch_free: bool = False) -> "subprocess.CompletedProcess[str]":
    """`toolkit`, where asked for with nothing that was not deployed."""
    hidden = ["torch", "onnx", "onnx_ir", "transformers"] if torch_free else []
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden})); sys.argv[0] = 'toolkit'; "
        "from toolkit.__main__ import run; run()"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize("precision", LOWER)
def test_from_checkpoint_to_words_by_the_command(
    checkpoint: Path, coarse: Path, tmp_path: Path, precision: Precision
) -> None:
    bundle = tmp_path / "bundle"
    made = toolkit("export", coarse if precision == "int4" else checkpoint, bundle, "--precision", precision, "--json")
    assert made.returncode == 0, made.stderr
    said = json.loads(made.stdout)
    assert said["passed"] is True
    assert said["quantization"] == json.loads((bundle / "bundle.json").read_text("utf-8"))["quantization"]
    cases = [case for case in load_exam(bundle / "golden").tokens if case.config.num_beams == 1]
    (tmp_path / "input.txt").write_text("".join(f"{case.text}\n" for case in cases), "utf-8")
    ran = toolkit("run", "--bundle", bundle, "--beam", "1", "--file", tmp_path / "input.txt", torch_free=True)
    assert ran.returncode == 0, ran.stderr
    pairs = list(zip(ran.stdout.splitlines(), cases, strict=True))
    equal = sum(line == case.translation for line, case in pairs)
    assert equal >= {"fp16": 1, "int8": 1, "int4": 0.7}[precision] * len(cases)
    verified = toolkit("verify", bundle, torch_free=True)
    assert verified.returncode == 0, verified.stdout
    assert "token_agreement" in verified.stdout
    shown = toolkit("inspect", bundle, torch_free=True)
    words = {
        "fp16": "fp16",
        "int8": "int8, a scale for each row",
        "int4": "int4, a scale for each block of 32",
    }
    assert words[precision] in shown.stdout
    explained = toolkit("verify", bundle, "--explain")
    assert explained.returncode == 1
    assert "there is nothing to explain" in explained.stderr.splitlines()[-1]


@pytest.mark.parametrize("runtime", ["openvino", "reference"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_runtime_that_lacks_the_operators_says_so_in_one_line(
    bundles: Callable[[Precision], Bundle], precision: Precision, runtime: str
) -> None:
    done = toolkit("verify", bundles(precision).folder, "--runtime", runtime)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"Error: {runtime} ")
    assert "ONNX Runtime's own operators" in error

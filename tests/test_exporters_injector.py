"""The examiner is examined: every fault that the injector plants fails on the lowest rung that can see it.

And good bundles never fail; `make examiner` tries more of these.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner
from examiner_table import PAGE, rows_in
from exporters_support import VARIANTS, Export
from injector_files_support import nudge, weight_places
from injector_support import FAULTS, PASSED, REFUSED, plant, verdict
from runtime_support import tiny_copy

from exporters.export import fresh_exam
from runtime.bundle import Bundle
from runtime.contract import graph_specs
from runtime.exam import Exam
from runtime.parity.candidate import Candidate
from runtime.parity.graphs import graph_rung
from runtime.session import OrtBackend
from runtime.tokenizer import open_tokenizer
from runtime.verify import sit_bundle
from toolkit.cli import main


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_on_the_lowest_rung_that_can_see_it(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    found = verdict(plant(fault, tmp_path / "bundle"))
    assert found.rung == fault.rung, found.message
    assert re.search(fault.message, found.message), found.message
    assert "\n" not in found.message


def test_there_are_enough_faults_and_every_rung_sees_one() -> None:
    assert len(FAULTS) >= 28
    assert {fault.rung for fault in FAULTS.values()} == {REFUSED, *"012345"}


# Single weights

KEY_BIAS = re.compile(r"encoder\.layers\.\d\.self_attention\.k_proj\.bias")
"""Adds the same to all scores of a query, which a softmax does not see; in the decoder keys come out as caches."""


class Nudge(NamedTuple):
    """One element of one tensor."""

    tensor: str
    place: tuple[int, ...]
    sign: int


def nudges(count: int, seed: int) -> list[Nudge]:
    """Random elements; no tensor has a second one before all have one."""
    random = np.random.default_rng(seed)
    names = [name for name in sorted(weight_places()) if not KEY_BIAS.fullmatch(name)]
    chosen = np.concatenate([random.permutation(len(names)) for _ in range(count // len(names) + 1)])[:count]
    return [
        Nudge(
            names[index],
            tuple(int(random.integers(size)) for size in weight_places()[names[index]][1]),
            int(random.choice([-1, 1])),
        )
        for index in chosen
    ]


def judged(folder: Path, exam: Exam) -> list[str]:
    """What the rung of graphs says about the bundle in `folder`."""
    bundle = Bundle(folder)
    candidate = Candidate(OrtBackend(bundle, threads=1), bundle.passport, open_tokenizer(folder), "as tested")
    return graph_rung(exam.graphs, candidate, graph_specs(bundle.passport.dims))[0].problems


@pytest.mark.parametrize("nudged", nudges(40, seed=11), ids=lambda nudged: f"{nudged.tensor}{list(nudged.place)}")
def test_a_single_weight_that_is_a_hundredth_off_fails(tmp_path: Path, exam: Exam, nudged: Nudge) -> None:
    folder = tiny_copy(tmp_path / "bundle")
    nudge(nudged.tensor, nudged.place, nudged.sign)(folder)
    assert judged(folder, exam)


def test_a_bias_of_the_encoder_s_keys_changes_nothing_that_comes_out(tmp_path: Path, exam: Exam) -> None:
    """Why the elements above are not drawn from these."""
    folder = tiny_copy(tmp_path / "bundle")
    for name, (_, shape) in weight_places().items():
        if KEY_BIAS.fullmatch(name):
            nudge(name, (shape[0] // 2,), 1)(folder)
    assert judged(folder, exam) == []


# Good bundles


def test_a_bundle_without_a_fault_passes(tmp_path: Path) -> None:
    assert verdict(tiny_copy(tmp_path / "bundle")).rung == PASSED


@pytest.mark.parametrize("name", VARIANTS)
def test_a_good_bundle_passes_an_exam_of_another_seed(exports: Callable[[str], Export], name: str) -> None:
    export = exports(name)
    exam = fresh_exam(export.checkpoint, export.bundle, seed=30)
    report = sit_bundle(export.bundle, OrtBackend(export.bundle, threads=1), exam)
    assert [problem for rung in report.rungs for problem in rung.problems] == []
    assert report.passed


# The page


def test_the_page_shows_the_faults_and_rungs_of_the_table() -> None:
    shown = {name: rung for name, rung, *_ in rows_in(PAGE.read_text("utf-8"), "faults")}
    assert shown == {name: fault.rung for name, fault in FAULTS.items()}


def test_the_page_shows_good_bundles_of_every_kind_that_passed() -> None:
    shown = {name: verdict for name, verdict, _ in rows_in(PAGE.read_text("utf-8"), "good")}
    assert len(shown) >= 20
    assert set(shown.values()) == {PASSED}


# The command


@pytest.mark.parametrize(
    "name",
    [
        "weights.bin cut short",
        "output missing",
        "exam emptied",
        "bias dropped",
        "causal mask of 8 tokens",
        "tokenizer with a permuted vocabulary",
        "int8 bundle, activations scaled by the batch",
    ],
)
def test_verify_names_the_rung_and_exits_with_1(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    folder = plant(fault, tmp_path / "bundle")
    arguments = ["verify", str(folder), "--optimization", "all", "--threads", "1"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    if fault.rung == REFUSED:
        (line,) = result.stderr.splitlines()
        assert re.fullmatch(f"Error: .*{fault.message}.*", line)
    else:
        said = " ".join(result.stdout.split())
        assert re.findall(r"rung (\d): ", said)[0] == fault.rung
        assert re.search(f"rung {fault.rung}: .*{fault.message}", said)

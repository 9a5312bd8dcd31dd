"""The examiner is examined: `python tests/examiner_table.py` plants every fault, and lets good bundles sit an exam.

Writes both tables into docs/parity.md; exit code 1 where a fault was not seen as it should be, or a good bundle failed.
"""

import re
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from exporters_support import random_model, write_checkpoint
from injector_support import FAULTS, PASSED, REFUSED, Finding, plant, verdict

from exporters.errors import ExportError
from exporters.export import export_bundle, fresh_exam
from exporters.golden import special_ids
from exporters.reference import TorchBackend
from models.config import ModelConfig
from models.transformer import Transformer
from runtime.bundle import Bundle
from runtime.generation import GenerationConfig, generate
from runtime.parity import Report
from runtime.parity.tolerance import FACTOR, worst
from runtime.session import OrtBackend
from runtime.verify import sit_bundle

PAGE = Path(__file__).parent.parent / "docs/parity.md"
FAULT_COLUMNS = ("fault", "rung", "the first sentence of the verdict")
GOOD_COLUMNS = ("configuration", "verdict", "worst ratio")
CONFIGURATIONS = 20
WIDEST = 120
"""Most characters of a message in the table."""
SETTINGS: dict[str, Sequence[Any]] = {
    "norm": ("pre", "post"),
    "positions": ("sinusoidal", "sinusoidal-halves", "learned"),
    "activation_function": ("relu", "gelu", "silu"),
    "encoder_layers": (1, 2, 3),
    "decoder_layers": (1, 2, 3),
    "encoder_attention_heads": (1, 2, 3, 4),
    "decoder_attention_heads": (1, 2, 3, 4),
    "encoder_ffn_dim": (24, 64, 96),
    "decoder_ffn_dim": (24, 64, 96),
    "max_positions": (20, 33),
    "share_embeddings": (True, False),
    "tie_output": (True, False),
    "output_bias": (True, False),
    "scale_embedding": (True, False),
    "opset": (18, 23),
}
"""Each value comes as often as the others."""


class Configuration(NamedTuple):
    """A good model: its settings, and a seed with which its outputs vary."""

    config: ModelConfig
    opset: int
    seed: int

    def __str__(self) -> str:
        config = self.config
        shared = [
            *(["shared embeddings"] if config.share_embeddings else ["own source words"]),
            *(["tied output"] if config.tie_output else []),
            *(["output bias"] if config.output_bias else []),
            *(["scaled"] if config.scale_embedding else []),
        ]
        return (
            f"{config.norm}-norm, {config.positions}, {config.activation_function}, "
            f"{config.encoder_layers}+{config.decoder_layers} layers, "
            f"{config.encoder_attention_heads}+{config.decoder_attention_heads} heads, "
            f"{', '.join(shared)}; opset {self.opset}, seed {self.seed}"
        )


def configurations(count: int, seed: int = 22) -> list[Configuration]:
    """So many random configurations, in which no setting has a favourite value."""
    random = np.random.default_rng(seed)
    columns = {name: random.permutation(np.resize(np.arange(len(values)), count)) for name, values in SETTINGS.items()}
    found = []
    for row in range(count):
        settings = {name: SETTINGS[name][places[row]] for name, places in columns.items()}
        opset = settings.pop("opset")
        source = None if settings["share_embeddings"] else 50
        config = ModelConfig(vocab_size=61, source_vocab_size=source, d_model=48, **settings)
        found.append(Configuration(config, opset, lively_seed(config, row)))
    return found


def lively_seed(config: ModelConfig, first: int) -> int:
    """The first seed whose model says different things about different sentences, and not one word for ever."""
    return next(seed for seed in range(first, first + 100) if is_lively(calm_model(config, seed)))


def calm_model(config: ModelConfig, seed: int) -> Transformer:
    """A random model that is fit for several layers: in these, strong attention and constant vectors drown the rest."""
    model = random_model(config, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("v_proj.weight"):
                parameter.mul_(0.3)
            if name.endswith("fc2.weight"):
                parameter.sub_(parameter.mean(1, keepdim=True))
    return model


def is_lively(model: Transformer) -> bool:
    sources = [[5, 6, 7, 8, 3], [10, 9, 8, 7, 6, 5, 3]]
    limit = model.config.max_positions
    backend, special = TorchBackend(model), special_ids(model.config)
    found = generate(backend, sources, GenerationConfig(max_length=limit), special, limit)
    one, other = (best.ids for (best,) in found)
    return one != other and min(len(set(one)), len(set(other))) >= 4


def fault_rows() -> list[tuple[str, Finding]]:
    """Every fault, and what is said about it."""
    rows = []
    for count, (name, fault) in enumerate(FAULTS.items(), 1):
        with tempfile.TemporaryDirectory() as folder:
            found = verdict(plant(fault, Path(folder) / "bundle"))
            message = found.message.replace(f"{folder}/", "")
        right = found.rung == fault.rung and re.search(fault.message, message)
        say(
            f"fault {count}/{len(FAULTS)}: {name}: {found.rung}{'' if right else f', EXPECTED {fault.rung}: {message}'}"
        )
        rows.append((name, Finding(found.rung, message)))
    return rows


def good_rows() -> list[tuple[str, Finding]]:
    """Every good configuration, and what is said about its bundle; the worst ratio stands where a message would."""
    rows = []
    for count, made in enumerate(configurations(CONFIGURATIONS), 1):
        with tempfile.TemporaryDirectory() as folder:
            found = good_finding(made, Path(folder), seed=100 + count)
        say(f"good bundle {count}/{CONFIGURATIONS}: {made}: {found.rung} {found.message}")
        rows.append((str(made), found))
    return rows


def good_finding(made: Configuration, folder: Path, seed: int) -> Finding:
    """What a fresh exam of `seed` says about a bundle that is exported into `folder`."""
    checkpoint = write_checkpoint(calm_model(made.config, made.seed), folder / "checkpoint")
    try:
        export_bundle(checkpoint, folder / "bundle", opset=made.opset)
    except ExportError as error:
        return Finding(REFUSED, str(error))
    bundle = Bundle(folder / "bundle")
    report = sit_bundle(bundle, OrtBackend(bundle, threads=1), fresh_exam(checkpoint, bundle, seed))
    failed = [f"rung {rung.rung}: {rung.problems[0]}" for rung in report.rungs if not rung.passed]
    return Finding(failed[0] if failed else PASSED, f"{worst_ratio(report):.2f}")


def worst_ratio(report: Report) -> float:
    """The largest distance in units of PyTorch's own, over all outputs and all positions of the chains."""
    chain = FACTOR * worst(report.drift) / report.drift_tolerance
    return worst([chain, *(result.ratio for result in report.tensors)])


def table(columns: Sequence[str], rows: Sequence[tuple[str, Finding]]) -> str:
    """The rows as Markdown."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {name} | {cell(found.rung)} | {cell(found.message)} |" for name, found in rows]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """`text` on one line, shortened between words."""
    return textwrap.shorten(text, WIDEST, placeholder=" …").replace("|", "\\|")


def rows_in(page: str, marker: str) -> list[list[str]]:
    """The cells of the table between the comments `marker` in `page`."""
    between = page.partition(f"<!-- {marker} -->\n")[2].partition(f"<!-- /{marker} -->")[0]
    return [line.strip("| ").split(" | ") for line in between.splitlines()[2:]]


def write(marker: str, text: str) -> None:
    """Put `text` between the comments `marker` of the page."""
    page = PAGE.read_text("utf-8")
    begin, end = f"<!-- {marker} -->\n", f"<!-- /{marker} -->"
    PAGE.write_text(page.split(begin)[0] + begin + text + end + page.split(end)[1], "utf-8")


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main() -> int:
    faults = fault_rows()
    write("faults", table(FAULT_COLUMNS, faults))
    good = good_rows()
    write("good", table(GOOD_COLUMNS, good))
    unseen = [
        name
        for name, found in faults
        if found.rung != FAULTS[name].rung or not re.search(FAULTS[name].message, found.message)
    ]
    refused = [name for name, found in good if found.rung != PASSED]
    say(f"{len(unseen)} of {len(faults)} faults not seen, {len(refused)} of {len(good)} good bundles failed")
    return 1 if unseen or refused else 0


if __name__ == "__main__":
    sys.exit(main())

"""What sound and damaged weights of lower precision give: `python tests/gate_table.py BUNDLE` prints it as Markdown.

`make gate` writes the table of the shipped model into docs/parity.md; the thresholds lie between the two.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from exporters.reference import TorchBackend
from exporters.restore import restore_model
from models.transformer import Transformer
from runtime.bundle import EXAM_ROLE, Bundle
from runtime.contract import graph_specs
from runtime.exam import load_exam
from runtime.parity import sit
from runtime.parity.candidate import Candidate
from runtime.parity.gate import PRECISIONS, THRESHOLDS, UNKNOWN, Threshold
from runtime.tokenizer import open_tokenizer

Rounding = Callable[[Tensor], Tensor]
Damage = Callable[[Transformer], object]
PAGE = Path(__file__).parent.parent / "docs/parity.md"


def integers(bits: int, block: int | None = None) -> Rounding:
    """Symmetric integers with one scale a row, or one for each `block` of a row."""
    most = 2 ** (bits - 1) - 1

    def rounded(weight: Tensor) -> Tensor:
        parts = weight.reshape(weight.shape[0], -1, block or weight.shape[1])
        scale = parts.abs().amax(2, keepdim=True) / most
        near: Tensor = (parts / scale).round() * scale
        return near.reshape(weight.shape)

    return rounded


ROUNDINGS: dict[str, tuple[str, Rounding]] = {
    "fp16": ("fp16", lambda weight: weight.half().float()),
    "bf16, 8 bits of mantissa": ("fp16", lambda weight: weight.bfloat16().float()),
    "int8, a scale a row": ("int8", integers(8)),
    "int6, a scale a row": ("int8", integers(6)),
    "int4, a scale for 32": ("int4", integers(4, 32)),
    "int4, a scale a row": ("int4", integers(4)),
}
SOUND = ("fp16", "int8, a scale a row", "int4, a scale for 32")
# To the type checker what a module list or a module holds may be a tensor or a module.
DAMAGES: dict[str, Damage] = {
    "one `fc2` doubled": lambda model: model.decoder.layers[1].feed_forward.fc2.weight.mul_(2),  # type: ignore[union-attr,operator]
    "one head of cross-attention lost": lambda model: (
        model.decoder.layers[1]
        .cross_attention.out_proj.weight[  # type: ignore[union-attr,index]
            :, : model.config.decoder_head_dim
        ]
        .zero_()
    ),
    "one norm scaled by 1.5": lambda model: model.encoder.layers[1].self_residual.norm.weight.mul_(1.5),  # type: ignore[union-attr,operator]
}


def row(name: str, precision: str, rounding: Rounding, damage: Damage | None, bundle: Bundle) -> str:
    """One line of the table."""
    model = copy.deepcopy(restore_model(bundle))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(rounding(parameter))
        if damage is not None:
            damage(model)
    passport = msgspec.structs.replace(bundle.passport, precision=precision)
    candidate = Candidate(TorchBackend(model), passport, open_tokenizer(bundle.folder), name)
    specs = graph_specs(bundle.passport.dims)
    found = sit(load_exam(bundle.path(EXAM_ROLE)), candidate, specs, specs).figures
    verdict = "pass" if all(figure.passed for figure in found) else "FAIL"
    cells = [f"{figure.value:.2g}" if figure.value < 10 else f"{figure.value:.1f}" for figure in found]
    return f"| {name} | {precision} | {' | '.join(cells)} | {verdict} |\n"


def table(bundle: Bundle) -> str:
    lines = [
        f"| weights | judged as | {' | '.join(UNKNOWN)} | distance | invariance | verdict |\n",
        f"|{'---|' * (5 + len(UNKNOWN))}\n",
    ]
    for name, (precision, rounding) in ROUNDINGS.items():
        lines.append(row(name, precision, rounding, None, bundle))
    for name in SOUND:
        precision, rounding = ROUNDINGS[name]
        lines += [row(f"{name}; {what}", precision, rounding, damage, bundle) for what, damage in DAMAGES.items()]
    return "".join(lines)


def limits() -> str:
    """The table of thresholds."""
    head = f"| threshold | {' | '.join(PRECISIONS[1:])} | why |\n|{'---|' * 5}\n"
    return head + "".join(
        f"| `{name}` | {' | '.join(f'{bound(threshold)} {limit:g}' for limit in threshold.limits.values())} "
        f"| {threshold.reason} |\n"
        for name, threshold in THRESHOLDS.items()
    )


def bound(threshold: Threshold) -> str:
    return "≥" if threshold.at_least else "≤"


def main() -> None:
    text = PAGE.read_text("utf-8")
    for name, made in (("thresholds", limits()), ("gate", table(Bundle(Path(sys.argv[1]))))):
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        text = text.split(begin)[0] + begin + made + end + text.split(end)[1]
        sys.stdout.write(made)
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()

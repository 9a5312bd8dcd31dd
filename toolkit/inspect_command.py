"""`toolkit inspect`: what a bundle or a checkpoint holds, and which shapes flow through the model."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .errors import needs
from .options import json_option

if TYPE_CHECKING:
    from models.trace import TracePoint
    from models.transformer import Transformer
    from runtime.tokenizer import Tokenizer

CHECKPOINT = "model.json"
"""By which a checkpoint is known where torch, and hence `models.checkpoint`, cannot be imported."""


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path), metavar="BUNDLE|CHECKPOINT")
@click.option(
    "--shapes", "text", metavar="TEXT", help="Run the model on TEXT and print the shapes of what flows through it."
)
@json_option
def inspect_command(*, path: Path, text: str | None, as_json: bool) -> None:
    """Show the passport and the graphs of a bundle, or the settings of a checkpoint.

    With --shapes the model runs in PyTorch, in training and in inference, and the shapes are read off its tensors.
    """
    from runtime.bundle import PASSPORT, Bundle

    is_bundle = (path / PASSPORT).exists()
    if not is_bundle and not (path / CHECKPOINT).exists():
        raise click.ClickException(f"{path} is neither bundle nor checkpoint: it has no {PASSPORT} and no {CHECKPOINT}")
    if text is not None:
        _shapes(path, text, is_bundle=is_bundle, as_json=as_json)
    elif is_bundle:
        from .render import show_bundle

        show_bundle(Bundle(path), as_json=as_json)
    else:
        with needs("export"):
            from models.checkpoint import load_checkpoint

        from .render import show_checkpoint

        show_checkpoint(path, load_checkpoint(path), as_json=as_json)


def _shapes(path: Path, text: str, *, is_bundle: bool, as_json: bool) -> None:
    with needs("export"):
        from models.checkpoint import load_checkpoint
        from runtime.bundle import Bundle
        from runtime.tokenizer import open_tokenizer

        from .render import show_shapes

        if is_bundle:
            from exporters.restore import restore_model

            model = restore_model(Bundle(path))
        else:
            model = load_checkpoint(path)
    training, inference = trace_text(model, open_tokenizer(path), text)
    show_shapes(training, inference, as_json=as_json)


def trace_text(
    model: "Transformer", tokenizer: "Tokenizer", text: str
) -> tuple[list["TracePoint"], list["TracePoint"]]:
    """The points of a training pass and of one inference step for `text` and the model's own greedy output."""
    import torch

    from exporters.golden import special_ids
    from exporters.reference import TorchBackend
    from models.data import Pair, collate
    from models.trace import trace_inference, trace_training
    from runtime.generation import GenerationConfig, generate

    source = tokenizer.encode(text)
    config = GenerationConfig(max_length=min(3 * len(source) + 20, model.config.max_positions))
    # The model's own ids: a vocabulary alone does not say which token an imported model starts from.
    special = special_ids(model.config)
    ((best,),) = generate(TorchBackend(model), [source], config, special, model.config.max_positions)
    batch = collate([Pair(source, best.ids)], model.config)
    with torch.no_grad():
        training = trace_training(model, batch.source_ids, batch.source_mask, batch.target_ids, batch.labels)
        inference = trace_inference(model, batch.source_ids, batch.source_mask, batch.target_ids)
    return training, inference

"""`toolkit export`: from a model to a verified bundle."""

from pathlib import Path
from typing import Literal

import click

from .errors import needs
from .options import json_option, sentences_option


@click.command("export")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--opset",
    type=click.IntRange(18, 23),
    default=23,
    show_default=True,
    help="Of the graphs. From 23 on attention is one operator, before it is spelt out for older runtimes.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "int8", "int4"]),
    default="fp32",
    show_default=True,
    help="Of weights and products. Below fp32 the bundle is judged by its words; weights that spoil them stay in fp32.",
)
@click.option(
    "--layout",
    type=click.Choice(["optimum", "transformersjs"]),
    default="optimum",
    show_default=True,
    help="Whose names the files have. With transformersjs there are graphs, weights and a tokenizer for that one, too.",
)
@sentences_option
@click.option("--force", is_flag=True, help="Replace the bundle that stands there.")
@json_option
def export_command(
    *,
    folder: Path,
    bundle: Path,
    opset: int,
    precision: Literal["fp32", "fp16", "int8", "int4"],
    layout: Literal["optimum", "transformersjs"],
    sentences: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Export the model in FOLDER to a BUNDLE: three ONNX graphs over one file of weights, and the exam they passed.

    FOLDER is a checkpoint, or what another library saved: MarianMT (OPUS-MT), M2M100 (NLLB), BART or mBART of
    transformers, or a torch.nn.Transformer with a transformer.toml that describes it.

    The graphs are checked, compared with PyTorch over many sizes that were not traced, and sit their exam. When one of
    these fails there is no bundle.
    """
    with needs("export"):
        from exporters.export import export_bundle
        from runtime.bundle import read_passport
        from runtime.environment import environment

        from .render import report_json, show_report, stages
    notes: list[str] = []
    with stages() as say:
        report = export_bundle(
            folder,
            bundle,
            opset=opset,
            precision=precision,
            layout=layout,
            sentences=sentences,
            force=force,
            say=say,
            note=notes.append,
        )
    for line in notes:
        click.echo(line, err=True)
    if as_json:
        quantization = read_passport(bundle).quantization
        click.echo(report_json(report, bundle, environment=environment(), quantization=quantization))
    else:
        show_report(report, tensors=False)
        size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
        click.echo(f"{bundle}: {size / 1e6:.1f} MB. Try: toolkit run --bundle {bundle} TEXT")

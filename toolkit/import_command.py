"""`toolkit import`: from a model that another library saved to a checkpoint of ours."""

from pathlib import Path

import click
import msgspec

from .errors import needs
from .options import json_option, sentences_option


@click.command("import")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("checkpoint", type=click.Path(path_type=Path))
@sentences_option
@click.option("--force", is_flag=True, help="Replace the checkpoint that stands there.")
@json_option
def import_command(*, folder: Path, checkpoint: Path, sentences: Path | None, force: bool, as_json: bool) -> None:
    """Convert the model in FOLDER, which another library saved, to a CHECKPOINT of ours. Nothing is downloaded or run.

    `toolkit export` reads such a folder by itself; a checkpoint is for training on, or for looking into.
    """
    with needs("export"):
        from exporters.conversion import convert_folder

        from .render import stages
    notes: list[str] = []
    with stages() as say:
        config = convert_folder(folder, checkpoint, sentences=sentences, force=force, say=say, note=notes.append)
    for line in notes:
        click.echo(line, err=True)
    if as_json:
        click.echo(msgspec.json.encode({"checkpoint": str(checkpoint), "model": config}))
    else:
        click.echo(f"{checkpoint}. Try: toolkit export {checkpoint} BUNDLE")

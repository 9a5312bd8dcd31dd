"""`toolkit run`: translate lines of text with a bundle."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from .lines import Line, live_windows, numbered, windows
from .options import bundle_option, provider_options, search_options

if TYPE_CHECKING:
    from runtime.generation import GenerationConfig
    from runtime.translator import Translation, Translator


class Outcome(NamedTuple):
    """What became of one line: a translation or a reason why there is none."""

    line: int
    source: str
    translation: "Translation | None"
    error: str = ""


@click.command("run")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--file", "file", type=click.Path(path_type=Path), metavar="FILE", help="Translate the lines of FILE.")
@bundle_option
@search_options
@click.option(
    "--n-best", type=click.IntRange(min=1), default=1, metavar="N", help="Print the N best outputs of each line."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@click.option(
    "--source-language",
    metavar="CODE",
    help="What the text is written in, for a multilingual bundle.  [default: the bundle's]",
)
@click.option(
    "--target-language",
    metavar="CODE",
    help="What to translate into, for a multilingual bundle.  [default: the bundle's]",
)
@provider_options
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most source tokens in a batch, beams counted.  [default: 4096]",
)
def run_command(
    *,
    texts: tuple[str, ...],
    file: Path | None,
    bundle: Path,
    n_best: int,
    as_json: bool,
    source_language: str | None,
    target_language: str | None,
    provider: Any,
    threads: int | None,
    allow_fallback: bool,
    batch_tokens: int | None,
    **wishes: Any,
) -> None:
    """Translate each TEXT, the lines of a file, or the lines of standard input as they come.

    Output lines stand in the order of the input. A line that cannot be translated leaves an empty line, a message on
    standard error, and exit code 1; the others go on. With --n-best above 1 each output has a line of its own: number
    of the input line, score, text, separated by tabs; a line without outputs has none. What is not given is as the
    bundle has it.

    \b
    toolkit run "我爱猫。"
    toolkit run --file input.txt --beam 4 > output.txt
    cat input.txt | toolkit run --json
    """  # noqa: D301 - click reads the backspace, not its name
    if texts and file:
        raise click.UsageError("give TEXT or --file, not both")
    from runtime.translator import BATCH_TOKENS, Translator

    translator = Translator.open(
        bundle,
        provider,
        threads,
        allow_fallback=allow_fallback,
        source_language=source_language,
        target_language=target_language,
    )
    if allow_fallback and translator.provider != provider:
        click.echo(f"{provider} cannot be used here: running on {translator.provider}", err=True)
    config = search_config(translator.defaults, n_best, wishes)
    failed = False
    with _progress(file) as shown:
        for window in _windows(texts, file):
            for outcome in translate_window(translator, window, config, batch_tokens or BATCH_TOKENS):
                _print(outcome, as_json=as_json, n_best=n_best)
                if outcome.error:
                    failed = True
                    click.echo(f"line {outcome.line}: {outcome.error}", err=True)
            sys.stdout.flush()
            shown(len(window))
    if failed:
        raise click.exceptions.Exit(1)


def search_config(defaults: "GenerationConfig", n_best: int, wishes: dict[str, Any]) -> "GenerationConfig":
    """The bundle's way to search, with what `search_options` gave."""
    import msgspec

    from runtime.generation_config import SAMPLING_OPTIONS, GenerationConfig

    chosen = {name: value for name, value in wishes.items() if value is not None}
    sample, beams = chosen.get("do_sample", defaults.do_sample), chosen.get("num_beams")
    meaningless = [f"--{name.replace('_', '-')}" for name in SAMPLING_OPTIONS if name in chosen and not sample]
    if meaningless:
        raise click.UsageError(f"without --sample there is no use for {', '.join(meaningless)}")
    if beams is None:
        # To sample is to follow single outputs, unless beams are asked for; a search needs as many as are wanted.
        beams = 1 if chosen.get("do_sample") else max(defaults.num_beams, 1 if sample else n_best)
    if n_best > beams and not (sample and beams == 1):
        raise click.UsageError(f"--n-best {n_best} is more than --beam {beams}")
    if not sample:
        chosen |= {name: getattr(GenerationConfig(), name) for name in SAMPLING_OPTIONS}
    return msgspec.structs.replace(defaults, **{**chosen, "num_beams": beams, "num_return_sequences": n_best})


def translate_window(
    translator: "Translator", window: Iterable[Line], config: "GenerationConfig", batch_tokens: int
) -> Iterator[Outcome]:
    """Outcomes of the lines of `window`, in their order."""
    from runtime.errors import RuntimeFault

    texts: list[str] = []
    errors: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    lines = list(window)
    for place, line in enumerate(lines):
        try:
            texts.append(line.content.decode("utf-8"))
            if texts[-1].strip():
                ids[place] = translator.encode(texts[-1])
        except UnicodeDecodeError as error:
            texts.append("")
            errors[place] = f"not UTF-8: byte 0x{line.content[error.start]:02x} at column {error.start + 1}"
        except RuntimeFault as error:
            errors[place] = str(error)
    found = dict(zip(ids, translator.generate(list(ids.values()), config, batch_tokens=batch_tokens), strict=True))
    for place, line in enumerate(lines):
        translation = translator.translation(found[place]) if place in found else None
        yield Outcome(line.number, texts[place], translation, errors.get(place, ""))


def _windows(texts: tuple[str, ...], file: Path | None) -> Iterator[list[Line]]:
    if texts:
        yield from windows(
            Line(number, text.encode("utf-8", "surrogateescape")) for number, text in enumerate(texts, 1)
        )
    elif file:
        with file.open("rb") as stream:
            yield from windows(numbered(stream))
    elif sys.stdin is None:  # closed by the caller
        raise click.UsageError("there is no standard input: give TEXT or --file")
    else:
        if sys.stdin.isatty():
            click.echo("Type a line to translate it, Ctrl-D to end.", err=True)
        yield from live_windows(sys.stdin.buffer)


def _print(outcome: Outcome, *, as_json: bool, n_best: int) -> None:
    found = outcome.translation
    outputs = [found, *found.alternatives] if found else []
    if as_json:
        import json

        record: dict[str, object] = {"line": outcome.line, "source": outcome.source}
        if outcome.error:
            record["error"] = outcome.error
        else:
            record["text"] = found.text if found else ""
            record["score"] = found.score if found else None
            record["alternatives"] = [{"text": other.text, "score": other.score} for other in outputs[1:]]
        click.echo(json.dumps(record, ensure_ascii=False))
    elif n_best > 1:
        for output in outputs:
            click.echo(f"{outcome.line}\t{output.score:.4f}\t{output.text}")
    else:
        click.echo(found.text if found else "")


def _progress(file: Path | None) -> Any:
    """A bar over the lines of `file` where there is one and somebody looks; yields what to call with lines done."""
    # A pipe can be read only once, and results and a bar on the same screen would overwrite each other.
    if file is None or not file.is_file() or not sys.stderr.isatty() or sys.stdout.isatty():
        return nullcontext(lambda _: None)
    from .render import line_progress

    with file.open("rb") as stream:
        return line_progress(sum(1 for _ in stream))

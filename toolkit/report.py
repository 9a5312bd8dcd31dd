"""What the ladder found as one HTML file to hand on: nothing beside it, no script, no network."""

import errno
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from models.files import replacing
from runtime.bundle import WEIGHTS, Bundle, Passport
from runtime.parity.report import RUNGS, Report, SettingResult, TensorResult, TokenDifference
from runtime.parity.tolerance import FACTOR

from .charts import cache_chart, drift_chart, first_above, module_charts

TEMPLATE = "report.html.jinja"
DOCTYPE = b"<!doctype html"
"""How a page begins, in small letters."""
WORD = re.compile(r"[\u2E80-\u9FFF\uF900-\uFAFF\uFE30-\uFFEF\U00020000-\U0003FFFF]|[^\s\u2E80-\u9FFF\uF900-\uFAFF]+")
"""Between white space, or one of the signs of East Asia, which need none."""
SHOWN = 10
"""Most problems of a rung, and most differences of tokens, that are not folded."""


class Marked(NamedTuple):
    """A text cut where it parts from another."""

    before: str
    parted: str
    """One word or sign; empty where the text ends before."""
    after: str


class Passage(NamedTuple):
    """A difference of tokens, and both its texts cut where they part."""

    difference: TokenDifference
    expected: Marked
    found: Marked

    @property
    def same_words(self) -> bool:
        """Whether other ids make the same text."""
        return not (self.expected.parted or self.found.parted)


def write_report(path: Path, report: Report, bundle: Bundle, environment: Mapping[str, str], command: str) -> None:
    """Write `report` into the HTML file `path`, in one move. The same arguments give the same bytes.

    Args:
        path: A page that is there is replaced.
        report: What the ladder found.
        bundle: What was examined.
        environment: Where: names and values for people, shown in their order.
        command: The command line that repeats it, with the seed of a fresh exam.

    Raises:
        OSError: `path` cannot be written; its `filename` says so.
    """
    page = render_report(report, bundle, environment, command)
    try:
        check_place(path, bundle.folder)
        with replacing(path) as temporary:
            # A path of the command line may hold bytes that are no text.
            temporary.write_bytes(page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        # The reader knows the file that was asked for, not the temporary one.
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_place(path: Path, bundle: Path) -> None:
    """Refuse a `path` at which no page can or should be written, before anything is computed.

    What it would destroy is no page: part of the folder `bundle`, or a file of another kind.

    Raises:
        OSError: with `path` as its `filename`.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "is there, and is no file that could be replaced", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
    if path.resolve().is_relative_to(bundle.resolve()):
        raise PermissionError(errno.EPERM, "lies inside the bundle: write the page elsewhere", str(path))
    if path.exists() and not _is_page(path):
        raise FileExistsError(errno.EEXIST, "is there, and is no HTML page that could be replaced", str(path))


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(DOCTYPE)).lower() == DOCTYPE


def render_report(report: Report, bundle: Bundle, environment: Mapping[str, str], command: str) -> str:
    """The page that `write_report` writes."""
    pages = Environment(
        loader=PackageLoader("toolkit"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"number": number, "factor": factor, "needed": needed}
    exact = bundle.passport.precision == "fp32"
    modules = report.explanation.modules if report.explanation else []
    measured = report.drift or report.own_drift
    page: str = pages.get_template(TEMPLATE).render(
        report=report,
        name=bundle.folder.name or str(bundle.folder),
        verdict=verdict(report, bundle.passport.precision),
        facts=bundle_facts(bundle),
        digests=digests(bundle.passport),
        environment=environment,
        command=command,
        exact=exact,
        rung_names=RUNGS,
        tried=rungs_tried(report.settings),
        factor_allowed=FACTOR,
        drift=drift_chart(report.drift, report.own_drift, report.drift_tolerance, exact=exact) if measured else "",
        first_above=first_above(report.drift, report.drift_tolerance) if exact else None,
        odd_positions=odd_positions(report.drift),
        pictures=module_charts(modules) if modules else [],
        outputs=by_graph(report.tensors),
        caches="" if modules else cache_chart(report.tensors, exact=exact),
        passages=passages(report.differences),
        figures=report.figures,
        shown=SHOWN,
    )
    return page


def by_graph(tensors: Sequence[TensorResult]) -> dict[str, list[TensorResult]]:
    """`tensors` by graph, in the order in which the graphs come."""
    groups: dict[str, list[TensorResult]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.graph, []).append(tensor)
    return groups


def verdict(report: Report, precision: str) -> str:
    """The verdict in a sentence."""
    failed = next((rung for rung in report.rungs if not rung.passed), None)
    if failed is not None:
        reason = failed.problems[0] if failed.problems else "nothing was compared"
        return f"The lowest rung that failed is {failed.rung} ({failed.name}): {reason}"
    if not report.passed:
        return f"Only {len(report.rungs)} of {len(RUNGS)} rungs were tried."
    if precision == "fp32":
        return f"All {len(RUNGS)} rungs hold: the bundle computes what PyTorch computes, as far as float32 can tell."
    return f"All {len(RUNGS)} rungs hold: the bundle stays within the limits of its precision, {precision}."


def bundle_facts(bundle: Bundle) -> dict[str, str]:
    """What was examined."""
    passport = bundle.passport
    dims = passport.dims
    return {
        "bundle": str(bundle.folder),
        "precision": passport.precision,
        "model": f"{dims.layers} decoder layers of {dims.heads} heads, width {dims.width}, "
        f"vocabulary of {dims.vocab_size:,}, up to {dims.max_positions} positions",
        "opset, IR": f"{passport.opset}, {passport.ir_version}",
        "written by": ", ".join(f"{name} {version}" for name, version in passport.tools.items()),
    }


def digests(passport: Passport) -> dict[str, str]:
    """How to know the weights and the recorded exam again."""
    exam = f"{passport.roles.get('exam', '')}/"
    names = [name for name in passport.files if name == WEIGHTS or name.startswith(exam)]
    return {name: f"{passport.files[name].size:,} bytes, sha256 {passport.files[name].sha256}" for name in names}


def rungs_tried(settings: Iterable[SettingResult]) -> list[int]:
    """The rungs that some setting has a verdict of."""
    return sorted({int(rung) for row in settings for rung in row.rungs})


def odd_positions(drift: Sequence[float]) -> list[str]:
    """Where in a rollout there is no number: "NaN from 3 to 7"."""
    runs: list[tuple[str, int, int]] = []
    for place, error in enumerate(drift):
        if math.isfinite(error):
            continue
        word = number(error)
        if runs and runs[-1][0] == word and runs[-1][2] == place - 1:
            runs[-1] = (word, runs[-1][1], place)
        else:
            runs.append((word, place, place))
    return [f"{word} at {first}" if first == last else f"{word} from {first} to {last}" for word, first, last in runs]


def passages(differences: Sequence[TokenDifference]) -> list[Passage]:
    """The real differences first: a tie is no fault."""
    return [
        Passage(item, marked(item.expected_text, item.found_text), marked(item.found_text, item.expected_text))
        for item in sorted(differences, key=lambda item: item.tie)
    ]


def marked(text: str, other: str) -> Marked:
    """`text` cut around the first word that `other` does not share."""
    ours, theirs = list(WORD.finditer(text)), WORD.findall(other)
    for place, word in enumerate(ours):
        if place >= len(theirs) or word[0] != theirs[place]:
            return Marked(text[: word.start()], word[0], text[word.end() :])
    return Marked(text, "", "")


def number(value: float, form: str = ".2e") -> str:
    """For people: numbers that are none have names."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    return format(value, form) if value else "0"


def factor(value: float) -> str:
    """A ratio, with its decimals while these mean something."""
    return number(value, ".2f" if abs(value) < 1000 else ".1e")


def needed(error: float) -> str:
    """The tolerance that would have let `error` pass: where it is no number, none would."""
    return number(error) if math.isfinite(error) else "none"

"""What the tests of the written page share: a page as a tree, whether it stands alone, and reports of every kind."""

import math
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

from msgspec.structs import replace

from runtime.parity.report import CaseResult, Explanation, ModuleResult, Report, TokenDifference, rung_result

VOID = {"meta", "br", "hr", "img", "input", "link", "base", "col", "source", "wbr"}
LOADING = {"script", "link", "img", "iframe", "object", "embed", "base", "video", "audio", "source", "form"}


class Element:
    def __init__(self, tag: str, attributes: dict[str, str], parent: "Element | None") -> None:
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.parts: list[str | Element] = []

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)

    @property
    def own_text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def isolated(self) -> bool:
        """Whether its text finds its own direction."""
        here = self.attributes.get("dir") == "auto" or self.tag == "bdi"
        return here or (self.parent is not None and self.parent.isolated)


class Page(HTMLParser):
    """A page as a tree. Raises a ValueError where a tag is not closed, or another is."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.elements: list[Element] = []
        self.current = Element("", {}, None)
        self.feed(source)
        self.close()
        if self.current.parent is not None:
            raise ValueError(f"{self.current.tag} is not closed")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        if len(set(names)) < len(names):
            raise ValueError(f"{tag} has an attribute twice")
        element = Element(tag, {name: value or "" for name, value in attrs}, self.current)
        self.current.parts.append(element)
        self.elements.append(element)
        if tag not in VOID:
            self.current = element

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.current.tag != tag or self.current.parent is None:
            raise ValueError(f"{self.current.tag} is open where {tag} is closed")
        self.current = self.current.parent

    def handle_data(self, data: str) -> None:
        self.current.parts.append(data)

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    def table(self, caption: str) -> list[list[str]]:
        """The cells of the rows of the table whose caption begins with `caption`."""
        (found,) = [element.parent for element in self.all("caption") if element.text.startswith(caption)]
        rows = [row for row in self.all("tr") if any(found is other for other in ancestors(row))]
        cells = [[part.text.strip() for part in row.parts if isinstance(part, Element)] for row in rows]
        return [row for row in cells if row]

    def picture(self, label: str) -> Element:
        (found,) = [svg for svg in self.all("svg") if svg.attributes["aria-label"].startswith(label)]
        return found


def ancestors(element: Element) -> Iterator[Element]:
    while element.parent is not None:
        element = element.parent
        yield element


def check_alone(page: Page) -> None:
    """Nothing on the page is fetched from elsewhere, and what it points to is on it, once."""
    assert not [element.tag for element in page.elements if element.tag in LOADING]
    ids = Counter(element.attributes["id"] for element in page.elements if "id" in element.attributes)
    assert not [name for name, count in ids.items() if count > 1]
    for element in page.elements:
        for name, value in element.attributes.items():
            assert name not in ("src", "srcset", "data", "action")
            assert not name.startswith("on")
            target = value if name in ("href", "xlink:href") else value.partition("url(")[2].rstrip(")")
            assert not target or (target.startswith("#") and target[1:] in ids), f"{element.tag} {name}={value}"
    style = "".join(element.text for element in page.all("style"))
    assert "url(" not in style
    assert "@import" not in style


def difference(label: str, **changes: Any) -> TokenDifference:
    found = TokenDifference(
        label=label,
        position=1,
        expected=[7, 8, 9],
        found=[7, 5],
        margin=1.25,
        error=3e-5,
        text=f"source of {label}",
        expected_text="the old house",
        found_text="the new house",
        reference_top=[("▁old", -0.25), ("▁new", -1.5)],
        runtime_top=[("▁new", -0.125), ("▁old", -2.25)],
    )
    return replace(found, **changes)


def explanation(count: int = 45, **changes: Any) -> Explanation:
    modules = [
        ModuleResult(graph=graph, module=f"decoder.layers.{place}.fc2", error=1e-7 * (place + 1), tolerance=4e-6)
        for graph in ("prefill", "step")
        for place in range(count)
    ]
    modules[-1] = replace(modules[-1], **changes)
    return Explanation(sentence="The first to leave tolerance is decoder.layers.40.fc2 in prefill.", modules=modules)


def spoilt(passing: Report) -> Report:
    """`passing` with one of everything that can be wrong."""
    tensors = list(passing.tensors)
    tensors[1] = replace(tensors[1], error=0.5, worst="B=3 S=7 T=4")
    tensors[2] = replace(tensors[2], error=math.nan)
    tensors[3] = replace(tensors[3], error=math.inf, compared=0)
    differences = [difference("first"), difference("second", margin=1e-6), *(difference(f"d{n}") for n in range(12))]
    rungs = list(passing.rungs)
    broken = CaseResult(label="prefill B=3 S=7 T=4", compared=9, problems=["prefill: logits is 0.5 from the reference"])
    rungs[2] = rung_result(2, "9 outputs", [broken, *passing.rungs[2].cases])
    rungs[4] = rung_result(
        4, "tokens differ", passing.rungs[4].cases, [f"{item.label} differs" for item in differences]
    )
    drift = [*passing.drift[:5], 0.25, math.nan, math.inf, *passing.drift[8:]]
    rows = [replace(passing.settings[0], rungs={"0": True, "2": False}, problem="rung 2 (graph): off")]
    return replace(
        passing,
        rungs=rungs,
        tensors=tensors,
        differences=differences,
        drift=drift,
        settings=[*rows, *passing.settings[1:]],
        explanation=explanation(error=math.nan),
    )


def without_structure(passing: Report) -> Report:
    """What the ladder says of graphs that get no further than rung 0."""
    structure = replace(passing.rungs[0], passed=False, problems=["encode: last_hidden_state has another type"])
    return Report(rungs=[structure, passing.rungs[1], *(rung_result(rung, "not tried", []) for rung in range(2, 6))])


def bare(report: Report) -> Report:
    """`report` without what takes long to draw."""
    return replace(report, tensors=[], drift=[], own_drift=[], explanation=None)

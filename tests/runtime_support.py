"""The trained bundle in tests/data, copies that were tampered with, and a backend that can be twisted; no torch."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.backend import Array, Backend, Cache, FloatArray, IntArray, LayerCache
from runtime.bundle import PASSPORT, Bundle, record_files
from runtime.contract import graph_specs
from runtime.exam import Exam, GraphCase
from runtime.parity import Report, sit
from runtime.parity.candidate import Candidate
from runtime.parity.graphs import case_results, merged
from runtime.parity.report import TensorResult
from runtime.parity.tolerance import earned_by_output
from runtime.session import OrtBackend
from runtime.tokenizer import open_tokenizer

TINY = Path(__file__).parent / "data" / "tiny"
"""A model of 31 thousand weights that reverses letters: "a b c d e" to "e d c b a"."""
POSITIONS, VOCABULARY = 24, 45
STRUCTURE, CACHE, GRAPH, ROLLOUT, TOKENS, INVARIANCE, DEPLOYMENT = range(7)
"""The rungs."""


def tiny_copy(folder: Path) -> Path:
    """A copy of the bundle that may be tampered with."""
    shutil.copytree(TINY, folder)
    return folder


def edit_passport(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Let `edit` change the passport of the bundle in `folder`, digests of files left alone."""
    passport = json.loads((folder / PASSPORT).read_text("utf-8"))
    edit(passport)
    (folder / PASSPORT).write_text(json.dumps(passport), "utf-8")


def graph_results(cases: Sequence[GraphCase], backend: Backend[Any]) -> list[TensorResult]:
    """One result for each output of each graph, over all `cases`."""
    earned = earned_by_output(cases)
    return merged([result for case in cases for result in case_results(case, backend, earned)])


def damage(folder: Path, name: str, content: bytes) -> None:
    """Give the file `name` other contents, and record them as if they had always been there."""
    (folder / name).write_bytes(content)
    (record,) = record_files(folder, [name]).values()
    entry = {"size": record.size, "sha256": record.sha256}
    edit_passport(folder, lambda passport: passport["files"].update({name: entry}))


class Delegate:
    """A backend that does what `inner` does. Faults are subclasses; they see arrays through `changed`."""

    def __init__(self, inner: OrtBackend) -> None:
        self.inner = inner

    def encode(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.inner.encode(input_ids, attention_mask)

    def prefill(self, input_ids: Any, memory: Any, encoder_attention_mask: Any) -> tuple[Any, Cache[Any]]:
        return self.inner.prefill(input_ids, memory, encoder_attention_mask)

    def begin(self, memory: Any) -> Cache[Any]:
        return self.inner.begin(memory)

    def step(self, input_ids: Any, encoder_attention_mask: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
        return self.inner.step(input_ids, encoder_attention_mask, cache)

    def branch(
        self, input_ids: Any, encoder_attention_mask: Any, seen: Any, cache: Cache[Any]
    ) -> tuple[Any, Cache[Any]]:
        return self.inner.branch(input_ids, encoder_attention_mask, seen, cache)

    def rank(self, logits: Any, forbidden: Sequence[int], count: int) -> tuple[FloatArray, IntArray]:
        return self.inner.rank(logits, forbidden, count)

    def select(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return self.inner.select(cache, rows)

    def put(self, array: Array) -> Any:
        return self.inner.put(array)

    def get(self, tensor: Any) -> Array:
        return self.inner.get(tensor)

    def changed(self, tensor: Any, change: Callable[[Array], Array]) -> Any:
        """`tensor` after `change`, which may write into the array that it gets."""
        return self.put(change(self.get(tensor).copy()))

    def changed_caches(self, cache: Cache[Any], names: tuple[str, ...], change: Callable[[Array], Array]) -> Cache[Any]:
        """`cache` with the tensors of `names` changed in every layer."""
        return tuple(
            LayerCache(
                *(self.changed(tensor, change) if name in names else tensor for name, tensor in layer._asdict().items())
            )
            for layer in cache
        )


def judge(bundle: Bundle, exam: Exam, backend: Any) -> Report:
    """What the ladder says about `backend`, which runs `bundle`."""
    specs = graph_specs(bundle.passport.dims)
    return sit(exam, Candidate(backend, bundle.passport, open_tokenizer(bundle.folder), "as tested"), specs, specs)


def failed(report: Report) -> list[int]:
    """The rungs that were not climbed. A report that failed one has not passed, and says why."""
    rungs = [rung.rung for rung in report.rungs if not rung.passed]
    assert report.passed == (not rungs)
    assert all(rung.problems for rung in report.rungs if not rung.passed)
    return rungs

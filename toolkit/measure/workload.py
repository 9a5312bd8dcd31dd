"""What is translated while somebody measures."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from runtime.bundle import Passport


class Workload(NamedTuple):
    """Source ids, each row ending in EOS, in the batches that every engine gets them in."""

    name: str
    batches: list[list[list[int]]]
    beams: int = 1
    """1 is greedy."""
    tokens: int | None = None
    """Every output is forced to this length, EOS not counted; None for as long as the model makes it."""

    @property
    def sentences(self) -> int:
        """Of all batches."""
        return sum(map(len, self.batches))


def random_workload(
    name: str, passport: Passport, *, source: int, tokens: int, batch: int, beams: int = 1, seed: int = 0
) -> Workload:
    """One batch of `source` random tokens a row, EOS counted; the same for the same `seed`."""
    special = set(passport.special)
    ordinary = [index for index in range(passport.dims.source_vocab_size) if index not in special]
    draw = random.Random(seed)  # noqa: S311 - nobody's secret
    rows = [[*draw.choices(ordinary, k=source - 1), passport.special.eos] for _ in range(batch)]
    return Workload(name, [rows], beams, tokens)


def sentences_workload(name: str, rows: Sequence[list[int]], *, batch: int, beams: int = 1) -> Workload:
    """`rows` in batches of about equal length, the outputs as long as they come."""
    ordered = sorted(rows, key=len)
    return Workload(name, [ordered[place : place + batch] for place in range(0, len(ordered), batch)], beams)

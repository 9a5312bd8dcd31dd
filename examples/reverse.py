"""Random sequences of letters and their reversals: a task that needs no data and that a tiny model learns in a minute.

python examples/reverse.py data/reverse
"""

import random
import sys
from itertools import islice
from pathlib import Path

LETTERS = "abcdefghijklmnopqrst"
SIZES = {"train": 10_000, "valid": 200, "test": 500}
LENGTHS = range(3, 11)


def sequences(count: int, seed: int = 1) -> list[tuple[str, ...]]:
    """`count` different sequences, the same ones for the same seed."""
    source = random.Random(seed)  # noqa: S311  # a toy task, nothing is secret
    # A dictionary is a set that keeps its order.
    found: dict[tuple[str, ...], None] = {}
    while len(found) < count:
        found[tuple(source.choices(LETTERS, k=source.choice(LENGTHS)))] = None
    return list(found)


def write(folder: Path, seed: int = 1) -> None:
    """Write train.tsv, valid.tsv and test.tsv, lines of `a b c<TAB>c b a`; no sequence stands in two of them."""
    folder.mkdir(parents=True, exist_ok=True)
    rest = iter(sequences(sum(SIZES.values()), seed))
    for name, size in SIZES.items():
        lines = [f"{' '.join(letters)}\t{' '.join(reversed(letters))}\n" for letters in islice(rest, size)]
        (folder / f"{name}.tsv").write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/reverse.py FOLDER")
    write(Path(sys.argv[1]))

"""Normalisation by the compiled table of a SentencePiece model, as the `tokenizers` library applies it.

That library does not look for the longest key, as SentencePiece does. It takes one grapheme after another: of one with
at most five bytes it keeps the replacement of the shortest key at its front and drops the rest, of a longer one it
replaces the characters one by one. So text with separate accents comes out differently from SentencePiece: "e" with
circumflex and acute loses the acute. Ids are those of transformers only if this is the same here.
"""

import unicodedata
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

CLUSTER_BYTES = 6
"""From this length on a grapheme is taken apart."""

_NOT_ATTACHED = {0x102B, 0x102C, 0x1038, 0x1083, 0x108F, 0x1A61, 0x1A63, 0x1A64, 0xAA7B, 0xAA7D, 0x11720, 0x11721}
_NOT_ATTACHED |= {*range(0x1062, 0x1065), *range(0x1067, 0x106E), *range(0x1087, 0x108D), *range(0x109A, 0x109D)}
_ATTACHED = {0x200C, 0x200D, 0x0E33, 0x0EB3, 0xFF9E, 0xFF9F, *range(0x1F3FB, 0x1F400), *range(0xE0020, 0xE0080)}
_PREPENDED = {*range(0x0600, 0x0606), 0x06DD, 0x070F, 0x0890, 0x0891, 0x08E2, 0x0D4E}


class Charsmap:
    """The table of a model.

    Args:
        table: `precompiled_charsmap` of the model: the size of a trie (a double array over bytes), the trie, and the
            replacements, each closed by a zero byte.

    Raises:
        ValueError: it is cut off.
    """

    def __init__(self, table: bytes) -> None:
        size = int.from_bytes(table[:4], "little")
        if len(table) < 4 or size % 4 or not 0 < size <= len(table) - 4:
            raise ValueError(f"precompiled_charsmap has {len(table)} bytes, its first table alone {size}")
        self._trie: list[int] = np.frombuffer(table, "<u4", size // 4, 4).tolist()
        self._replacements = table[4 + size :]
        self._cluster = lru_cache(100_000)(self._replace)

    def normalize(self, text: str) -> str:
        """`text` with every character or grapheme replaced that the table has."""
        return "".join(map(self._cluster, clusters(text)))

    def _replace(self, cluster: str) -> str:
        if len(cluster) > 1 and len(cluster.encode()) < CLUSTER_BYTES:
            found = self._lookup(cluster)
            if found is not None:
                return found
        replaced = ((character, self._lookup(character)) for character in cluster)
        return "".join(character if found is None else found for character, found in replaced)

    def _lookup(self, text: str) -> str | None:
        """The replacement of the shortest key that `text` begins with."""
        place = _offset(self._trie[0])
        for byte in text.encode():
            place ^= byte
            if not byte or place >= len(self._trie):
                return None
            unit = self._trie[place]
            if unit & 0x800000FF != byte:
                return None
            place ^= _offset(unit)
            if unit >> 8 & 1:
                if place >= len(self._trie):
                    return None
                start = self._trie[place] & 0x7FFFFFFF
                end = self._replacements.find(b"\0", start)
                return self._replacements[start : end if end >= 0 else None].decode("utf-8", "replace")
        return None


def clusters(text: str) -> Iterator[str]:
    """The graphemes of `text` (Unicode Standard Annex 29), as far as the table can tell.

    Left out are the rules that only join what is longer than five bytes anyway: flags, emoji that a joiner connects,
    syllables of Hangul and of Indic scripts.
    """
    if text.isascii() and "\r" not in text:
        yield from text
        return
    start = 0
    for place in range(1, len(text)):
        if not _joined(text[place - 1], text[place]):
            yield text[start:place]
            start = place
    if text:
        yield text[start:]


@lru_cache(100_000)
def _joined(left: str, right: str) -> bool:
    if left == "\r":
        return right == "\n"
    if _is_control(left) or _is_control(right):
        return False
    return _is_attached(right) or ord(left) in _PREPENDED


def _is_attached(character: str) -> bool:
    return ord(character) in _ATTACHED or (
        unicodedata.category(character) in {"Mn", "Me", "Mc"} and ord(character) not in _NOT_ATTACHED
    )


def _is_control(character: str) -> bool:
    if ord(character) in _ATTACHED or ord(character) in _PREPENDED:
        return False
    return unicodedata.category(character) in {"Cc", "Cf", "Zl", "Zp", "Cs"}


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 1 << 9) >> 6)

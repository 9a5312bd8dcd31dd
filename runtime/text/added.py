"""Tokens that are written out in text, like `</s>` or a language code: found before the rest is split."""

import re
from collections.abc import Iterable, Iterator

from .settings import AddedToken


class AddedTokens:
    """Finds tokens in text: the leftmost first, the longest of those that begin there.

    Args:
        tokens: What to look for.
        space: A regular expression of the white space that `lstrip` and `rstrip` remove.
    """

    def __init__(self, tokens: Iterable[AddedToken], space: str = r"\s") -> None:
        self._tokens = {token.content: token for token in tokens if token.content}
        contents = sorted(self._tokens, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, contents))) if contents else None
        self._after = re.compile(f"{space}*")

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of `text` that are not empty, each with whether it is a token."""
        done = 0
        for found in self._found.finditer(text) if self._found else ():
            token = self._tokens[found[0]]
            start, end = found.span()
            rest = text[done:start]
            if token.lstrip:
                rest = rest[: self._trailing(rest)]
            if rest:
                yield rest, False
            yield found[0], True
            done = end
            if token.rstrip:
                space = self._after.match(text, end)
                done = space.end() if space else end
        if text[done:]:
            yield text[done:], False

    def _trailing(self, text: str) -> int:
        """Where the white space at the end of `text` begins."""
        kept = len(text)
        while kept and self._after.fullmatch(text, kept - 1, kept):
            kept -= 1
        return kept

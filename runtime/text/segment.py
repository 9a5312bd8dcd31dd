"""Two ways to cut a word into pieces: merging pairs (BPE), and the most probable path (Unigram).

Both give the pieces of the `tokenizers` library, to the last tie. SentencePiece itself is not used here since that
library ranks merges by pair, not by piece, and adds scores in double precision.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache

CACHED_WORDS = 50_000
UNKNOWN_PENALTY = 10.0
"""How much less probable an unknown character is than the least probable piece."""

Rank = tuple[int, int, int]


class Segmenter(ABC):
    """Cuts words into ids. Words are remembered, for text repeats them."""

    def __init__(self) -> None:
        self.word = lru_cache(CACHED_WORDS)(self._word)

    @abstractmethod
    def _word(self, word: str) -> tuple[int, ...]:
        """Ids of the pieces of `word`; a run of unknown characters is one unknown piece."""


class Bpe(Segmenter):
    """Byte-pair encoding: the pair of neighbours with the lowest rank is merged, again and again.

    Args:
        ids: Id of every piece.
        unknown: Id of what has no piece.
        ranks: Rank of the pairs that may merge. Without it every pair may that makes a piece, the piece with the
            smallest id first, and of its pairs the one with the shortest left part.
    """

    def __init__(self, ids: Mapping[str, int], unknown: int, ranks: Mapping[tuple[str, str], int] | None) -> None:
        super().__init__()
        self._ids = ids
        self._unknown = unknown
        self._ranks = ranks

    def _word(self, word: str) -> tuple[int, ...]:
        symbols = self._symbols(word)
        # Each place knows its living neighbours; a place that was merged into the one before it holds None.
        before = list(range(-1, len(symbols) - 1))
        after = list(range(1, len(symbols) + 1))
        queue: list[tuple[Rank, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < len(symbols):
                rank = self._rank(symbols[left], symbols[right])
                if rank is not None:
                    heapq.heappush(queue, (rank, left, f"{symbols[left]}{symbols[right]}"))

        for place in range(len(symbols) - 1):
            offer(place, place + 1)
        while queue:
            _, place, merged = heapq.heappop(queue)
            left, right = symbols[place], after[place]
            if left is None or right >= len(symbols):
                continue
            # An entry is stale when its pair is gone; another pair with the same result may stand in for it.
            if self._rank(left, symbols[right]) is None or f"{left}{symbols[right]}" != merged:
                continue
            symbols[place], symbols[right] = merged, None
            after[place] = after[right]
            if after[place] < len(symbols):
                before[after[place]] = place
            offer(before[place], place)
            offer(place, after[place])
        return tuple(self._ids.get(symbol, self._unknown) for symbol in symbols if symbol is not None)

    def _symbols(self, word: str) -> list[str | None]:
        """The characters of `word`; what has no piece becomes "", once for a whole run."""
        symbols: list[str | None] = []
        for character in word:
            if character in self._ids:
                symbols.append(character)
            elif not symbols or symbols[-1] != "":
                symbols.append("")
        return symbols

    def _rank(self, left: str | None, right: str | None) -> Rank | None:
        if not left or not right:
            return None
        if self._ranks is not None:
            rank = self._ranks.get((left, right))
            return None if rank is None else (rank, 0, 0)
        index = self._ids.get(left + right)
        return None if index is None else (index, len(left), len(right))


class Unigram(Segmenter):
    """The path through a word whose pieces have the largest sum of scores.

    Args:
        pieces: Piece and score (log-probability), in the order of ids; the last of two equal pieces counts.
        unknown: Id of what has no piece.
    """

    def __init__(self, pieces: Sequence[tuple[str, float]], unknown: int) -> None:
        super().__init__()
        self._ids = {piece: index for index, (piece, _) in enumerate(pieces)}
        self._scores = {piece: pieces[index][1] for piece, index in self._ids.items()}
        self._unknown = unknown
        self._unknown_score = min(score for _, score in pieces) - UNKNOWN_PENALTY
        self._longest: dict[str, int] = {}
        """Length of the longest piece that begins with a character."""
        for piece in self._ids:
            if piece:
                self._longest[piece[0]] = max(len(piece), self._longest.get(piece[0], 0))

    def _word(self, word: str) -> tuple[int, ...]:
        starts = self._best_path(word)
        ids: list[int] = []
        end, unknown_end = len(word), None
        while end:
            start = starts[end]
            known = self._ids.get(word[start:end], self._unknown) != self._unknown
            if not known and unknown_end is None:
                unknown_end = end
            if unknown_end is not None and (known or not start):
                run = word[end if known else start : unknown_end]
                ids.append(self._ids.get(run, self._unknown))
                unknown_end = None
            if known:
                ids.append(self._ids[word[start:end]])
            end = start
        return tuple(reversed(ids))

    def _best_path(self, word: str) -> list[int]:
        """Where the best last piece of each beginning of `word` starts."""
        best = [0.0] + [-float("inf")] * len(word)
        starts = [-1] * (len(word) + 1)
        for start, character in enumerate(word):
            single = False
            for end in range(start + 1, min(start + self._longest.get(character, 0), len(word)) + 1):
                score = self._scores.get(word[start:end])
                if score is None:
                    continue
                single = single or end == start + 1
                if starts[end] < 0 or best[start] + score > best[end]:
                    best[end], starts[end] = best[start] + score, start
            if not single and (starts[start + 1] < 0 or best[start] + self._unknown_score > best[start + 1]):
                best[start + 1], starts[start + 1] = best[start] + self._unknown_score, start
        return starts

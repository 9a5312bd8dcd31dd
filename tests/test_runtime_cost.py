"""What a search pays for, counted: runs of each graph and what they are fed; and memory that does not grow."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runtime_support import TINY, Delegate

from runtime.backend import Cache, IntArray
from runtime.bundle import Bundle
from runtime.generation import GenerationConfig, generate
from runtime.session import OrtBackend

SOURCES = [[5, 6, 7, 8, 9, 3], [10, 11, 12, 3], [13, 14, 15, 16, 3]]
SENTENCES, SETTLED = 2000, 500
LONG_RUN = f"""
import random, sys
from pathlib import Path
from runtime import GenerationConfig, Translator

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

translator = Translator.open(sys.argv[1], threads=1)
letters, draw = "abcdefghijklmnopqrst", random.Random(0)
done, settled = 0, 0
while done < {SENTENCES}:
    batch = [" ".join(draw.choices(letters, k=draw.randint(1, 20))) for _ in range(draw.randint(1, 8))]
    translator.translate(batch, GenerationConfig(num_beams=draw.choice([1, 1, 1, 2])))
    done += len(batch)
    if done < {SETTLED}:
        settled = resident()
print(settled, resident())
"""


class Counting(Delegate):
    """Notes the shape of the ids that each verb gets, and where the caches of the source lie in memory."""

    def __init__(self, inner: OrtBackend) -> None:
        super().__init__(inner)
        self.encoded: list[list[int]] = []
        self.prefilled: list[list[int]] = []
        self.begun: list[list[int]] = []
        self.stepped: list[list[int]] = []
        self.branched: list[list[int]] = []
        self.selected = 0
        self.pasts: list[int] = []
        self.sources: list[list[int]] = []

    def encode(self, input_ids: Any, attention_mask: Any) -> Any:
        self.encoded.append(input_ids.shape())
        return super().encode(input_ids, attention_mask)

    def prefill(self, input_ids: Any, memory: Any, encoder_attention_mask: Any) -> tuple[Any, Cache[Any]]:
        self.prefilled.append(input_ids.shape())
        logits, cache = super().prefill(input_ids, memory, encoder_attention_mask)
        self.sources.append(source_addresses(cache))
        return logits, cache

    def begin(self, memory: Any) -> Cache[Any]:
        self.begun.append(memory.shape())
        cache = super().begin(memory)
        self.sources.append(source_addresses(cache))
        return cache

    def step(self, input_ids: Any, encoder_attention_mask: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
        self.stepped.append(input_ids.shape())
        self.pasts.append(cache[0].decoder_key.shape()[2])
        self.sources.append(source_addresses(cache))
        return super().step(input_ids, encoder_attention_mask, cache)

    def branch(
        self, input_ids: Any, encoder_attention_mask: Any, seen: Any, cache: Cache[Any]
    ) -> tuple[Any, Cache[Any]]:
        self.branched.append(input_ids.shape())
        self.pasts.append(cache[0].decoder_key.shape()[2])
        self.sources.append(source_addresses(cache))
        return super().branch(input_ids, encoder_attention_mask, seen, cache)

    def select(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        self.selected += 1
        return super().select(cache, rows)


def source_addresses(cache: Cache[Any]) -> list[int]:
    return [tensor.data_ptr() for layer in cache for tensor in (layer.encoder_key, layer.encoder_value)]


def counted(backend: OrtBackend, bundle: Bundle, prefix: tuple[int, ...] = (), tokens: int = 9) -> Counting:
    """A greedy search of `tokens` tokens, in which no sentence ends before the others."""
    counting = Counting(backend)
    passport = bundle.passport
    config = GenerationConfig(min_new_tokens=tokens, max_new_tokens=tokens, decoder_input_ids=prefix)
    found = generate(counting, SOURCES, config, passport.special, passport.dims.max_positions)
    assert [len(best.ids) for best, *_ in found] == [len(prefix) + tokens] * 3
    return counting


def test_a_search_encodes_once_begins_once_and_steps_once_a_token(
    tiny_backend: OrtBackend, tiny_bundle: Bundle
) -> None:
    counting = counted(tiny_backend, tiny_bundle)
    width = tiny_bundle.passport.dims.width
    assert (counting.encoded, counting.begun, counting.prefilled) == ([[3, 6]], [[3, 6, width]], [])
    # Nobody asks what follows the last token.
    assert len(counting.stepped) == 9
    assert counting.pasts == list(range(9))


def test_a_search_with_a_prefix_encodes_once_prefills_once_and_steps_once_a_token(
    tiny_backend: OrtBackend, tiny_bundle: Bundle
) -> None:
    counting = counted(tiny_backend, tiny_bundle, prefix=(7, 8))
    assert (counting.encoded, counting.begun, counting.prefilled) == ([[3, 6]], [], [[3, 3]])
    # The first token comes out of prefill.
    assert len(counting.stepped) == 8


def test_a_step_reads_one_token_and_the_past_grows_by_one(tiny_backend: OrtBackend, tiny_bundle: Bundle) -> None:
    counting = counted(tiny_backend, tiny_bundle, prefix=(7, 8))
    assert set(map(tuple, counting.stepped)) == {(3, 1)}
    assert counting.pasts == list(range(3, 11))


@pytest.mark.parametrize(("prefix", "steps"), [((), 9), ((7, 8), 8)], ids=["no prefix", "prefix"])
def test_the_caches_of_the_source_are_computed_once_and_handed_on(
    tiny_backend: OrtBackend, tiny_bundle: Bundle, prefix: tuple[int, ...], steps: int
) -> None:
    first, *others = counted(tiny_backend, tiny_bundle, prefix).sources
    assert len(first) == 2 * tiny_bundle.passport.dims.layers
    assert others == [first] * steps


def test_a_beam_search_copies_no_cache_and_reads_the_source_once_for_all_beams(
    tiny_backend: OrtBackend, tiny_bundle: Bundle
) -> None:
    counting, passport = Counting(tiny_backend), tiny_bundle.passport
    config = GenerationConfig(num_beams=3, min_new_tokens=6, max_new_tokens=6)
    generate(counting, SOURCES, config, passport.special, passport.dims.max_positions)
    assert (len(counting.encoded), len(counting.begun), counting.prefilled, counting.stepped) == (1, 1, [], [])
    # The first token is one hypothesis about each source.
    assert counting.branched == [[3, 1]] + [[3, 3]] * 5
    assert counting.pasts == [0, 1, 4, 7, 10, 13]
    assert counting.selected == 0
    assert counting.sources == [counting.sources[0]] * 7


def test_sentences_that_are_done_are_paid_for_no_longer(tiny_backend: OrtBackend, tiny_bundle: Bundle) -> None:
    counting, passport = Counting(tiny_backend), tiny_bundle.passport
    found = generate(counting, SOURCES, GenerationConfig(), passport.special, passport.dims.max_positions)
    lengths = [len(best.ids) for best, *_ in found]
    assert len(set(lengths)) > 1
    assert sum(rows for rows, _ in counting.stepped) == sum(lengths)


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="only Linux tells its memory this way")
def test_memory_stays_flat_over_sentences_of_changing_length() -> None:
    done = subprocess.run([sys.executable, "-c", LONG_RUN, TINY], capture_output=True, text=True, check=True)
    settled, last = map(int, done.stdout.split())
    assert settled > 0
    assert last <= 1.05 * settled

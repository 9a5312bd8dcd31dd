"""What most users need: open a bundle, hand over sentences, get translations."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from msgspec.structs import replace

from .bundle import Bundle
from .errors import GenerationError, InputTooLongError, TokenizerError
from .generation import Hypothesis, generate
from .generation_config import GenerationConfig, foreign_ids
from .session import OrtBackend, Provider
from .tokenizer import Tokenizer, open_tokenizer

BATCH_TOKENS = 4096
"""Source tokens in a batch, padding and beams or samples counted in; the default."""


class Translation(NamedTuple):
    """One translated sentence."""

    text: str
    score: float
    """Log-probability of the output divided by `count ** length_penalty`."""
    alternatives: list["Translation"]
    """The other `num_return_sequences - 1` outputs, the best first, or as they were drawn."""


class Beginning(NamedTuple):
    """The tokens that every output of a translator begins with."""

    start: int
    language: int | None = None
    """The token after the start, where the target language stands there."""


class Translator:
    """Translates with the three graphs of a bundle.

    Use `Translator.open`. Inputs of any number and length may come together: they are sorted by length, cut into
    batches by tokens, and come back in their own order. A sentence gets the same output alone and among others.
    """

    def __init__(self, bundle: Bundle, backend: OrtBackend, tokenizer: Tokenizer, beginning: Beginning) -> None:
        self._passport = bundle.passport
        self._backend = backend
        self._tokenizer = tokenizer
        self._special = self._passport.special._replace(start=beginning.start)
        self._language = beginning.language

    @classmethod
    def open(
        cls,
        path: Path | str,
        provider: Provider = "cpu",
        threads: int | None = None,
        *,
        allow_fallback: bool = False,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> Self:
        """Open the bundle at `path`.

        Args:
            path: The bundle's folder.
            provider: Where to run, "cpu" or "cuda".
            threads: Threads to compute with; None for the CPUs that this process may use.
            allow_fallback: Take the CPU where `provider` cannot be had, instead of refusing.
            source_language: What the texts are written in, in the codes of the model's tokenizer; None for the
                bundle's own choice. Only for multilingual bundles.
            target_language: What to translate into, likewise.

        Raises:
            BundleError: the folder is no bundle, a file does not match the passport, or a graph not the contract.
            ProviderError: `provider` would not really be used.
            TokenizerError: the tokenizer's files are damaged, or a language is unknown or missing.
        """
        bundle = Bundle(Path(path))
        backend = OrtBackend(bundle, provider=provider, threads=threads, allow_fallback=allow_fallback, checked=True)
        tokenizer = open_tokenizer(bundle.folder, source_language, target_language)
        return cls(bundle, backend, tokenizer, _beginning(bundle, tokenizer, is_chosen=target_language is not None))

    @property
    def provider(self) -> Provider:
        """Where the graphs really run."""
        return self._backend.provider

    @property
    def backend(self) -> OrtBackend:
        """What runs the graphs, for those who want the verbs themselves."""
        return self._backend

    @property
    def defaults(self) -> GenerationConfig:
        """How this bundle searches when the caller does not say, towards the target language that was chosen."""
        config = self._passport.generation
        return config if self._language is None else replace(config, forced_bos_token_id=self._language)

    def encode(self, text: str) -> list[int]:
        """Source ids of `text`.

        Raises:
            InputTooLongError: more ids than the model has positions.
            TokenizerError: `text` is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text is not valid Unicode: a lone surrogate at character {error.start + 1}"
            ) from None
        ids = self._tokenizer.encode(text)
        self._check_length(ids)
        return ids

    def translate(
        self, texts: Iterable[str], config: GenerationConfig | None = None, *, batch_tokens: int = BATCH_TOKENS
    ) -> list[Translation]:
        """Translate `texts`; the results stand in their order. An empty text gives an empty translation.

        Raises:
            InputTooLongError: a text has more tokens than the model has positions; nothing is translated.
            TokenizerError: a text is not valid Unicode.
            GenerationError: `config` does not fit the model, or forbids every token; or `batch_tokens` is no number
                above 0.
        """
        if isinstance(texts, str):
            raise TypeError("texts is one str, expected a list of them")
        given: list[object] = list(texts)
        texts = [text for text in given if isinstance(text, str)]
        strangers = [
            f"texts[{place}] is {type(text).__name__}" for place, text in enumerate(given) if not isinstance(text, str)
        ]
        if strangers:
            raise TypeError(f"{'; '.join(strangers)}, expected str")
        results = [Translation("", 0.0, []) for _ in texts]
        filled = [index for index, text in enumerate(texts) if text.strip()]
        ids = []
        for index in filled:
            try:
                ids.append(self.encode(texts[index]))
            except (InputTooLongError, TokenizerError) as error:
                raise type(error)(f"text {index + 1}: {error}") from None
        for index, hypotheses in zip(filled, self.generate(ids, config, batch_tokens=batch_tokens), strict=True):
            results[index] = self.translation(hypotheses)
        return results

    def translation(self, hypotheses: Sequence[Hypothesis]) -> Translation:
        """The text of one input's `hypotheses`, the best first."""
        best, *others = [Translation(self._tokenizer.decode(found.ids), found.score, []) for found in hypotheses]
        return best._replace(alternatives=others)

    def generate(
        self,
        ids: Sequence[Sequence[int]],
        config: GenerationConfig | None = None,
        *,
        batch_tokens: int = BATCH_TOKENS,
    ) -> list[list[Hypothesis]]:
        """Search the outputs of source `ids`, each ending in EOS; the results stand in their order.

        A `config` without `forced_bos_token_id` gets that of the target language. As in transformers, a prefix in
        `decoder_input_ids` goes before it.

        Raises:
            InputTooLongError: an input has more ids than the model has positions.
            GenerationError: an input is empty or holds an unknown id, `config` does not fit the model, or forbids every
                token; or `batch_tokens` is no number above 0.
        """
        config = config or self.defaults
        if config.forced_bos_token_id is None and self._language is not None:
            config = replace(config, forced_bos_token_id=self._language)
        _check_batch_tokens(batch_tokens)
        if problems := foreign_ids(config, self._passport.dims.vocab_size):
            raise GenerationError("; ".join(problems))
        if config.num_beams > self._passport.dims.vocab_size:
            raise GenerationError(
                f"num_beams is {config.num_beams}, the model has {self._passport.dims.vocab_size} tokens to begin with"
            )
        for place, row in enumerate(ids):
            self._check_ids(row, place)
        results: list[list[Hypothesis]] = [[] for _ in ids]
        for chosen in token_batches(
            [len(row) for row in ids], batch_tokens // max(config.num_beams, config.num_return_sequences)
        ):
            batch = [ids[index] for index in chosen]
            found = generate(self._backend, batch, config, self._special, self._passport.dims.max_positions)
            for index, hypotheses in zip(chosen, found, strict=True):
                results[index] = hypotheses
        return results

    def _check_ids(self, row: Sequence[int], place: int) -> None:
        if not row:
            raise GenerationError(f"input {place + 1} has no ids, expected at least EOS ({self._passport.special.eos})")
        size = self._passport.dims.source_vocab_size
        outside = next((index for index in row if not 0 <= index < size), None)
        if outside is not None:
            raise GenerationError(
                f"input {place + 1} holds the id {outside}, the source vocabulary has 0 .. {size - 1}"
            )
        self._check_length(row)

    def _check_length(self, ids: Sequence[int]) -> None:
        limit = self._passport.dims.max_positions
        if len(ids) > limit:
            raise InputTooLongError(f"the input has {len(ids)} tokens, the model has {limit} positions: split it")


def _beginning(bundle: Bundle, tokenizer: Tokenizer, *, is_chosen: bool) -> Beginning:
    """With what outputs begin. Who chose a language comes first, then the search's defaults, then the tokenizer's.

    Raises:
        TokenizerError: nobody says what to translate into.
    """
    start, search = bundle.passport.special.start, bundle.passport.generation
    own = [token for token in (start, search.forced_bos_token_id, *search.decoder_input_ids) if token is not None]
    is_own = any(tokenizer.piece(token).strip("_") in tokenizer.languages for token in own)
    if not tokenizer.languages:
        return Beginning(start)
    if is_own and not is_chosen:
        return Beginning(start, search.forced_bos_token_id)
    if not tokenizer.target_language:
        raise TokenizerError(
            f"{bundle.folder} does not say what to translate into: choose a target_language, one of "
            f"{', '.join(tokenizer.languages[:8])}, ... ({len(tokenizer.languages)} in all)"
        )
    if tokenizer.forced_bos is None:
        return Beginning(tokenizer.special.start)
    return Beginning(start, tokenizer.forced_bos)


def _check_batch_tokens(given: object) -> None:
    if not isinstance(given, int) or given < 1:
        raise GenerationError(f"batch_tokens is {given!r}, expected an int of at least 1")


def token_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of `lengths` in batches of about equal length, at most `budget` tokens each, padding counted.

    An input that is longer than the budget makes a batch of its own.
    """
    chosen: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if chosen and (len(chosen) + 1) * lengths[index] > budget:
            yield chosen
            chosen = []
        chosen.append(index)
    if chosen:
        yield chosen

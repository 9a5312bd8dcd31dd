"""The tokenizers of NLLB, mBART and mBART-50: one model in fairseq's order of ids, and a language in every text."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ..decoding import SpecialIds
from ..errors import TokenizerError
from .added import AddedTokens
from .base import Tokenizer, check_language, clean_up
from .charsmap import Charsmap
from .codes import MBART, MBART50, NLLB
from .pieces import MODEL, TOKENIZER_JSON, read_model, read_tokenizer_json
from .segment import Bpe, Segmenter, Unigram
from .settings import AddedToken, TokenSettings, read_settings

_SPACE_SIGN = "\u2581"
_WHITE = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
"""Unicode's white space. Python's own `\\s` also takes four control characters for it."""
_WHITE_RUN = re.compile(f"{_WHITE}+")
_SPACES = re.compile(" {2,}")
_WORDS = re.compile(f"{_SPACE_SIGN}?[^{_SPACE_SIGN}]+|{_SPACE_SIGN}")
_SPECIAL = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}


class Family(NamedTuple):
    """In what the three tokenizers differ."""

    name: str
    languages: tuple[str, ...]
    default: str
    """The source language that nobody named."""
    kind: str
    """The kind of model, in the words of the tokenizers library."""
    normalizes: bool
    collapses: bool
    """Whether runs of spaces become one even if the model brings no normalisation."""
    splits_white: bool
    """Whether any white space separates words, and vanishes."""
    language_first: bool
    """Whether the language stands before the text, or after its end token."""
    starts_with_language: bool
    """Whether outputs begin with the language itself, or with the end token and then the language."""


FAMILIES = {
    "NllbTokenizer": Family(
        "NLLB",
        NLLB,
        default="eng_Latn",
        kind="BPE",
        normalizes=True,
        collapses=False,
        splits_white=False,
        language_first=True,
        starts_with_language=False,
    ),
    "MBartTokenizer": Family(
        "mBART",
        MBART,
        default="en_XX",
        kind="Unigram",
        normalizes=False,  # transformers 5 drops what the model brings
        collapses=False,
        splits_white=True,
        language_first=False,
        starts_with_language=True,
    ),
    "MBart50Tokenizer": Family(
        "mBART-50",
        MBART50,
        default="en_XX",
        kind="Unigram",
        normalizes=True,
        collapses=True,
        splits_white=False,
        language_first=True,
        starts_with_language=False,
    ),
}


class _Model(NamedTuple):
    pieces: list[tuple[str, float]]
    segmenter: Segmenter
    added: list[AddedToken]
    charsmap: bytes | None
    is_json: bool


class FairseqTokenizer(Tokenizer):
    """As transformers' `NllbTokenizer`, `MBartTokenizer` and `MBart50Tokenizer`.

    Args:
        folder: Holds `tokenizer.json`, or else `sentencepiece.bpe.model`.
        family: One of `FAMILIES`.
        source_language: Code like "eng_Latn"; None for that of `tokenizer_config.json`, and English without one.
        target_language: The same for the outputs; None leaves open what they begin with, if the settings do.

    Raises:
        TokenizerError: a file is missing or damaged, or a language is unknown.
    """

    def __init__(
        self, folder: Path, family: Family, source_language: str | None = None, target_language: str | None = None
    ) -> None:
        settings = read_settings(folder)
        named = {name: settings.token(name, content) for name, content in _SPECIAL.items()}
        model = _open_model(folder, family, named)
        self.family: Final = family
        self._segmenter = model.segmenter
        self._normalizer = _Normalizer(model.charsmap if family.normalizes else None, collapses=family.collapses)
        self._by_id = dict(enumerate(piece for piece, _ in model.pieces))
        self._ids = {piece: index for index, piece in self._by_id.items()}
        self._add_tokens(_written_tokens(settings, model, family, named))
        self._choose(settings, named, (source_language, target_language), folder)
        self._legacy = settings.fields.legacy_behaviour and family.name == "NLLB"
        # A cleaning made for English is not for BPE, says transformers, unless one insists.
        insists = settings.fields.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
        self._cleans_up = settings.cleans_up and (family.kind != "BPE" or insists)

    def _add_tokens(self, tokens: Sequence[AddedToken]) -> None:
        """Make `tokens` be found in text; those that are no piece of the model get the ids after it."""
        for token in tokens:
            if token.content not in self._ids:
                self._ids[token.content] = len(self._by_id)
            self._by_id[self._ids[token.content]] = token.content
        self._hidden = {self._ids[token.content] for token in tokens if token.special}
        self._raw = AddedTokens([token for token in tokens if not token.normalized], _WHITE)
        normalized = {self._normalizer(token.content): token for token in tokens if token.normalized}
        self._normalized_ids = {content: self._ids[token.content] for content, token in normalized.items()}
        self._normalized = AddedTokens(
            [msgspec.structs.replace(token, content=content) for content, token in normalized.items()], _WHITE
        )

    def _choose(
        self,
        settings: TokenSettings,
        named: Mapping[str, str],
        chosen: tuple[str | None, str | None],
        folder: Path,
    ) -> None:
        """Take the languages that are `chosen`, else those of the settings, and what follows from them."""
        family = self.family
        further = [token.content for token in settings.extra if token.content not in named.values()]
        known = dict.fromkeys([*family.languages, *further])
        self.languages = tuple(code for code in known if code in self._ids and not code.startswith("<"))
        self.source_language = chosen[0] or settings.fields.src_lang or family.default
        self.target_language = chosen[1] or settings.fields.tgt_lang
        check_language(self.source_language, self.languages, "source_language", folder)
        check_language(self.target_language, self.languages, "target_language", folder)
        self.unknown = self._ids[named["unk_token"]]
        start = eos = self._ids[named["eos_token"]]
        if self.target_language:
            target = self._ids[self.target_language]
            start, self.forced_bos = (target, None) if family.starts_with_language else (eos, target)
        self.special = SpecialIds(self._ids[named["pad_token"]], start, eos)

    @property
    def size(self) -> int:
        """Entries of the vocabulary, languages included."""
        return len(self._by_id)

    def encode(self, text: str) -> list[int]:
        """Source ids of `text`, EOS, and the source language at the front or at the end."""
        return self._framed(text, self.source_language)

    def encode_target(self, text: str) -> list[int]:
        """Target ids of `text`, EOS, and the target language, or the source language where there is none."""
        return self._framed(text, self.target_language or self.source_language)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of target `ids` without special tokens, languages, and ids that have no piece."""
        pieces = [self._by_id[index] for index in ids if index in self._by_id and index not in self._hidden]
        first = "".join(pieces[:1]).replace(_SPACE_SIGN, "")
        text = first + "".join(pieces[1:]).replace(_SPACE_SIGN, " ")
        return clean_up(text) if self._cleans_up else text

    def piece(self, index: int) -> str:
        """The piece of the id `index`, or `#index` where there is none."""
        return self._by_id.get(index, f"#{index}")

    def _framed(self, text: str, language: str | None) -> list[int]:
        code = self._ids[language] if language else self.unknown
        if self.family.language_first and not self._legacy:
            return [code, *self._lookup(text), self.special.eos]
        return [*self._lookup(text), self.special.eos, code]

    def _lookup(self, text: str) -> list[int]:
        found: list[int] = []
        for part, is_token in self._raw.split(text):
            if is_token:
                found.append(self._ids[part])
                continue
            for section, is_normalized_token in self._normalized.split(self._normalizer(part)):
                if is_normalized_token:
                    found.append(self._normalized_ids[section])
                else:
                    for word in self._words(section):
                        found += self._segmenter.word(word)
        return found

    def _words(self, text: str) -> Iterator[str]:
        """The words of `text`, each with the sign of a space before it."""
        runs = _WHITE_RUN.split(text) if self.family.splits_white else [text.replace(" ", _SPACE_SIGN)]
        for run in filter(None, runs):
            yield from _WORDS.findall(run if run.startswith(_SPACE_SIGN) else _SPACE_SIGN + run)


class _Normalizer:
    """What happens to text before it is split."""

    def __init__(self, table: bytes | None, *, collapses: bool) -> None:
        self._charsmap = Charsmap(table) if table else None
        self._collapses = collapses or self._charsmap is not None

    def __call__(self, text: str) -> str:
        if self._charsmap:
            text = self._charsmap.normalize(text)
        return _SPACES.sub(" ", text) if self._collapses else text


def _open_model(folder: Path, family: Family, named: Mapping[str, str]) -> _Model:
    """Pieces and normalisation of `tokenizer.json`, which transformers prefers, or of the SentencePiece model."""
    first = [named[f"{name}_token"] for name in ("bos", "pad", "eos", "unk")]
    if (folder / TOKENIZER_JSON).exists():
        path = folder / TOKENIZER_JSON
        pieces, ranks, added, charsmap = read_tokenizer_json(path, family.kind)
    elif (folder / MODEL).exists():
        path = folder / MODEL
        raw, added, charsmap, *_ = read_model(path)
        ranks = None
        if family.kind == "BPE":
            pieces = [(piece, 0.0) for piece in dict.fromkeys([*first, *(piece for piece, _ in raw)])]
        else:
            last = [*family.languages, named["mask_token"]]
            pieces = [*((piece, 0.0) for piece in first), *raw[3:], *((piece, 0.0) for piece in last)]
    else:
        raise TokenizerError(
            f"{folder} has neither {TOKENIZER_JSON} nor {MODEL}: a {family.name} tokenizer needs one of them, "
            "as the checkpoint has it or transformers saves it"
        )
    ids = {piece: index for index, (piece, _) in enumerate(pieces)}
    missing = [piece for piece in first if piece not in ids]
    if missing:
        raise TokenizerError(f"{path} has no {' and no '.join(missing)}")
    if charsmap:
        try:
            Charsmap(charsmap)
        except ValueError as error:
            raise TokenizerError(f"{path}: {error}") from None
    unknown = ids[named["unk_token"]]
    segmenter = Bpe(ids, unknown, ranks) if family.kind == "BPE" else Unigram(pieces, unknown)
    return _Model(pieces, segmenter, added, charsmap, is_json=path.name == TOKENIZER_JSON)


def _written_tokens(
    settings: TokenSettings, model: _Model, family: Family, named: Mapping[str, str]
) -> list[AddedToken]:
    """The tokens that are found in text, in the order in which new ones get their ids."""
    given = settings.fields.added_tokens_decoder
    declared = [given[index] for index in sorted(given)] if given is not None else model.added if model.is_json else []
    languages = [AddedToken(code) for code in family.languages]
    mask = AddedToken(named["mask_token"], lstrip=True, normalized=family.name == "NLLB")
    special = {name: AddedToken(content) for name, content in named.items()} | settings.named
    if special["mask_token"] == AddedToken(mask.content):
        special["mask_token"] = mask
    # NLLB's model knows no languages, nor does what transformers 5 makes of it alone. Their ids follow the model's own,
    # and <mask> comes last.
    first = (
        languages if family.name == "NLLB" and not {token.content for token in declared} & {*family.languages} else []
    )
    found: dict[str, AddedToken] = {}
    for token in [*first, *declared, *special.values(), *settings.extra, *model.added, *languages]:
        found.setdefault(token.content, token)
    return list(found.values())

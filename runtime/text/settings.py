"""The settings of a tokenizer: `tokenizer_config.json`, and `special_tokens_map.json` of older checkpoints."""

from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from ..errors import TokenizerError

SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"

Content = TypeVar("Content")


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is found in text as it is written, before anything else is split."""

    content: str
    lstrip: bool = False
    """Whether it swallows the white space before it."""
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    """Whether it is sought in the normalised text, not in the raw one."""
    special: bool = True
    """Whether decoding leaves it out."""


class Settings(msgspec.Struct, frozen=True):
    """The fields of `tokenizer_config.json` that change ids or text; the others are not ours to judge."""

    tokenizer_class: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    src_lang: str | None = None
    tgt_lang: str | None = None
    separate_vocabs: bool = False
    legacy_behaviour: bool = False
    language_codes: str = "m2m100"
    clean_up_tokenization_spaces: bool | None = False
    clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output: bool = False
    sp_model_kwargs: dict[str, Any] | None = None
    split_special_tokens: bool = False
    added_tokens_decoder: dict[int, AddedToken] | None = None


class TokenSettings(NamedTuple):
    """Settings of a folder, with the special tokens that they name."""

    fields: Settings
    named: dict[str, AddedToken]
    """`bos_token`, `eos_token` and so on, as far as they are given."""
    extra: list[AddedToken]
    """Further special tokens, in their order."""

    def token(self, name: str, default: str) -> str:
        """Content of the special token `name`."""
        return self.named[name].content if name in self.named else default

    @property
    def cleans_up(self) -> bool:
        """Whether decoded text loses spaces before punctuation."""
        return bool(self.fields.clean_up_tokenization_spaces)


def read_settings(folder: Path) -> TokenSettings:
    """Settings of the tokenizer in `folder`; the families' defaults where there is no file.

    Raises:
        TokenizerError: a file is damaged, or asks for what is not supported.
    """
    path = folder / SETTINGS
    raw: dict[str, Any] = read_json(path, dict[str, Any], "an object") if path.exists() else {}
    try:
        fields = msgspec.convert(raw, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise TokenizerError(f"{path}: {error}") from None
    if fields.sp_model_kwargs:
        raise TokenizerError(f"{path}: sp_model_kwargs is {fields.sp_model_kwargs}, sampling is not supported")
    if fields.split_special_tokens:
        raise TokenizerError(f"{path}: split_special_tokens is true, which is not supported")
    tokens = _tokens(raw, path)
    older = folder / SPECIAL_TOKENS_MAP
    if fields.added_tokens_decoder is None and older.exists():
        # transformers reads this file only where the newer field is missing.
        former = _tokens(read_json(older, dict[str, Any], "an object"), older)
        tokens = ({**tokens[0], **former[0]}, [*tokens[1], *(token for token in former[1] if token not in tokens[1])])
    problem = next((token for token in (fields.added_tokens_decoder or {}).values() if token.single_word), None)
    if problem:
        raise TokenizerError(f"{path}: added_tokens_decoder: single_word of {problem.content!r} is not supported")
    return TokenSettings(fields, *tokens)


def read_json(path: Path, kind: type[Content], what: str) -> Content:
    """The content of a JSON file, checked to be `kind`, in words `what`.

    Raises:
        TokenizerError: the file cannot be read, is no JSON or holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise TokenizerError(f"{path} is not {what}: {error}") from None


def _tokens(raw: dict[str, Any], path: Path) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """The named and the further special tokens of `raw`, which was read from `path`."""
    named = {
        name: _token(value, f"{path}: {name}")
        for name, value in raw.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    extra: list[AddedToken] = []
    for name in ("extra_special_tokens", "additional_special_tokens"):
        given = raw.get(name)
        if isinstance(given, dict):
            named |= {key: _token(value, f"{path}: {name}.{key}") for key, value in given.items()}
        elif isinstance(given, list):
            if not extra:  # the newer name goes before the older one
                extra = [_token(value, f"{path}: {name}[{place}]") for place, value in enumerate(given)]
        elif given is not None:
            raise TokenizerError(f"{path}: {name} is {type(given).__name__}, expected a list of tokens")
    return named, extra


def _token(value: object, where: str) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value)
    try:
        return msgspec.structs.replace(msgspec.convert(value, AddedToken), special=True)
    except msgspec.ValidationError as error:
        raise TokenizerError(f"{where}: {error}") from None

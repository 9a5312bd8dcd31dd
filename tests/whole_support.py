"""Small random models with the tokenizer of their own family: all that an export and transformers need to translate."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from importers_support import FAMILIES as MODELS
from importers_support import Shape, hugging_face, randomise, reference, save, talk
from tokenizer_support import FAMILIES as TOKENIZERS

from runtime.tokenizer import open_tokenizer

POSITIONS = 64
LONGEST = 18
"""Of outputs. Older transformers take 20 for no limit at all."""
TEXTS = [
    "The cat sat on the mat.",
    "Where is the station?",
    "Der Hund schläft vor der Tür; die Straße ist leer.",
    "Où est la gare ?",
    "我爱猫。猫也爱我吗？",
    "A cup of tea, please!",
]


class Whole(NamedTuple):
    """A family of models with one of its tokenizers."""

    model: str
    tokenizer: str
    """By the name that `tokenizer_support` has."""
    seed: int
    """With which outputs vary in ids and length."""
    languages: tuple[str, str] | None = None
    """What the texts are written in and translated into, neither of them the folder's own choice."""
    starts_with_language: bool = False
    """Whether outputs begin with the language itself, without a start token before it."""


WHOLES = {
    "Marian": Whole("marian", "MarianTokenizer", 8),
    "Marian, separate vocabularies": Whole("marian", "MarianTokenizer, separate", 0),
    "M2M100": Whole("m2m_100", "M2M100Tokenizer", 10, ("en", "zh")),
    "NLLB": Whole("m2m_100", "NllbTokenizer", 10, ("deu_Latn", "zho_Hans")),
    "mBART": Whole("mbart", "MBartTokenizer", 10, ("de_DE", "zh_CN"), starts_with_language=True),
    "mBART-50": Whole("mbart", "MBart50Tokenizer", 3, ("sv_SE", "gl_ES")),
}


def write_whole(name: str, folder: Path) -> Path:
    """The model and the tokenizer `name` of `WHOLES`."""
    whole = WHOLES[name]
    folder.mkdir(parents=True)
    TOKENIZERS[whole.tokenizer](folder, {})
    tokenizer = open_tokenizer(folder)
    special = tokenizer.special
    separate = tokenizer.size if tokenizer.target_size != tokenizer.size else None
    scaled = whole.model != "mbart"  # sinusoids are as large as scaled embeddings, random learned positions are not
    shape = Shape(vocab=tokenizer.target_size, width=32, encoder_ffn=48, decoder_ffn=48, scale=scaled)
    start = special.start if whole.starts_with_language else special.pad if whole.model == "marian" else special.eos
    ids = {"pad_token_id": special.pad, "eos_token_id": special.eos, "decoder_start_token_id": start}
    sizes = shape._replace(source_vocab=separate)
    model = talk(randomise(MODELS[whole.model](sizes, max_position_embeddings=POSITIONS, **ids), seed=whole.seed))
    # As OPUS-MT has it: an output holds no <pad>, which has no position in M2M100.
    words = {"bad_words_ids": [[special.pad]]}
    model.generation_config = hugging_face.GenerationConfig(num_beams=3, max_length=LONGEST, **ids, **words)
    return save(model, folder)


def open_theirs(folder: Path, tokenizer: str, **options: Any) -> Any:
    """Transformers' own tokenizer for `folder`."""
    with warnings.catch_warnings():
        # That package would clean up punctuation in a method that no encoding calls.
        warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
        return getattr(transformers, tokenizer.split(",", maxsplit=1)[0]).from_pretrained(folder, **options)


class Output(NamedTuple):
    """One output of transformers, in our form."""

    ids: list[int]
    text: str
    score: float


@torch.no_grad()
def translate_with_transformers(name: str, folder: Path, texts: Sequence[str], **options: Any) -> list[list[Output]]:
    """What transformers makes of each of `texts`, from `folder` alone, as its documentation says to.

    Args:
        name: Of `WHOLES`.
        folder: Holds model and tokenizer.
        texts: One at a time.
        options: Of `generate`, where it is not to search as the folder says.
    """
    whole, model = WHOLES[name], reference(WHOLES[name].model, folder)
    chosen = dict(zip(("src_lang", "tgt_lang"), whole.languages or (), strict=False))
    tokenizer = open_theirs(folder, whole.tokenizer, **chosen)
    if whole.languages:
        code = f"__{chosen['tgt_lang']}__" if name == "M2M100" else chosen["tgt_lang"]
        forced = "decoder_start_token_id" if whole.starts_with_language else "forced_bos_token_id"
        options = {forced: tokenizer.convert_tokens_to_ids(code), **options}
    found = []
    for text in texts:
        output = model.generate(
            **tokenizer(text, return_tensors="pt"), return_dict_in_generate=True, output_scores=True, **options
        )
        rows = [_without_padding(row.tolist(), model.config) for row in output.sequences]
        if options.get("num_beams") == 1:
            new = output.sequences[0, -len(output.scores) :]
            steps = [float(step[0].log_softmax(-1)[token]) for step, token in zip(output.scores, new, strict=True)]
            scores = [sum(steps) / len(steps)]
        else:
            scores = output.sequences_scores.tolist()
        written = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        found.append([Output(*one) for one in zip(rows, written, scores, strict=True)])
    return found


def _without_padding(row: list[int], config: Any) -> list[int]:
    """`row` without the start token and what follows its end."""
    ends = [place for place in range(1, len(row)) if row[place] == config.eos_token_id]
    return row[1 : ends[0] + 1] if ends else row[1:]

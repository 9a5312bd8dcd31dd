"""Small random models of other libraries, saved as these save them: none of their biases and norms is neutral."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file, save_file

from exporters.conversion import convert_folder
from exporters.errors import ExportError
from models.errors import ModelImportError
from models.importers import import_model
from models.importers.folder import SAFETENSORS
from runtime.tokenizer import TOKENIZER_FILES

hugging_face: Any = transformers  # annotated in part only
POSITIONS = 24
SENTENCES = [
    "the cat sat on the mat and the dog lay by the door",
    "where is the station it is not far from here",
    "i would like a cup of tea please",
    "der hund schläft vor der tür die straße ist leer",
    "wo ist der bahnhof er ist nicht weit von hier",
    "ich hätte gern eine tasse tee bitte",
]

TEXTS = [" ".join(sentence.split()[:5]) for sentence in SENTENCES]
"""Short enough for so few positions."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Neither progress bars nor remarks from transformers, and one thread for tensors that are this small."""
    log = hugging_face.utils.logging
    verbosity, threads = log.get_verbosity(), torch.get_num_threads()
    log.set_verbosity_error()
    log.disable_progress_bar()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        log.enable_progress_bar()
        torch.set_num_threads(threads)


class Shape(NamedTuple):
    """Sizes of a small model, and how it shares its embeddings."""

    vocab: int = 61
    width: int = 24
    encoder_layers: int = 2
    decoder_layers: int = 2
    encoder_heads: int = 4
    decoder_heads: int = 4
    encoder_ffn: int = 40
    decoder_ffn: int = 40
    activation: str = "gelu"
    scale: bool = True
    tied: bool = True
    source_vocab: int | None = None
    """Of Marian's separate vocabularies; None where there is one for both."""


SHAPES = {
    "plain": Shape(),
    "unequal heads, unscaled": Shape(encoder_heads=2, decoder_heads=6, scale=False, activation="relu"),
    "deep decoder, odd sizes": Shape(vocab=47, encoder_layers=1, decoder_layers=3, encoder_ffn=17, decoder_ffn=33),
    "shallow decoder, untied": Shape(vocab=53, encoder_layers=3, decoder_layers=1, tied=False, activation="silu"),
}
SEPARATE = {
    "own source vocabulary": Shape(source_vocab=43, activation="swish"),
    "own source vocabulary, untied": Shape(source_vocab=70, tied=False, decoder_layers=1),
}
"""For Marian alone."""


def common_settings(shape: Shape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab,
        "d_model": shape.width,
        "encoder_layers": shape.encoder_layers,
        "decoder_layers": shape.decoder_layers,
        "encoder_attention_heads": shape.encoder_heads,
        "decoder_attention_heads": shape.decoder_heads,
        "encoder_ffn_dim": shape.encoder_ffn,
        "decoder_ffn_dim": shape.decoder_ffn,
        "activation_function": shape.activation,
        "scale_embedding": shape.scale,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": POSITIONS,
    }


def marian(shape: Shape, **settings: Any) -> Any:
    """Special ids as OPUS-MT has them: </s> 0, <unk> 1, <pad> last, and <pad> starts the decoder."""
    pad = min(shape.vocab, shape.source_vocab or shape.vocab) - 1
    sizes = common_settings(shape)
    if shape.source_vocab is not None:
        sizes |= {
            "vocab_size": shape.source_vocab,
            "decoder_vocab_size": shape.vocab,
            "share_encoder_decoder_embeddings": False,
        }
    ids = {"pad_token_id": pad, "eos_token_id": 0, "decoder_start_token_id": pad, "forced_eos_token_id": 0}
    return hugging_face.MarianMTModel(hugging_face.MarianConfig(**{**sizes, **ids, **settings}))


def m2m100(shape: Shape, **settings: Any) -> Any:
    return hugging_face.M2M100ForConditionalGeneration(
        hugging_face.M2M100Config(**{**common_settings(shape), **settings})
    )


def bart(shape: Shape, **settings: Any) -> Any:
    return hugging_face.BartForConditionalGeneration(hugging_face.BartConfig(**{**common_settings(shape), **settings}))


def mbart(shape: Shape, **settings: Any) -> Any:
    start = {"decoder_start_token_id": 5}  # a language
    return hugging_face.MBartForConditionalGeneration(
        hugging_face.MBartConfig(**{**common_settings(shape), **start, **settings})
    )


FAMILIES: dict[str, Callable[..., Any]] = {"marian": marian, "m2m_100": m2m100, "bart": bart, "mbart": mbart}


CLASSES = {
    "marian": ("MarianMTModel", "MarianModel"),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Model"),
    "bart": ("BartForConditionalGeneration", "BartModel"),
    "mbart": ("MBartForConditionalGeneration", "MBartModel"),
}
"""With and without the head."""


def reference(family: str, folder: Path) -> Any:
    """What transformers makes of `folder`, in float64."""
    model = getattr(hugging_face, CLASSES[family][0]).from_pretrained(folder, dtype=torch.float32)
    return model.double().eval()


@torch.no_grad()
def randomise(model: Any, seed: int = 0) -> Any:
    """Weights like those of a trained network: with the usual initialisation each token predicts itself for ever."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))

    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue  # a table of sinusoids
        if name.endswith("bias"):
            noise(weight, 0.1)
        elif weight.ndim == 1:
            noise(weight, 0.1, 1.0)
        elif "embed" in name or "shared" in name or "lm_head" in name:
            noise(weight, weight.shape[-1] ** -0.5)
        else:
            gain = 3.0 if "q_proj" in name or "k_proj" in name else 2.0  # attention that chooses, not averages
            noise(weight, gain * weight.shape[-1] ** -0.5)
            if "fc2" in name:
                weight.sub_(weight.mean(-1, keepdim=True))  # its positive input would add one same vector everywhere
    if hasattr(model, "final_logits_bias"):
        noise(model.final_logits_bias, 0.5)
    return model.eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    """`model` as transformers saves it."""
    model.save_pretrained(folder, **options)
    return folder


def random_folder(family: str, shape: Shape, folder: Path, seed: int = 0, **settings: Any) -> Path:
    """A random model of `family`, saved in `folder`."""
    return save(randomise(FAMILIES[family](shape, **settings), seed), folder)


def write_tokenizer(
    folder: Path,
    size: int,
    *,
    pad: int,
    eos: int,
    special: dict[str, int] | None = None,
    sentences: list[str] = SENTENCES,
) -> None:
    """Files of a Marian tokenizer with `size` entries: SentencePiece models of both sides, and one vocabulary.

    Args:
        folder: Where to write.
        size: Entries; what the pieces leave over is called "unused...".
        pad: Where `<pad>` stands.
        eos: Where `</s>` stands.
        special: Further entries that have a place of their own.
        sentences: What the pieces are learned from.
    """
    taken = {"<pad>": pad, "</s>": eos, **(special or {})}
    places = iter(index for index in range(size) if index not in taken.values())
    taken.setdefault("<unk>", next(places))
    for name in ("source", "target"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_prefix=str(folder / name),
            vocab_size=min(size - len(taken), 80),
            character_coverage=1.0,
            hard_vocab_limit=False,
            minloglevel=2,
            num_threads=1,
        )
        (folder / f"{name}.model").rename(folder / f"{name}.spm")
        (folder / f"{name}.vocab").unlink()
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    for index in range(3, pieces.get_piece_size()):
        taken[pieces.id_to_piece(index)] = next(places)
    taken |= {f"unused{index}": index for index in places}
    write_json(folder / "vocab.json", taken)
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "MarianTokenizer", "source_lang": "aa", "target_lang": "bb", "separate_vocabs": False},
    )


def replace_tokenizer(folder: Path, size: int, *, pad: int, eos: int = 0) -> None:
    """Put a Marian tokenizer of another size, or with other ids, into `folder`."""
    for name in TOKENIZER_FILES:
        (folder / name).unlink()
    write_tokenizer(folder, size, pad=pad, eos=eos)


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Let `edit` change the tensors of `folder`."""
    tensors = load_file(folder / SAFETENSORS)
    edit(tensors)
    save_file(tensors, folder / SAFETENSORS, {"format": "pt"})


class Malice:
    """What makes the folder `traces` when it is unpickled."""

    def __init__(self, traces: Path) -> None:
        self.traces = traces

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.traces),)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Let `edit` change the object in `path`."""
    content = json.loads(path.read_text("utf-8"))
    edit(content)
    write_json(path, content)


TRANSLATING = Shape(vocab=120, width=32, encoder_ffn=48, decoder_ffn=48, activation="swish")
"""With room for the pieces of a small tokenizer."""


@torch.no_grad()
def talk(model: Any) -> Any:
    """Let the outputs of `model` vary in ids and in length: a search over one token for ever proves nothing."""
    for name, weight in model.named_parameters():
        if any(f"{part}.weight" in name for part in ("v_proj", "out_proj", "fc1", "fc2")):
            weight.mul_(3)  # what a layer adds, against the token that it began with
    decoder = model.model.decoder
    last = getattr(decoder, "layer_norm", None) or decoder.layers[-1].final_layer_norm
    last.weight.mul_(3)
    last.bias.mul_(3)
    end = decoder.embed_tokens.weight[model.config.eos_token_id]
    last.bias.add_(4 * end / end.dot(end))  # 4 more for the logit of </s>
    return model


def complete_folder(family: str, folder: Path) -> Path:
    """A random model of `family` with the files of a Marian tokenizer: all that an export needs."""
    # Sinusoids are as large as scaled embeddings, random learned positions as small as unscaled ones.
    shape = TRANSLATING._replace(scale=family in ("marian", "m2m_100"))
    model = talk(randomise(FAMILIES[family](shape), seed=7))
    config = model.config
    ids = {"pad_token_id": config.pad_token_id, "eos_token_id": config.eos_token_id}
    model.generation_config = hugging_face.GenerationConfig(
        num_beams=3, max_length=20, length_penalty=0.8, decoder_start_token_id=config.decoder_start_token_id, **ids
    )
    save(model, folder)
    write_tokenizer(folder, shape.vocab, pad=config.pad_token_id, eos=config.eos_token_id)
    return folder


def refusal_of(folder: Path) -> str:
    """The one line by which `folder` is refused. Nothing is written into it."""
    before = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    with pytest.raises(ModelImportError) as caught:
        import_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    if folder.is_dir():
        assert sorted(path.name for path in folder.iterdir()) == before
    return message


def refusal(folder: Path, error: type[Exception] = ExportError, **options: Any) -> str:
    """The one line by which a conversion of `folder` is refused. Nothing is left behind."""
    with pytest.raises(error) as caught:
        convert_folder(folder, folder.parent / "checkpoint", **options)
    assert "\n" not in str(caught.value)
    assert not [path for path in folder.parent.iterdir() if "checkpoint" in path.name]
    return str(caught.value)

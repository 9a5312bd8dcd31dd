"""Write a Marian checkpoint with random weights, in the layout that transformers saves; its size is OPUS-MT's base.

What it says means nothing, but it costs what a trained model of its size costs, and it takes no download. Special ids
lie as in OPUS-MT: `</s>` 0, `<unk>` 1, `<pad>` last, and `<pad>` starts the decoder.
"""

import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec
import sentencepiece
import torch
import transformers

hugging_face: Any = transformers  # annotated in part only

MOST_PIECES = 8000
"""That SentencePiece can learn from Python's own sources; the rest of the vocabulary is never used."""
EOS = 0
FIRST = 7
"""What outputs begin with."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How large the model is, and how its outputs are spread."""

    vocab: int = 32_000
    width: int = 512
    layers: int = 6
    ffn: int = 2048
    heads: int = 8
    positions: int = 512
    sharpness: float = 3.0
    """About the standard deviation of the logits: the larger, the fewer near-ties."""
    stop: float = 0.0
    """Added to the logit of `</s>`: the larger, the shorter the outputs, and the more their lengths vary."""
    sure: float = 20.0
    """Added to the logit of the token that outputs begin with."""


BASE = Size()


def write_marian(folder: Path, size: Size = BASE, seed: int = 0) -> int:
    """Write the model with its tokenizer to `folder`; returns how many parameters it has."""
    hugging_face.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    pad = _write_tokenizer(folder, size)
    model = _random_model(size, pad, seed)
    model.generation_config = hugging_face.GenerationConfig(
        num_beams=4,
        max_length=size.positions,
        bad_words_ids=[[pad]],
        pad_token_id=pad,
        eos_token_id=EOS,
        decoder_start_token_id=pad,
        forced_eos_token_id=EOS,
        renormalize_logits=True,
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_tokenizer(folder: Path, size: Size) -> int:
    """SentencePiece models learnt from Python's own sources, and a vocabulary; returns the id of `<pad>`."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    lines = [line.strip() for path in sources for line in path.read_text("utf-8", "ignore").splitlines()]
    with tempfile.TemporaryDirectory() as workshop:
        text = Path(workshop, "text")
        text.write_text("\n".join(line for line in lines if 5 < len(line) < 300), "utf-8")
        sentencepiece.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=f"{workshop}/pieces",
            vocab_size=min(size.vocab - 3, MOST_PIECES),
            character_coverage=1.0,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        for name in ("source.spm", "target.spm"):
            shutil.copy(f"{workshop}/pieces.model", folder / name)
        learnt = sentencepiece.SentencePieceProcessor(model_file=f"{workshop}/pieces.model")
    pieces = [learnt.id_to_piece(index) for index in range(learnt.get_piece_size())]
    names = list(dict.fromkeys(["</s>", "<unk>", *(piece for piece in pieces if piece != "<s>")]))[: size.vocab - 1]
    names += [f"unused{index}" for index in range(size.vocab - 1 - len(names))]
    vocabulary = {name: index for index, name in enumerate([*names, "<pad>"])}
    (folder / "vocab.json").write_bytes(msgspec.json.encode(vocabulary))
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": "aa",
        "target_lang": "bb",
        "separate_vocabs": False,
        "model_max_length": size.positions,
    }
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    return vocabulary["<pad>"]


def _random_model(size: Size, pad: int, seed: int) -> Any:
    torch.manual_seed(seed)
    model = hugging_face.MarianMTModel(
        hugging_face.MarianConfig(
            vocab_size=size.vocab,
            d_model=size.width,
            encoder_layers=size.layers,
            decoder_layers=size.layers,
            encoder_attention_heads=size.heads,
            decoder_attention_heads=size.heads,
            encoder_ffn_dim=size.ffn,
            decoder_ffn_dim=size.ffn,
            activation_function="swish",
            scale_embedding=True,
            static_position_embeddings=True,
            max_position_embeddings=size.positions,
            share_encoder_decoder_embeddings=True,
            tie_word_embeddings=True,
            pad_token_id=pad,
            eos_token_id=EOS,
            bos_token_id=EOS,
            decoder_start_token_id=pad,
            forced_eos_token_id=EOS,
        )
    ).eval()
    with torch.no_grad():
        _spread(model, size, pad)
    return model


def _spread(model: Any, size: Size, pad: int) -> None:
    """Weights spread so that something is at stake everywhere, and the outputs are as sure as a trained network's.

    Each token predicts itself. The first one is `FIRST` by its bias: left to chance, it would be a close call that
    decides about all others, and no lower precision would keep the words.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.05)  # zero biases would hide a dropped one
        elif "layer_norm" in name:
            parameter.normal_(mean=1.0, std=0.1)
        elif "shared" not in name and "embed_positions" not in name:
            # Attention that chooses, and layers that do not blow up a rounding until no lower precision passes.
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 0.5
            parameter.normal_(std=gain / parameter.shape[-1] ** 0.5)
            if "fc2" in name:
                parameter.sub_(parameter.mean(-1, keepdim=True))  # else SiLU's mean adds one vector everywhere
    model.model.shared.weight.normal_(std=size.width**-0.5)
    model.model.shared.weight[pad].zero_()
    last = model.model.decoder.layers[-1].final_layer_norm
    last.weight.mul_(size.sharpness)
    last.bias.mul_(size.sharpness)
    model.final_logits_bias.normal_(std=0.5)  # a dropped final bias must show
    model.final_logits_bias[:, EOS] += size.stop
    model.final_logits_bias[:, FIRST] += size.sure


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--vocab", type=click.IntRange(min=100), default=BASE.vocab, show_default=True)
@click.option("--width", type=click.IntRange(min=2), default=BASE.width, show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=BASE.layers, show_default=True)
@click.option("--ffn", type=click.IntRange(min=1), default=BASE.ffn, show_default=True)
@click.option("--heads", type=click.IntRange(min=1), default=BASE.heads, show_default=True)
@click.option("--positions", type=click.IntRange(min=2), default=BASE.positions, show_default=True)
@click.option("--sharpness", type=float, default=BASE.sharpness, show_default=True, help="Larger: fewer near-ties.")
@click.option("--stop", type=float, default=BASE.stop, show_default=True, help="Larger: shorter outputs.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def main(*, folder: Path, seed: int, **sizes: Any) -> None:
    """Write a Marian checkpoint with random weights to FOLDER."""
    count = write_marian(folder, Size(**sizes), seed)
    click.echo(f"{folder}: {count / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()

"""A training run from its configuration: text to ids, model, training loop, scores."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from exporters.reference import TorchBackend
from models.checkpoint import WEIGHTS_FILE, load_checkpoint
from models.config import ModelConfig
from models.errors import CheckpointError, ConfigError
from models.files import replacing
from models.training import BEST, Metrics, Scorer, Trainer
from models.training_state import STATE_FILE, Progress
from models.transformer import Transformer
from runtime.generation import GenerationConfig, generate
from runtime.tokenizer import Tokenizer, open_tokenizer, tokenizer_files

from .config import CONFIG_FILE, RunConfig, changed_settings, load_run_config, to_toml
from .corpus import Encoded, TextPair, encode_pairs, read_pairs, train_tokenizer
from .errors import one_line

SENTENCES = "sentences.txt"
"""Beside a checkpoint, where the exporter looks for them; its module needs more than training does."""
EXAM_SENTENCES = 20


def train(
    config: RunConfig,
    *,
    resume: bool,
    observe: Callable[[Metrics], None],
    should_stop: Callable[[], bool],
    say: Callable[[str], None],
) -> Progress:
    """Run `config` to its end, or until `should_stop`.

    Args:
        config: The run.
        resume: Go on with the run in the output folder.
        observe: Receives each line of metrics.
        should_stop: Asked after every step.
        say: Receives one line about each stage before the first step.

    Raises:
        ModelError: the run is impossible, would overwrite another one, or diverged.
        RuntimeFault: the tokenizer of `init_from` is damaged.
        OSError: something cannot be read or written.
        click.ClickException: the text is not parallel text, or no tokenizer can be made of it.
    """
    folder, data = Path(config.output.folder), Path(config.data.folder)
    check_folder(config, resume=resume)
    bleu = bleu_score(config.data.bleu_tokenizer)
    start = load_checkpoint(Path(config.init_from)) if config.init_from else None
    texts = read_pairs(data / name for name in config.data.train)
    held_out_texts = read_pairs(data / name for name in config.data.valid)
    # Several processes may share the folder: the first one writes what the others read.
    with processes().main_process_first():
        if processes().is_main_process:
            _prepare_folder(config, texts, resume=resume, say=say)
        tokenizer = open_tokenizer(folder / BEST)
    torch.manual_seed(config.training.seed)
    model = Transformer(_model_config(config, tokenizer)) if start is None else start
    if tokenizer.size > model.config.vocab_size:
        raise CheckpointError(
            f"{config.init_from}: the tokenizer has {tokenizer.size} entries, the model {model.config.vocab_size}"
        )
    positions = model.config.max_positions
    pairs = encode_pairs(texts, tokenizer, min(config.data.max_tokens, positions))
    held_out = encode_pairs(held_out_texts, tokenizer, positions)
    if processes().is_main_process:
        _write_exam_sentences(held_out.texts, folder / BEST)
    say(_data_line(len(texts), len(pairs.ids), len(held_out_texts), len(held_out.ids)))
    size = sum(parameter.numel() for parameter in model.parameters())
    say(f"model: {size:,} parameters, vocabulary of {model.config.vocab_size:,}")
    trainer = Trainer(
        model,
        pairs.ids,
        held_out.ids,
        config.training,
        folder,
        score=translation_scorer(held_out, tokenizer, bleu),
        observe=observe,
        should_stop=should_stop,
    )
    return trainer.run(resume=resume)


def processes() -> PartialState:
    """Which of the processes of this run is this one."""
    # As the trainer's Accelerator asks; who asks first decides.
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


def check_folder(config: RunConfig, *, resume: bool) -> None:
    """Refuse to overwrite a run, and to go on with one that is not there or has other settings."""
    folder = Path(config.output.folder)
    state, before = folder / STATE_FILE, folder / CONFIG_FILE
    if not resume:
        if state.exists():
            raise CheckpointError(
                f"{folder} already holds a training run: go on with it by --resume, or choose another output.folder"
            )
        if (folder / BEST / WEIGHTS_FILE).exists():
            raise CheckpointError(f"{folder / BEST} already holds a checkpoint: choose another output.folder")
    elif not state.exists():
        raise CheckpointError(f"no run to resume: {state} does not exist")
    elif before.exists() and (changes := changed_settings(load_run_config(before), config)):
        raise CheckpointError(
            f"{folder} belongs to a run with other settings: {'; '.join(changes)}; "
            "keep these as they were, or train into another output.folder"
        )


def _prepare_folder(config: RunConfig, texts: Sequence[TextPair], *, resume: bool, say: Callable[[str], None]) -> None:
    """Write the resolved configuration and, for a new run, the tokenizer's files."""
    folder = Path(config.output.folder)
    best = folder / BEST
    best.mkdir(parents=True, exist_ok=True)
    with replacing(folder / CONFIG_FILE) as path:
        path.write_text(to_toml(config), "utf-8")
    if resume:
        say("tokenizer: as before")
    elif config.init_from:
        say(f"tokenizer: that of {config.init_from}")
        start = Path(config.init_from)
        open_tokenizer(start)  # refuses damaged files, under the name that the user knows
        for name in tokenizer_files(start):
            shutil.copy(start / name, best / name)
    else:
        say(f"tokenizer: training on {len(texts):,} pairs")
        train_tokenizer(texts, config.tokenizer, best)


def _write_exam_sentences(held_out: Sequence[TextPair], best: Path) -> None:
    """Leave some sentences with the checkpoint, from all over the held-out text, for the exam of an export."""
    spread = held_out[:: max(1, len(held_out) // EXAM_SENTENCES)][:EXAM_SENTENCES]
    with replacing(best / SENTENCES) as path:
        path.write_text("".join(f"{' '.join(pair.source.split())}\n" for pair in spread), "utf-8")


def _model_config(config: RunConfig, tokenizer: Tokenizer) -> ModelConfig:
    special = tokenizer.special
    from_tokenizer = {
        "vocab_size": tokenizer.size,
        "pad_token_id": special.pad,
        "decoder_start_token_id": special.start,
        "eos_token_id": special.eos,
    }
    return msgspec.convert({**config.model, **from_tokenizer}, ModelConfig)


def _data_line(texts: int, pairs: int, held_out_texts: int, held_out: int) -> str:
    left_out = texts - pairs, held_out_texts - held_out
    note = "; left out as too long: {:,} and {:,}".format(*left_out) if any(left_out) else ""
    return f"data: {pairs:,} pairs to train on, {held_out:,} held out{note}"


def bleu_score(tokenizer: str) -> BLEU:
    """BLEU of sacreBLEU over words as `tokenizer` splits them."""
    try:
        return BLEU(tokenize=tokenizer, force=True)  # forced: text that is already split is no reason to warn
    except KeyError:
        known = ", ".join(BLEU.TOKENIZERS)
        raise ConfigError(f"data.bleu_tokenizer is {tokenizer!r}, expected one of {known}") from None
    except RuntimeError as error:
        raise ConfigError(f"data.bleu_tokenizer {tokenizer!r}: {one_line(error)}") from None


def translation_scorer(held_out: Encoded, tokenizer: Tokenizer, bleu: BLEU) -> Scorer:
    """A function that translates the sources of `held_out` greedily and gives BLEU and chrF of the result."""
    sources = [pair.source for pair in held_out.ids]
    references = [[pair.target for pair in held_out.texts]]
    chrf = CHRF()

    def score(model: Transformer) -> dict[str, float]:
        outputs = translate_ids(model, sources, tokenizer)
        return {
            "bleu": bleu.corpus_score(outputs, references).score,
            "chrf": chrf.corpus_score(outputs, references).score,
        }

    return score


def translate_ids(model: Transformer, sources: Sequence[list[int]], tokenizer: Tokenizer, size: int = 64) -> list[str]:
    """Greedy translations by the model in PyTorch, in the order of `sources`.

    One of n ids has at most 3 n + 20, where n is the longest source of its batch of `size`.
    """
    backend = TorchBackend(model)
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    texts = [""] * len(sources)
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        batch = [sources[index] for index in chosen]
        longest = min(3 * len(batch[-1]) + 20, model.config.max_positions)
        config = GenerationConfig(max_length=longest)
        found = generate(backend, batch, config, tokenizer.special, model.config.max_positions)
        for index, hypotheses in zip(chosen, found, strict=True):
            texts[index] = tokenizer.decode(hypotheses[0].ids)
    return texts

"""A training run from its configuration: text to ids, model, training loop, scores, loss curve."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec

from exporters.reference import TorchBackend
from models.checkpoint import load_checkpoint
from models.config import ModelConfig
from models.training import BEST, Metrics, Scorer, Trainer
from models.training_state import Progress
from models.transformer import Transformer
from runtime.generation import GenerationConfig, generate
from runtime.tokenizer import TOKENIZER_FILES, Tokenizer

from .config import RunConfig
from .corpus import TextPair, encode_pairs, read_pairs, train_tokenizer


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
    """
    folder = Path(config.output.folder)
    data = Path(config.data.folder)
    texts = read_pairs(data / name for name in config.data.train)
    held_out = read_pairs(data / name for name in config.data.valid)
    best = folder / BEST
    if config.init_from:
        tokenizer, model = _fine_tuned(Path(config.init_from), config, best)
    else:
        reuse = resume and (best / TOKENIZER_FILES[0]).exists()
        say("tokenizer: " + ("as before" if reuse else f"training on {len(texts):,} pairs"))
        tokenizer = Tokenizer(best) if reuse else train_tokenizer(texts, config.tokenizer, best)
        model = Transformer(_model_config(config, tokenizer))
    longest = min(config.data.max_tokens, model.config.max_positions)
    pairs = encode_pairs(texts, tokenizer, longest)
    size = sum(parameter.numel() for parameter in model.parameters())
    say(f"data: {len(pairs):,} pairs to train on ({len(texts) - len(pairs):,} longer than {longest} tokens left out)")
    say(f"model: {size:,} parameters, vocabulary of {model.config.vocab_size:,}")
    trainer = Trainer(
        model,
        pairs,
        encode_pairs(held_out, tokenizer, longest),
        config.training,
        folder,
        score=translation_scorer(held_out, tokenizer, config.data.bleu_tokenizer),
        observe=observe,
        should_stop=should_stop,
    )
    return trainer.run(resume=resume)


def _model_config(config: RunConfig, tokenizer: Tokenizer) -> ModelConfig:
    special = tokenizer.special
    from_tokenizer = {
        "vocab_size": tokenizer.size,
        "pad_token_id": special.pad,
        "decoder_start_token_id": special.start,
        "eos_token_id": special.eos,
    }
    try:
        return msgspec.convert({**config.model, **from_tokenizer}, ModelConfig)
    except msgspec.ValidationError as error:
        raise click.ClickException(f"model: {error}") from None


def _fine_tuned(start: Path, config: RunConfig, best: Path) -> tuple[Tokenizer, Transformer]:
    """The checkpoint at `start` and its tokenizer, whose files go along into the new run."""
    if config.model:
        raise click.ClickException(
            "with init_from the model's settings come from that checkpoint: remove the section [model]"
        )
    tokenizer, model = Tokenizer(start), load_checkpoint(start)
    best.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (start / name).exists() and start.resolve() != best.resolve():
            shutil.copy(start / name, best / name)
    return tokenizer, model


def translation_scorer(pairs: Sequence[TextPair], tokenizer: Tokenizer, bleu_tokenizer: str) -> Scorer:
    """A function that translates the sources of `pairs` greedily and gives BLEU and chrF of the result."""
    import sacrebleu

    sources = [tokenizer.encode(pair.source) for pair in pairs]
    references = [[pair.target for pair in pairs]]

    def score(model: Transformer) -> dict[str, float]:
        outputs = translate_ids(model, sources, tokenizer)
        bleu = sacrebleu.corpus_bleu(outputs, references, tokenize=bleu_tokenizer)
        return {"bleu": bleu.score, "chrf": sacrebleu.corpus_chrf(outputs, references).score}

    return score


def translate_ids(model: Transformer, sources: Sequence[list[int]], tokenizer: Tokenizer, size: int = 64) -> list[str]:
    """Greedy translations by the model in PyTorch, in the order of `sources`, at most three times their length and 20."""
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

"""The training loop: section 5 of the paper, with exact resume, validation, best checkpoint and averaging.

One process or many: `accelerate launch` starts the processes, `Accelerator` shards the batches and adds up gradients.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn.utils import clip_grad_norm_

from .checkpoint import WEIGHTS_FILE, average_weights, save_checkpoint
from .data import Batch, Pair, TokenBatchSampler, evaluation_batches, training_loader
from .errors import CheckpointError, ConfigError, TrainingDivergedError
from .files import replacing
from .objective import cross_entropy, inverse_square_root
from .training_state import STATE_FILE, Progress, load_progress, load_state, save_state
from .transformer import Transformer

METRICS_FILE = "metrics.jsonl"
BEST, EPOCHS = "best", "epochs"


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to train. Adam with betas (0.9, 0.98) and epsilon 1e-9 as in section 5.3."""

    epochs: int = 30
    batch_tokens: int = 1400
    """Padded tokens of one batch on one device, on the longer side."""
    learning_rate: float = 9e-4
    """At its peak, after `warmup_steps`."""
    warmup_steps: int = 1000
    label_smoothing: float = 0.1
    clip_norm: float = 1.0
    """Largest norm of the gradient of all weights together."""
    seed: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    freeze: tuple[str, ...] = ()
    """Parts that keep their weights: prefixes of weight names, such as "encoder" or "decoder.layers.0"."""
    average: int = 5
    """How many of the last epochs' weights are averaged at the end; 0 for none."""
    save_steps: int = 200
    """Steps between two saves of the state that `resume` starts from."""
    log_steps: int = 20

    def __post_init__(self) -> None:
        positive = "epochs batch_tokens learning_rate warmup_steps clip_norm save_steps log_steps"
        problems = [
            f"{name} is {getattr(self, name)}, expected more than 0"
            for name in positive.split()
            if not getattr(self, name) > 0
        ]
        if not 0 <= self.label_smoothing < 1:
            problems.append(f"label_smoothing is {self.label_smoothing}, expected 0 <= label_smoothing < 1")
        if self.learning_rate == math.inf:
            problems.append("learning_rate is inf, expected a finite number")
        if not 0 <= self.seed < 2**32:
            problems.append(f"seed is {self.seed}, expected 0 <= seed < 2^32")
        if self.average < 0:
            problems.append(f"average is {self.average}, expected 0 or more")
        if problems:
            raise ConfigError("training: " + "; ".join(problems))


class StepMetrics(msgspec.Struct, tag="step", tag_field="event", frozen=True):
    """Means over the last `log_steps` steps, fewer after the start of an epoch or of a resumed run."""

    step: int
    epoch: float
    loss: float
    learning_rate: float
    tokens_per_second: float
    """Target tokens of one process."""
    seconds: float
    """Training time since the very start, interruptions left out."""


class ValidationMetrics(msgspec.Struct, tag="validation", tag_field="event", frozen=True):
    """After an epoch, and once more for the averaged weights."""

    step: int
    epoch: float
    loss: float
    """Cross-entropy in nats a token, without smoothing."""
    perplexity: float
    scores: dict[str, float]
    """BLEU and the like, more is better; empty where no scorer was given."""
    best: bool
    seconds: float
    averaged: int = 1
    """Of how many epochs' weights this is the mean."""


Metrics = StepMetrics | ValidationMetrics
Scorer = Callable[[Transformer], dict[str, float]]
"""Scores a model on held-out text; the first score chooses the best checkpoint."""


class Trainer:
    """Trains one model into one folder.

    The folder receives `metrics.jsonl`, `state.safetensors` (for `resume`), `epochs/` (the last epochs' weights) and
    `best/`: a checkpoint of the epoch, or average of epochs, with the best first score, without a scorer the lowest
    loss.

    Args:
        model: Its present weights are the starting point, so that fine-tuning is training of a loaded checkpoint.
        pairs: Training examples.
        held_out: Examples for the validation loss.
        config: How to train.
        folder: Where everything goes.
        score: Scores the model after each epoch, on the main process only.
        observe: Called with each line of metrics on the main process.
        should_stop: Asked after each step; when it says True the state is saved and the run ends early.
    """

    def __init__(
        self,
        model: Transformer,
        pairs: Sequence[Pair],
        held_out: Sequence[Pair],
        config: TrainingConfig,
        folder: Path,
        *,
        score: Scorer | None = None,
        observe: Callable[[Metrics], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        if not pairs or not held_out:
            raise ConfigError(f"training needs examples: got {len(pairs)} to train on and {len(held_out)} held out")
        freeze(model, config.freeze)
        self.accelerator = Accelerator(
            mixed_precision="bf16" if config.precision == "bf16" else "no",
            dataloader_config=DataLoaderConfiguration(even_batches=False),
        )
        self.config, self.folder = config, folder
        self._held_out, self._score, self._observe, self._should_stop = held_out, score, observe, should_stop
        self._sampler = TokenBatchSampler(pairs, config.batch_tokens, config.seed, self.accelerator.num_processes)
        self.model = model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=config.learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=True)
        self._parallel, self._optimizer, self._loader = self.accelerator.prepare(
            model, optimizer, training_loader(pairs, self._sampler, model.config)
        )
        self.progress = Progress(fingerprint=_fingerprint(model, pairs, config))

    def run(self, *, resume: bool = False) -> Progress:
        """Train to the last epoch and average.

        Args:
            resume: Go on from the state in the folder; otherwise a folder that holds one is refused.

        Raises:
            CheckpointError: nothing to resume, a run that would be overwritten, or one with other settings or data.
            TrainingDivergedError: the loss or the gradient is not finite.
        """
        state = self.folder / STATE_FILE
        if resume:
            self._resume(state)
        elif state.exists():
            raise CheckpointError(f"{self.folder} already holds a training run: resume it or choose another folder")
        else:
            torch.manual_seed(self.config.seed + self.accelerator.process_index)
        self._forget_later_metrics()
        while self.progress.epoch < self.config.epochs:
            if not self._train_epoch():
                return self.progress
        self._average()
        return self.progress

    def _train_epoch(self) -> bool:
        """Train from `progress.batch` to the end of the epoch and validate; False when asked to stop before."""
        self._sampler.set_epoch(self.progress.epoch)
        # accelerate's loader counts epochs from 0 in each process and tells a sampler of its own accord.
        self._loader.set_epoch(self.progress.epoch)
        batches = sum(1 for _ in self._sampler) // self.accelerator.num_processes
        self.model.train()
        meter = _Meter(self.progress.seconds)
        for place, batch in enumerate(self._loader):
            if place < self.progress.batch:
                continue
            self.progress.step += 1
            loss = self._update(Batch(*batch))
            meter.add(loss, batch.tokens)
            self.progress.batch += 1
            self.progress.seconds = meter.total_seconds()
            if self.progress.step % self.config.log_steps == 0:
                self._record(meter.metrics(self.progress, batches, self._rate()))
            if self.progress.step % self.config.save_steps == 0:
                self._save_state()
            if self._asked_to_stop():
                self._save_state()
                return False
        self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
        self._validate()
        self._keep_epoch()
        self._save_state()
        return True

    def _update(self, batch: Batch) -> float:
        """One step of the optimiser; returns the loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        with self.accelerator.autocast():
            logits = self._parallel(batch.source_ids, batch.source_mask, batch.target_ids)
            loss = cross_entropy(logits, batch.labels, self.config.label_smoothing)
        self.accelerator.backward(loss)
        norm = clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        value = loss.item()
        if not (math.isfinite(value) and math.isfinite(norm.item())):
            raise TrainingDivergedError(
                f"training diverged at step {self.progress.step}: loss {value}, gradient norm {norm.item()}, rate "
                f"{self._rate():.3g}; lower training.learning_rate or raise training.warmup_steps, then start again"
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        return value

    def _asked_to_stop(self) -> bool:
        """Whether any process was, so that all stop after the same step."""
        asked = torch.tensor([self._should_stop()], device=self.accelerator.device)
        return bool(self.accelerator.gather(asked).any())

    def _rate(self) -> float:
        return inverse_square_root(self.progress.step, self.config.learning_rate, self.config.warmup_steps)

    def _validate(self, averaged: int = 1) -> None:
        """Validate the weights in `self.model`; they become the best checkpoint if they are."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.model.eval()
            loss = validation_loss(self.model, self._held_out, self.accelerator.device)
            if not math.isfinite(loss):
                raise TrainingDivergedError(f"the validation loss after epoch {self.progress.epoch} is {loss}")
            scores = self._score(self.model) if self._score else {}
            value = next(iter(scores.values()), -loss)
            best = self.progress.best is None or value > self.progress.best
            if best:
                self.progress.best = value
                save_checkpoint(self.model, self.folder / BEST)
            place, seconds = float(self.progress.epoch), self.progress.seconds
            self._record(
                ValidationMetrics(
                    self.progress.step, place, loss, math.exp(min(loss, 100.0)), scores, best, seconds, averaged
                )
            )
        self.accelerator.wait_for_everyone()

    def _keep_epoch(self) -> None:
        """Keep this epoch's weights for the average, and drop those that are no longer among the last."""
        if self.config.average and self.accelerator.is_main_process:
            save_checkpoint(self.model, self.folder / EPOCHS / f"{self.progress.epoch:04d}")
            for old in self._last_epochs()[: -self.config.average]:
                for file in old.parent.iterdir():
                    file.unlink()
                old.parent.rmdir()

    def _last_epochs(self) -> list[Path]:
        return sorted((self.folder / EPOCHS).glob(f"*/{WEIGHTS_FILE}"))

    def _average(self) -> None:
        paths = self._last_epochs()[-self.config.average :]
        if self.config.average < 2 or len(paths) < 2:
            return
        weights = average_weights(paths)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        self._validate(averaged=len(paths))

    def _save_state(self) -> None:
        # One row of random state a process.
        random_states = {"cpu": self.accelerator.gather(torch.get_rng_state()[None].to(self.accelerator.device)).cpu()}
        if self.accelerator.device.type == "cuda":
            own = torch.cuda.get_rng_state()[None].to(self.accelerator.device)
            random_states["cuda"] = self.accelerator.gather(own).cpu()
        if self.accelerator.is_main_process:
            save_state(self.folder / STATE_FILE, self.model, self._optimizer.optimizer, random_states, self.progress)

    def _resume(self, path: Path) -> None:
        progress = load_progress(path)
        if progress.fingerprint != self.progress.fingerprint:
            raise CheckpointError(
                f"{path} belongs to a run with other settings or data: use these, or train into another folder"
            )
        random_states = load_state(path, self.model, self._optimizer.optimizer)
        before, now = random_states["cpu"].shape[0], self.accelerator.num_processes
        if before != now:
            raise CheckpointError(f"{path} belongs to a run of {before} process(es), this one has {now}")
        if ("cuda" in random_states) != (self.accelerator.device.type == "cuda"):
            raise CheckpointError(
                f"{path} belongs to a run on another kind of device than {self.accelerator.device.type}"
            )
        self.progress = progress
        # torch reads a row from the beginning of its storage, hence the copies.
        torch.set_rng_state(random_states["cpu"][self.accelerator.process_index].clone())
        if "cuda" in random_states:
            torch.cuda.set_rng_state(random_states["cuda"][self.accelerator.process_index].clone())

    def _record(self, metrics: Metrics) -> None:
        if self.accelerator.is_main_process:
            with (self.folder / METRICS_FILE).open("ab") as file:
                file.write(msgspec.json.encode(metrics) + b"\n")
            self._observe(metrics)

    def _forget_later_metrics(self) -> None:
        """Drop what was logged after the state that this run starts from, which is before any averaging."""

        def earlier(metrics: Metrics) -> bool:
            if metrics.step > self.progress.step or not self.progress.step:
                return False
            # A state of the last step of an epoch is from before its validation.
            return isinstance(metrics, StepMetrics) or (metrics.epoch <= self.progress.epoch and metrics.averaged == 1)

        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = [msgspec.json.encode(metrics) + b"\n" for metrics in read_metrics(self.folder) if earlier(metrics)]
            with replacing(self.folder / METRICS_FILE) as path:
                path.write_bytes(b"".join(kept))


class _Meter:
    """Adds up loss and tokens between two lines of metrics."""

    def __init__(self, seconds_before: float) -> None:
        self._origin = time.monotonic() - seconds_before
        self._reset()

    def _reset(self) -> None:
        self._loss, self._steps, self._tokens, self._start = 0.0, 0, 0, time.monotonic()

    def add(self, loss: float, tokens: int) -> None:
        self._loss, self._steps, self._tokens = self._loss + loss, self._steps + 1, self._tokens + tokens

    def total_seconds(self) -> float:
        return time.monotonic() - self._origin

    def metrics(self, progress: Progress, batches: int, rate: float) -> StepMetrics:
        speed = self._tokens / max(time.monotonic() - self._start, 1e-9)
        epoch = progress.epoch + progress.batch / batches
        line = StepMetrics(progress.step, epoch, self._loss / self._steps, rate, speed, progress.seconds)
        self._reset()
        return line


def freeze(model: Transformer, prefixes: Sequence[str]) -> None:
    """Take the weights whose names begin with one of `prefixes` out of training; a shared weight has several names.

    Raises:
        ConfigError: a prefix fits no weight, or nothing is left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for prefix in prefixes:
        if not any(_begins(name, prefix) for name, _ in named):
            parts = sorted({name.rsplit(".", 1)[0] for name, _ in named})
            raise ConfigError(f"training.freeze: no weight begins with {prefix!r}; parts are {', '.join(parts)}")
    frozen = {id(parameter) for name, parameter in named if any(_begins(name, prefix) for prefix in prefixes)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) not in frozen)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("training.freeze leaves nothing to train")


def _begins(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@torch.no_grad()
def validation_loss(model: Transformer, pairs: Sequence[Pair], device: torch.device | None = None) -> float:
    """Cross-entropy of `pairs` in nats a target token, the mean over all tokens of all pairs."""
    total, count = 0.0, 0
    for batch in evaluation_batches(pairs, model.config):
        source_ids, source_mask, target_ids, labels = (tensor.to(device) for tensor in batch)
        total += cross_entropy(model(source_ids, source_mask, target_ids), labels).item() * batch.tokens
        count += batch.tokens
    return total / count


def read_metrics(folder: Path) -> list[Metrics]:
    """The lines of `metrics.jsonl` in `folder`, none where there is no such file. A last line cut short is left out."""
    try:
        lines = (folder / METRICS_FILE).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=Metrics) for line in lines if line.endswith(b"\n")]


def _fingerprint(model: Transformer, pairs: Sequence[Pair], config: TrainingConfig) -> str:
    free = {"epochs", "average", "save_steps", "log_steps"}
    settings: Mapping[str, object] = {k: v for k, v in msgspec.to_builtins(config).items() if k not in free}
    digest = hashlib.sha256(msgspec.json.encode([settings, model.config, pairs]))
    return digest.hexdigest()

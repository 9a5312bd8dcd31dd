"""The engines that can be measured, behind one method. Whatever is heavy is imported when one of them is opened."""

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from runtime.backend import Backend
from runtime.bundle import Passport, read_passport
from runtime.decoding import Decoding
from runtime.generation import generate, pad
from runtime.generation_config import SAMPLING_OPTIONS, GenerationConfig
from runtime.session import Provider
from runtime.translator import Translator

from .workload import Workload

EngineName = Literal["seq2onnx", "torch", "ctranslate2", "transformers"]
Outputs = list[list[int]]
VOCABULARIES = {
    "source": ("shared_vocabulary.json", "source_vocabulary.json"),
    "target": ("shared_vocabulary.json", "target_vocabulary.json"),
}
"""Of a model of CTranslate2: the place in the list is the id."""


class Entry(NamedTuple):
    """Which engine is measured, on what, and how it is set."""

    name: str
    """What people read."""
    engine: EngineName
    folder: Path
    """The bundle, or the model as that engine reads it."""
    threads: int
    provider: Provider = "cpu"
    bundle: Path | None = None
    """For "torch": whose search, special ids and limits are used."""
    compute_type: str = "default"
    """For "ctranslate2"."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the engine reads when it is loaded."""


class Engine(Protocol):
    """One model, ready to translate."""

    def translate(self, workload: Workload) -> Outputs:
        """Best output of each row, batch after batch; without start token and EOS."""


class StepTimes(NamedTuple):
    """Seconds from the source to the first token, several times, and of every step after it."""

    first: list[float]
    steps: list[float]
    """The first of them follows the prompt, each later one a token more."""


def open_engine(entry: Entry) -> Engine:
    """Load what `entry` names. Errors are those of the engine."""
    return ENGINES[entry.engine](entry)


def search_options(defaults: GenerationConfig, workload: Workload) -> GenerationConfig:
    """The bundle's way to search, but for what `workload` says."""
    plain = GenerationConfig()
    changes: dict[str, Any] = {name: getattr(plain, name) for name in SAMPLING_OPTIONS}
    changes |= {"do_sample": False, "num_beams": workload.beams, "num_return_sequences": 1}
    if workload.tokens is not None:
        changes |= {"min_new_tokens": workload.tokens, "max_new_tokens": workload.tokens, "forced_eos_token_id": None}
    return msgspec.structs.replace(defaults, **changes)


class BundleEngine:
    """This runtime."""

    def __init__(self, entry: Entry) -> None:
        self._passport = read_passport(entry.folder)
        self._translator = Translator.open(entry.folder, entry.provider, entry.threads)

    def translate(self, workload: Workload) -> Outputs:
        """See `Engine.translate`."""
        config = search_options(self._passport.generation, workload)
        found: Outputs = []
        for batch in workload.batches:
            budget = max(map(len, batch)) * len(batch) * workload.beams  # as it is given, not cut into smaller ones
            outputs = self._translator.generate(batch, config, batch_tokens=budget)
            found += [_without_end(best.ids, self._passport.special.eos) for best, *_ in outputs]
        return found

    def step_times(self, batch: list[list[int]], beams: int, steps: int, starts: int) -> StepTimes:
        """Time the parts of a search for `batch`: `starts` times up to the first token, then `steps` steps.

        With several beams a step is what a beam search does when every beam goes on from its neighbour.
        """
        passport = self._passport
        prompt = tuple(passport.generation.decoder_input_ids)
        if prompt[:1] != (passport.special.start,):
            prompt = (passport.special.start, *prompt)
        first = []
        for _ in range(starts):
            began = time.perf_counter()
            decoding = Decoding(self._translator.backend, *pad(batch, passport.special.pad))
            decoding.start(prompt, branching=beams > 1)
            _, tokens = decoding.best(1, ())  # (rows, 1)
            first.append(time.perf_counter() - began)
        tokens = tokens.repeat(beams, axis=1)  # (rows, beams)
        origins = np.zeros_like(tokens)
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            if beams > 1:
                decoding.branch(tokens, origins)
            else:
                decoding.step(tokens[:, 0])
            _, best = decoding.best(1, ())
            times.append(time.perf_counter() - began)
            tokens = best.reshape(tokens.shape)
            origins = np.tile((np.arange(beams) + 1) % beams, (len(batch), 1))
        return StepTimes(first, times)


class TorchEngine:
    """The model in PyTorch with caches, under this project's search."""

    def __init__(self, entry: Entry) -> None:
        import torch

        from exporters.reference import TorchBackend
        from exporters.source import open_source

        if entry.bundle is None:
            raise ValueError("PyTorch needs a bundle to search as")
        torch.set_num_threads(entry.threads)
        model = open_source(entry.folder).model.to(entry.provider)
        self._backend: Backend[Any] = TorchBackend(model)
        self._passport: Passport = read_passport(entry.bundle)

    def translate(self, workload: Workload) -> Outputs:
        """See `Engine.translate`."""
        passport = self._passport
        config = search_options(passport.generation, workload)
        found: Outputs = []
        for batch in workload.batches:
            outputs = generate(self._backend, batch, config, passport.special, passport.dims.max_positions)
            found += [_without_end(best.ids, passport.special.eos) for best, *_ in outputs]
        return found


class CTranslate2:
    """CTranslate2 on a folder that it converted, or that was written for it."""

    def __init__(self, entry: Entry) -> None:
        import ctranslate2

        self._translator = ctranslate2.Translator(
            str(entry.folder),
            device=entry.provider,
            compute_type=entry.compute_type,
            inter_threads=1,
            intra_threads=entry.threads,
        )
        self._source = _vocabulary(entry.folder, "source")
        self._target = {piece: index for index, piece in enumerate(_vocabulary(entry.folder, "target"))}

    def translate(self, workload: Workload) -> Outputs:
        """See `Engine.translate`."""
        limits: dict[str, Any] = {}
        if workload.tokens is not None:
            limits = {"min_decoding_length": workload.tokens, "max_decoding_length": workload.tokens}
        found: Outputs = []
        for batch in workload.batches:
            pieces = [[self._source[index] for index in row] for row in batch]
            results = self._translator.translate_batch(pieces, beam_size=workload.beams, **limits)
            found += [[self._target[piece] for piece in result.hypotheses[0]] for result in results]
        return found


class Transformers:
    """`generate` of transformers, in float32."""

    def __init__(self, entry: Entry) -> None:
        import torch
        import transformers

        if not entry.folder.is_dir():  # else it takes it for a name on the internet
            raise FileNotFoundError(f"{entry.folder} does not exist: expected a folder that transformers saved")
        hugging_face: Any = transformers  # annotated in part only
        hugging_face.utils.logging.disable_progress_bar()
        hugging_face.utils.logging.set_verbosity_error()
        torch.set_num_threads(entry.threads)
        loader = hugging_face.AutoModelForSeq2SeqLM
        self._model = loader.from_pretrained(entry.folder, dtype=torch.float32).eval().to(entry.provider)
        self._defaults = self._model.generation_config

    def translate(self, workload: Workload) -> Outputs:
        """See `Engine.translate`."""
        import torch

        model = self._model
        # The model's own, since `generate` fills in from there whatever is None in a call.
        options = model.generation_config = copy.deepcopy(self._defaults)
        options.update(num_beams=workload.beams, do_sample=False, num_return_sequences=1)
        if workload.tokens is not None:
            options.update(
                min_new_tokens=workload.tokens,
                max_new_tokens=workload.tokens,
                max_length=None,
                forced_eos_token_id=None,
            )
        found: Outputs = []
        for batch in workload.batches:
            ids, mask = (torch.from_numpy(array).to(model.device) for array in pad(batch, model.config.pad_token_id))
            with torch.inference_mode():
                rows = model.generate(input_ids=ids, attention_mask=mask)
            found += [_without_end(row[1:], model.config.eos_token_id) for row in rows.tolist()]
        return found


ENGINES: dict[EngineName, Callable[[Entry], Engine]] = {
    "seq2onnx": BundleEngine,
    "torch": TorchEngine,
    "ctranslate2": CTranslate2,
    "transformers": Transformers,
}


def _without_end(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos)] if eos in ids else ids


def _vocabulary(folder: Path, side: str) -> list[str]:
    path = next((folder / name for name in VOCABULARIES[side] if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} is no model of CTranslate2: it has none of {', '.join(VOCABULARIES[side])}")
    return msgspec.json.decode(path.read_bytes(), type=list[str])

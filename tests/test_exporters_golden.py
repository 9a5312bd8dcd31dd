"""The exam as it is written: reproducible, and measured from what is recorded."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from exporters_support import SMALL, VARIANTS, Export, examiner, random_model
from runtime_support import TINY

from exporters.golden import COLUMNS, TOPS, Sizes, share_own_errors, special_ids, sweep_sizes
from exporters.modules import module_outputs
from exporters.reference import TorchBackend
from models.config import ModelConfig
from models.layers import KeyValue
from models.transformer import Cache, LayerCache, Transformer
from runtime.exam import Exam
from runtime.generation import GenerationConfig, generate
from runtime.parity.candidate import rollout
from runtime.parity.tolerance import CACHE_TOLERANCE
from runtime.session import OrtBackend
from runtime.tokenizer import open_tokenizer
from runtime.verbs import call

Exports = Callable[[str], Export]
SENTENCES = {"one": [4, 5, 6, 3], "two": [7, 3]}
FEW = Sizes(
    encode=((1, 1), (3, 6)),
    prefill=((2, 6, 3),),
    step=((1, 6, 1), (3, 6, 5)),
    rollout=((2, 6, 8),),
    pool=16,
    columns=None,
    whole=False,
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    config, _, seed = VARIANTS["pre-norm, all shared"]
    return random_model(config, seed)


@pytest.fixture(scope="module")
def written(model: Transformer) -> Exam:
    return examiner(model, 7).write(FEW, SENTENCES)


def plain(exam: Exam) -> Any:
    return msgspec.to_builtins(exam, enc_hook=lambda array: [str(array.dtype), array.tolist()])


def test_the_same_seed_writes_the_same_exam_and_another_seed_another(model: Transformer, written: Exam) -> None:
    assert plain(examiner(model, 7).write(FEW, SENTENCES)) == plain(written)
    other = examiner(model, 8).write(FEW, SENTENCES)
    assert other.graphs[0].inputs["input_ids"].tolist() != written.graphs[0].inputs["input_ids"].tolist()


def test_the_examiner_leaves_the_model_alone() -> None:
    model = random_model(VARIANTS["as Marian, opset 18"].config)
    before = copy.deepcopy(model.state_dict())
    model.train()
    examiner(model, 0).write(FEW, SENTENCES)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert next(model.parameters()).dtype == torch.float32
    assert model.training


def test_cases_have_the_sizes_that_were_asked_for(written: Exam) -> None:
    shapes = {
        (case.verb, case.label): [tuple(case.inputs[name].shape) for name in case.inputs][:3] for case in written.graphs
    }
    assert shapes["encode", "B=3 S=6"] == [(3, 6), (3, 6)]
    assert shapes["prefill", "B=2 S=6 T=3"] == [(2, 6), (2, 3), (2, 6, 32)]
    assert shapes["step", "B=3 S=6 P=5"] == [(3, 6), (3, 1), (3, 2, 5, 16)]
    (case,) = written.rollouts
    assert case.target_ids.shape == (2, 8)
    assert case.columns.shape == case.reference.shape == (2, 8, COLUMNS)


def test_target_ids_begin_with_the_start_token(model: Transformer, written: Exam) -> None:
    start = model.config.decoder_start_token_id
    for case in written.graphs:
        if case.verb == "prefill":
            assert (case.inputs["input_ids"][:, 0] == start).all()
    assert all((case.target_ids[:, 0] == start).all() for case in written.rollouts)


def test_answers_are_those_of_float64_rounded_once(model: Transformer, written: Exam) -> None:
    exact = TorchBackend(copy.deepcopy(model).double())
    for case in written.graphs:
        outputs = call(exact, case.verb, case.inputs)
        for name, reference in case.reference.items():
            answer = outputs[name][:, :, -1:] if case.verb == "step" and name != "logits" else outputs[name]
            assert reference.dtype == np.float32
            np.testing.assert_array_equal(reference, answer.astype(np.float32))


def test_pytorch_s_own_error_is_measured_from_the_recorded_answers(model: Transformer, written: Exam) -> None:
    float32 = TorchBackend(copy.deepcopy(model))
    for case in written.graphs:
        outputs = call(float32, case.verb, case.inputs)
        for name, reference in case.reference.items():
            answer = outputs[name][:, :, -1:] if case.verb == "step" and name != "logits" else outputs[name]
            assert case.own_error[name] == np.abs(answer.astype(np.float64) - reference).max()
    (chain,) = written.rollouts
    logits = rollout(float32, chain.source_ids, chain.source_mask, chain.target_ids)
    for place, found in enumerate(logits):
        kept = np.take_along_axis(found, chain.columns[:, place], 1).astype(np.float64)
        assert chain.own_error[place] == np.abs(kept - chain.reference[:, place]).max()
    assert max(chain.own_error) > 0


def test_a_rollout_keeps_the_most_probable_tokens(model: Transformer, written: Exam) -> None:
    (case,) = written.rollouts
    exact = TorchBackend(copy.deepcopy(model).double())
    logits = rollout(exact, case.source_ids, case.source_mask, case.target_ids)
    for place, found in enumerate(logits):
        threshold = np.sort(found, axis=1)[:, -COLUMNS]
        assert (case.reference[:, place] >= threshold[:, None] - 1e-6).all()
        assert (np.diff(case.reference[:, place], axis=1) <= 0).all()


def test_the_most_probable_tokens_stand_beside_each_output(model: Transformer, written: Exam) -> None:
    exact = TorchBackend(copy.deepcopy(model).double())
    assert min(len(set(case.ids)) for case in written.tokens) > 3
    for case in written.tokens:
        kept = TOPS[case.config.num_beams]
        assert case.top_ids.shape == case.top_log_probs.shape == (len(case.ids), kept)
        target = np.array([[model.config.decoder_start_token_id, *case.ids[:-1]]])
        source = np.array([case.source_ids])
        chain = rollout(exact, source, np.ones_like(source), target)
        for place, logits in enumerate(chain):
            log_probs = torch.tensor(logits[0]).log_softmax(-1).numpy()
            best = np.argsort(-log_probs)[:kept]
            assert case.top_ids[place].tolist() == best.tolist()
            np.testing.assert_allclose(case.top_log_probs[place], log_probs[best], rtol=1e-6, atol=1e-6)
        if case.config.num_beams == 1:
            assert case.top_ids[:, 0].tolist() == case.ids


def test_sentences_are_kept_as_text_and_as_ids(written: Exam) -> None:
    tokenizer = open_tokenizer(TINY)
    assert [case.text for case in written.tokens] == ["one", "one", "two", "two"]
    assert [case.label for case in written.tokens[:2]] == ["one, 1 beam", "one, 4 beams"]
    assert [case.config.num_beams for case in written.tokens] == [1, 4, 1, 4]
    for case in written.tokens:
        assert case.source_ids == SENTENCES[case.text]
        assert case.translation == tokenizer.decode(case.ids)
    assert any(case.translation for case in written.tokens)


def test_the_ids_by_which_the_reference_searches_are_kept(model: Transformer, written: Exam) -> None:
    assert written.special == special_ids(model.config)


# The modules inside


def test_small_cases_say_what_the_modules_inside_give(model: Transformer, written: Exam) -> None:
    explained = {case.verb: case for case in written.graphs if case.modules}
    assert [(verb, case.label) for verb, case in explained.items()] == [
        ("encode", "B=2 S=2"),
        ("prefill", "B=2 S=2 T=2"),
        ("step", "B=2 S=2 P=2"),
    ]
    exact, float32 = TorchBackend(copy.deepcopy(model).double()), TorchBackend(copy.deepcopy(model))
    for verb, case in explained.items():
        found = module_outputs(exact.model, partial(call, exact, verb, case.inputs))
        own = module_outputs(float32.model, partial(call, float32, verb, case.inputs))
        assert list(case.modules) == list(found)
        for path, array in case.modules.items():
            np.testing.assert_array_equal(array, found[path].astype(np.float32))
            assert case.module_errors[path] == np.abs(own[path].astype(np.float64) - array).max()
    assert max(explained["encode"].module_errors.values()) > 0


def test_modules_go_by_their_paths_from_the_first_to_the_last(model: Transformer, written: Exam) -> None:
    modules = {case.verb: list(case.modules) for case in written.graphs if case.modules}
    assert modules["encode"][0] == "encoder.embedding"
    assert modules["encode"][-1] == "encoder.norm"
    assert all(path.startswith("encoder.") for path in modules["encode"])
    for layer in range(model.config.encoder_layers):
        assert f"encoder.layers.{layer}.self_attention.out_proj" in modules["encode"]
    assert {"decoder.embedding", "decoder.layers.0.cross_attention.k_proj", "decoder.norm"} <= set(modules["prefill"])
    assert "decoder.layers.0.cross_attention.q_proj" in modules["step"]
    assert "decoder.layers.0.cross_attention.k_proj" not in modules["step"]
    known = dict(model.named_modules())
    assert all(path in known for paths in modules.values() for path in paths)
    last = next(case for case in written.graphs if case.verb == "encode" and case.modules)
    np.testing.assert_array_equal(last.modules["encoder.norm"], last.reference["last_hidden_state"])


def test_every_case_tells_of_its_modules_where_that_is_asked_for(model: Transformer, written: Exam) -> None:
    assert sum(bool(case.modules) for case in written.graphs) == 3 < len(written.graphs)
    exam = examiner(model, 7).write(FEW, SENTENCES, explain_all=True)
    assert all(case.modules and case.modules.keys() == case.module_errors.keys() for case in exam.graphs)
    for case, known in zip(exam.graphs, written.graphs, strict=True):
        assert (case.label, case.own_error) == (known.label, known.own_error)


def test_nobody_looks_at_modules_any_more_when_the_run_is_over(model: Transformer) -> None:
    def give_up() -> None:
        raise RuntimeError("gave up")

    with pytest.raises(RuntimeError, match="gave up"):
        module_outputs(model, give_up)
    module_outputs(model, lambda: None)
    assert not any(module._forward_hooks for module in model.modules())


# Errors of several exams


def test_a_small_exam_takes_over_the_errors_that_a_wider_one_has_seen(model: Transformer) -> None:
    exam, wider = examiner(model, 1).write(FEW, SENTENCES), examiner(model, 2).write(sweep_sizes(20), SENTENCES)
    own = {
        (case.verb, name): max(
            other.own_error[name] for other in (*exam.graphs, *wider.graphs) if other.verb == case.verb
        )
        for case in exam.graphs
        for name in case.own_error
    }
    share_own_errors(exam, wider)
    for case in exam.graphs:
        assert case.own_error == {name: own[case.verb, name] for name in case.reference}


@pytest.mark.parametrize("place", [0, -1])
def test_an_error_that_is_not_a_number_is_taken_over_too(model: Transformer, place: int) -> None:
    exam, wider = examiner(model, 1).write(FEW, SENTENCES), examiner(model, 2).write(FEW, SENTENCES)
    last = [case for case in wider.graphs if case.verb == "step"][place]
    last.own_error["logits"] = np.nan
    share_own_errors(exam, wider)
    assert all(np.isnan(case.own_error["logits"]) for case in exam.graphs if case.verb == "step")
    assert not any(np.isnan(case.own_error["logits"]) for case in exam.graphs if case.verb == "prefill")


# The check of the caches


def test_the_cache_check_finds_nothing_in_a_good_model(written: Exam) -> None:
    assert written.cache.prefixes == 12
    assert 0 <= written.cache.error < CACHE_TOLERANCE


class ForgetsPosition(Transformer):
    """A step that always takes itself to stand at position 0."""

    def step(
        self, input_ids: torch.Tensor, encoder_attention_mask: torch.Tensor, cache: Cache
    ) -> tuple[torch.Tensor, Cache]:
        pasts: list[KeyValue | None] = [layer.decoder for layer in cache]
        states, grown = self.decoder(input_ids, encoder_attention_mask, pasts, [layer.encoder for layer in cache])
        return self.output(states), grown


class SeesTheFuture(Transformer):
    """A prefill without the causal mask: the past of a longer prefix is another one."""

    def prefill(
        self, input_ids: torch.Tensor, memory: torch.Tensor, encoder_attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, Cache]:
        logits, cache = super().prefill(input_ids.flip(1), memory, encoder_attention_mask)
        return logits.flip(1), tuple(
            LayerCache(KeyValue(*(tensor.flip(2) for tensor in layer.decoder)), layer.encoder) for layer in cache
        )


class GivesNan(Transformer):
    """Not a number from the second step on."""

    def step(
        self, input_ids: torch.Tensor, encoder_attention_mask: torch.Tensor, cache: Cache
    ) -> tuple[torch.Tensor, Cache]:
        logits, grown = super().step(input_ids, encoder_attention_mask, cache)
        return logits * torch.nan if cache[0].decoder.key.shape[2] > 1 else logits, grown


class WrongAfterOneToken(Transformer):
    """A step that is wrong after a prefix of one token alone."""

    def step(
        self, input_ids: torch.Tensor, encoder_attention_mask: torch.Tensor, cache: Cache
    ) -> tuple[torch.Tensor, Cache]:
        logits, grown = super().step(input_ids, encoder_attention_mask, cache)
        return logits + 1e-6 * (cache[0].decoder.key.shape[2] == 1), grown


@pytest.mark.parametrize("fault", [ForgetsPosition, SeesTheFuture, GivesNan, WrongAfterOneToken])
def test_the_cache_check_finds_a_step_that_is_not_the_forward_pass(fault: type[Transformer]) -> None:
    config = VARIANTS["pre-norm, all shared"].config
    model = fault(config)
    model.load_state_dict(random_model(config).state_dict())
    assert not examiner(model, 0).check_cache().error <= CACHE_TOLERANCE


def test_a_model_of_few_positions_can_be_examined() -> None:
    model = random_model(ModelConfig(vocab_size=45, **{**SMALL, "max_positions": 8}))
    exam = examiner(model, 0).write(sweep_sizes(8), {"long": [4] * 8})
    assert exam.cache.prefixes == 8


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "config",
    [GenerationConfig(), GenerationConfig(num_beams=4, num_return_sequences=4, length_penalty=0.6)],
    ids=["greedy", "beams"],
)
def test_search_over_onnx_runtime_finds_what_search_over_pytorch_finds(
    exports: Exports, name: str, config: GenerationConfig
) -> None:
    export = exports(name)
    special, positions = special_ids(export.config), export.config.max_positions
    random = np.random.default_rng(5)
    sources = [
        random.integers(4, export.config.encoder_vocab_size, random.integers(1, positions)).tolist() for _ in range(12)
    ]
    ours = generate(OrtBackend(export.bundle, threads=1), sources, config, special, positions)
    theirs = generate(TorchBackend(export.model), sources, config, special, positions)
    assert [[found.ids for found in hypotheses] for hypotheses in ours] == [
        [found.ids for found in hypotheses] for hypotheses in theirs
    ]
    np.testing.assert_allclose(
        [[found.score for found in hypotheses] for hypotheses in ours],
        [[found.score for found in hypotheses] for hypotheses in theirs],
        atol=1e-3,
    )
    assert len({tuple(hypotheses[0].ids) for hypotheses in ours}) > 3

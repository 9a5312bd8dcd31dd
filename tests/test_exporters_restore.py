"""The way back: a bundle's graphs hold the model, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from exporters_support import VARIANTS, Export, random_inputs
from runtime_support import edit_passport

from exporters.errors import ExportError
from exporters.reference import TorchBackend
from exporters.restore import restore_model
from runtime import GenerationConfig, Translator
from runtime.bundle import Bundle, record_files
from runtime.generation import generate

Exports = Callable[[str], Export]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_weight_comes_back_bit_for_bit(exports: Exports, name: str) -> None:
    export = exports(name)
    restored = restore_model(export.bundle)
    ours, theirs = dict(restored.named_parameters()), dict(export.model.named_parameters())
    assert restored.config == export.config
    assert ours.keys() == theirs.keys()
    for weight, tensor in ours.items():
        assert torch.equal(tensor, theirs[weight]), weight
    buffers = dict(export.model.named_buffers())
    for buffer, table in restored.named_buffers():
        assert torch.equal(table, buffers[buffer]), buffer


@pytest.mark.parametrize("name", VARIANTS)
def test_the_restored_model_computes_the_same(exports: Exports, name: str) -> None:
    export = exports(name)
    source, mask, target = (torch.from_numpy(array) for array in random_inputs(export.config))
    with torch.no_grad():
        assert torch.equal(restore_model(export.bundle)(source, mask, target), export.model(source, mask, target))


def test_what_is_shared_in_the_model_is_shared_again(exports: Exports) -> None:
    restored = restore_model(exports("pre-norm, all shared").bundle)
    assert restored.output.weight is restored.encoder.embedding.tokens.weight
    assert restored.output.weight is restored.decoder.embedding.tokens.weight


def test_the_restored_model_does_not_write_into_the_bundle(exports: Exports) -> None:
    """Its weights are copies: the blob is mapped, and other processes may read it."""
    export = exports("pre-norm, all shared")
    restored = restore_model(export.bundle)
    with torch.no_grad():
        for parameter in restored.parameters():
            parameter.zero_()
    Bundle(export.bundle.folder)
    assert not restored.training


def test_the_trained_bundle_comes_back_and_still_reverses(tiny_bundle: Bundle, translator: Translator) -> None:
    sources = [translator.encode(text) for text in ("a b c d e", "f g h i")]
    config = GenerationConfig()
    passport = tiny_bundle.passport
    backend = TorchBackend(restore_model(tiny_bundle))
    found = generate(backend, sources, config, passport.special, passport.dims.max_positions)
    assert [best.ids for (best,) in found] == [best.ids for (best,) in translator.generate(sources, config)]


def test_weights_whose_nodes_are_not_found_are_all_named(tiny: Path) -> None:
    graph = onnx.load(tiny / "encoder_model.onnx", load_external_data=False)
    for node in graph.graph.node:
        node.name = node.name.replace("layers.0.feed_forward.fc1/MatMul", "fused_1").replace(
            "layers.1.self_attention.q_proj/Add", "fused_2"
        )
    onnx.save(graph, tiny / "encoder_model.onnx")
    (record,) = record_files(tiny, ["encoder_model.onnx"]).values()
    entry = {"size": record.size, "sha256": record.sha256}
    edit_passport(tiny, lambda passport: passport["files"].update({"encoder_model.onnx": entry}))
    with pytest.raises(ExportError) as caught:
        restore_model(Bundle(tiny))
    message = str(caught.value)
    assert "encoder.layers.0.feed_forward.fc1.weight" in message
    assert "encoder.layers.1.self_attention.q_proj.bias" in message
    assert "\n" not in message

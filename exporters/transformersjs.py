"""The layout of transformers.js: what it opens besides the bundle's own files, written beside them.

It looks for a graph and its weights under names of its own, such as `onnx/encoder_model.onnx` with
`onnx/encoder_model.onnx_data`, and reaches no file above these. So the weights lie here a second time, and what both
graphs read a third.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from runtime.contract import ENCODE, GRAPH_FILES, PREFILL, STEP, Dims
from runtime.exam import Exam
from runtime.text.pieces import TOKENIZER_JSON
from runtime.tokenizer import SETTINGS

from .checking import check_graph
from .errors import ExportError
from .merged import check_encoder, check_merged, merge_decoders
from .tokenizer_json import marian_settings, marian_tokenizer
from .weights import WeightBlob, content_key

FOLDER = "onnx"
ENCODER, DECODER = f"{FOLDER}/encoder_model.onnx", f"{FOLDER}/decoder_model_merged.onnx"
SETTINGS_OF_MODEL = "config.json"


def write_transformersjs(folder: Path, dims: Dims, exam: Exam) -> None:
    """Write into the bundle `folder`, whose graphs and configurations are there, what transformers.js opens.

    Raises:
        ExportError: the tokenizer has no equal there, or a graph gives other numbers than the bundle's own.
    """
    _write_tokenizer(folder)
    _change_json(folder / SETTINGS_OF_MODEL, _for_transformersjs)
    (folder / FOLDER).mkdir()
    graphs = {verb: ir.load(folder / GRAPH_FILES[verb]) for verb in (ENCODE, PREFILL, STEP)}
    _save(graphs[ENCODE], folder / ENCODER)
    _save(merge_decoders(graphs[PREFILL], graphs[STEP], dims), folder / DECODER)
    check_encoder(folder, folder / ENCODER, exam)
    check_merged(folder, folder / DECODER, exam)


def _save(model: ir.Model, path: Path) -> None:
    weights = {
        content_key(value.const_value.numpy()): name
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    with WeightBlob(path.with_name(f"{path.name}_data"), weights) as blob:
        blob.take_from(model)
        ir.save(model, path)
    check_graph(path, path.name)


def _write_tokenizer(folder: Path) -> None:
    if (
        json.loads((folder / SETTINGS).read_text("utf-8")).get("tokenizer_class", "MarianTokenizer")
        == "MarianTokenizer"
    ):
        content = marian_tokenizer(folder)
        (folder / TOKENIZER_JSON).write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")
        _change_json(folder / SETTINGS, marian_settings)
    elif not (folder / TOKENIZER_JSON).is_file():
        raise ExportError(
            f"the layout of transformers.js needs {TOKENIZER_JSON}: save the checkpoint's tokenizer with transformers 5"
        )


def _for_transformersjs(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"transformers.js_config": {"dtype": "fp32", "use_external_data_format": True}}


def _change_json(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(change(settings), indent=2, ensure_ascii=False) + "\n", "utf-8")

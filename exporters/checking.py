"""A graph that was written must be a valid one."""

from pathlib import Path

import onnx

from .errors import ExportError


def check_graph(path: Path, name: str) -> None:
    """Let `onnx.checker` look at the graph in `path`, types and shapes included; `name` is for people.

    Raises:
        ExportError: it refuses the graph.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{name}: onnx.checker refuses the graph: {error}") from error

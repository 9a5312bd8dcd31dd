"""What is deployed: translation by three ONNX graphs with numpy and ONNX Runtime, and the proof that they are right."""

import os

# ONNX Runtime reports to its makers from its import on, unless this is set; whoever wants that sets it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from .generation import GenerationConfig, Hypothesis
from .translator import Translation, Translator

__all__ = ["GenerationConfig", "Hypothesis", "Translation", "Translator"]

"""What is deployed: translation by three ONNX graphs with numpy and ONNX Runtime, and the proof that they are right."""

from .generation import GenerationConfig, Hypothesis
from .translator import Translation, Translator

__all__ = ["GenerationConfig", "Hypothesis", "Translation", "Translator"]

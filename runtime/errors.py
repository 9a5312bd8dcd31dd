"""What can go wrong at run time, one class per cause that a caller may want to catch."""


class RuntimeFault(ValueError):  # noqa: N818 - RuntimeError is Python's own
    """Base of every error that this package raises on bad input."""


class GenerationError(RuntimeFault):
    """A generation option is impossible, or does not fit the model."""


class InputTooLongError(RuntimeFault):
    """An input has more tokens than the model has positions."""


class TokenizerError(RuntimeFault):
    """The tokenizer's files are missing, damaged or contradict each other."""


class BundleError(RuntimeFault):
    """A folder is not a bundle, or its files do not match its passport."""


class GraphError(RuntimeFault):
    """ONNX Runtime gave up in the middle of a graph."""


class ProviderError(RuntimeFault):
    """The requested execution provider is not the one that would run the model."""


class ExamError(RuntimeFault):
    """The recorded exam is missing or damaged."""


class ThresholdError(RuntimeFault):
    """A threshold is not known, or does not apply."""

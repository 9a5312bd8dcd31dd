"""What can go wrong in this package, one class per cause that a caller may want to catch."""


class ModelError(ValueError):
    """Base of every error that this package raises on bad input."""


class ConfigError(ModelError):
    """A setting of the model or of its training is impossible."""


class CheckpointError(ModelError):
    """A folder does not hold a checkpoint that can be loaded."""


class ModelImportError(ModelError):
    """A folder does not hold a model of another library that can be imported; the message lists every reason."""


class TrainingDivergedError(ModelError):
    """The loss is no longer a finite number."""


class SequenceTooLongError(ModelError):
    """A sequence has more positions than the model's position table."""

"""What can go wrong on the way to a bundle."""


class ExportError(ValueError):
    """The model cannot be exported, or what was exported does not compute what the model does."""

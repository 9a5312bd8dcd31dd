"""What can go wrong on the way to a bundle."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line imports this module, and parity only when it examines
    from runtime.parity import Report


class ExportError(ValueError):
    """The model cannot be exported, or what was exported does not compute what the model does."""


class ExaminationError(ExportError):
    """What was exported did not pass.

    Args:
        what: The examination.
        report: What it found.
    """

    def __init__(self, what: str, report: "Report") -> None:
        problems = [f"rung {rung.rung} ({rung.name}): {rung.problems[0]}" for rung in report.rungs if rung.problems]
        super().__init__(f"the export failed {what}: {'; '.join(problems)}. Nothing was written")
        self.report = report

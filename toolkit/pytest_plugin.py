"""The options of `pytest --pyargs runtime.parity_suite`. Pytest loads this wherever the package is installed."""

from collections.abc import Sequence

import pytest

SUITE = "runtime.parity_suite"


# Before pytest reads the conftests; not in pytest_addoption, which does not know what was asked for.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: Sequence[str]) -> None:
    """Add the options where the suite is asked for; elsewhere their names are everybody's."""
    if any(SUITE in argument.replace("/", ".") for argument in args):
        _add_options(parser)


def _add_options(parser: pytest.Parser) -> None:
    """Which bundle, and where it will be deployed."""
    group = parser.getgroup("seq2onnx", f"parity of a bundle with PyTorch (pytest --pyargs {SUITE})")
    group.addoption("--bundle", metavar="PATH", help="The bundle to examine.")
    group.addoption("--provider", choices=["cpu", "cuda"], default="cpu", help="Where it will run.")
    group.addoption(
        "--optimization",
        choices=["none", "basic", "extended", "all"],
        default="all",
        help="How much ONNX Runtime may rewrite its graphs.",
    )

"""The options of `pytest --pyargs runtime.parity_suite`. Pytest loads this wherever the package is installed."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which bundle, and where it will be deployed."""
    group = parser.getgroup("seq2onnx", "parity of a bundle with PyTorch (pytest --pyargs runtime.parity_suite)")
    group.addoption("--bundle", metavar="PATH", help="The bundle to examine.")
    group.addoption("--provider", choices=["cpu", "cuda"], default="cpu", help="Where it will run.")
    group.addoption(
        "--optimization",
        choices=["none", "basic", "extended", "all"],
        default="all",
        help="How much ONNX Runtime may rewrite its graphs.",
    )

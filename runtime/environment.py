"""Where something was measured: versions and the machine, for reports and passports."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnxruntime as ort

from .threads import available_cpus

PACKAGES = ("seq2onnx", "numpy", "onnxruntime", "onnx", "openvino", "torch")
"""Those of the installed ones are named whose versions can change a result."""


def environment() -> dict[str, str]:
    """Names and values, for people: operating system, processor, and `versions`."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "CPUs": f"{available_cpus()} of {os.cpu_count()}",
        **versions(),
    }


def versions() -> dict[str, str]:
    """Versions of what computes."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        if name == "onnxruntime":
            found[name] = ort.__version__  # it comes as one of several distributions
        else:
            with suppress(PackageNotFoundError):
                found[name] = version(name)
    return found


def _processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")

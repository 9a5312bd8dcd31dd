"""What the contestants run, made where it is missing or where the code that makes it has changed."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "benchmarks/build"
SHIPPED = ROOT / "models/pretrained/zh_en"
# Of the runtime only what is written down in a bundle: that a search got faster changes no bundle.
EXPORT_CODE = (
    "models/**/*.py",
    "exporters/**/*.py",
    "toolkit/export_command.py",
    "runtime/bundle.py",
    "runtime/contract.py",
)
Say = Callable[[str], None]


class BuildError(Exception):
    """Something cannot be made; the message is what the maker said last."""


def marian(say: Say) -> Path:
    """The random Marian model, as transformers saves it."""

    def make(folder: Path) -> None:
        say("making the random Marian model")
        _run(sys.executable, ROOT / "benchmarks/make_marian.py", folder)

    return fresh(BUILD / "marian-base", ["benchmarks/make_marian.py"], make)


def bundle(source: Path, name: str, precision: str, say: Say) -> Path:
    """A bundle of the model in `source`."""
    # The default needs no option, so that versions without one take part with it.
    option = [] if precision == "fp32" else ["--precision", precision]

    def make(folder: Path) -> None:
        say(f"exporting {name} at {precision}")
        _run(sys.executable, "-m", "toolkit", "export", "--force", *option, source, folder)

    return fresh(BUILD / f"{name}-{precision}", [*EXPORT_CODE, *_makers(source)], make)


def ctranslate2_model(source: Path, name: str, quantization: str, say: Say) -> Path:
    """The model in `source` as CTranslate2 reads it."""
    converter = "ctranslate2_checkpoint.py" if source == SHIPPED else "ctranslate2_transformers.py"

    def make(folder: Path) -> None:
        say(f"converting {name} for CTranslate2 at {quantization}")
        _run(sys.executable, ROOT / "benchmarks" / converter, source, folder, quantization)

    parts = ["models/*.py", f"benchmarks/{converter}", *_makers(source), "constraints.txt"]
    return fresh(BUILD / f"{name}-ctranslate2-{quantization}", parts, make)


def _makers(source: Path) -> list[str]:
    """What makes the model in `source`: nothing does the one that is shipped."""
    return [] if source == SHIPPED else ["benchmarks/make_marian.py"]


def fresh(folder: Path, patterns: Iterable[str], make: Callable[[Path], None], root: Path = ROOT) -> Path:
    """`folder`, made anew unless it was made by files of these contents.

    Raises:
        BuildError: it cannot be made; nothing of it is left.
    """
    digest, stamp = _digest(patterns, root), folder.with_name(f"{folder.name}.made-by")
    if folder.is_dir() and stamp.is_file() and stamp.read_text("ascii") == digest:
        return folder
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        make(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    stamp.write_text(digest, "ascii")
    return folder


def _digest(patterns: Iterable[str], root: Path) -> str:
    total = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        total.update(f"{path.relative_to(root)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _run(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise BuildError(lines[-1].strip().removeprefix("Error: ") if lines else f"exit code {done.returncode}")


def size(folder: Path, *, without: str | None = None) -> int:
    """Bytes of all files in `folder`, but for those in its folder `without`."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files if without not in path.relative_to(folder).parts)

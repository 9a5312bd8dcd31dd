"""Export the bundle in tests/data again, from its own weights and sentences: `python tests/renew_tiny.py`."""

import shutil
import tempfile
from pathlib import Path

from runtime_support import TINY

from exporters.export import export_bundle
from exporters.restore import restore_model
from exporters.source import SENTENCES
from models.checkpoint import save_checkpoint
from runtime.bundle import Bundle
from runtime.exam import load_exam
from runtime.tokenizer import TOKENIZER_FILES


def main() -> None:
    bundle = Bundle(TINY)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder)
        save_checkpoint(restore_model(bundle), checkpoint)
        for name in TOKENIZER_FILES:
            shutil.copyfile(TINY / name, checkpoint / name)
        texts = dict.fromkeys(case.text for case in load_exam(bundle.path("exam")).tokens)
        (checkpoint / SENTENCES).write_text("\n".join(texts) + "\n", "utf-8")
        export_bundle(checkpoint, TINY, force=True)


if __name__ == "__main__":
    main()

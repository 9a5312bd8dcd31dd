"""Convert a model of transformers for CTranslate2, as `toolkit bench --against ctranslate2` does."""

import sys
from pathlib import Path

from toolkit.measure.bench import convert_for_ctranslate2

if __name__ == "__main__":
    convert_for_ctranslate2(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

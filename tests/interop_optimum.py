"""Optimum generates from source ids: `interop_optimum.py BUNDLE BEAMS < source-ids.jsonl > target-ids.jsonl`.

Runs in the environment of `tests/interop_constraints.txt`, where this project is not installed.
"""

import json
import sys

import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForSeq2SeqLM


def main() -> None:
    folder, beams = sys.argv[1:]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # three sessions whose threads wait for work by spinning are in each other's way
    torch.set_num_threads(1)
    model = ORTModelForSeq2SeqLM.from_pretrained(folder, use_merged=False, session_options=options)
    for line in sys.stdin:
        ids = torch.tensor([json.loads(line)])
        # The start token comes first; our own lists are without it.
        output = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=int(beams))[0, 1:]
        sys.stdout.write(json.dumps(output.tolist()) + "\n")


if __name__ == "__main__":
    main()

"""Two processes train one model together: they stop together, and resume where an uninterrupted pair ends."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from models.training import StepMetrics, read_metrics

SCRIPT = """
import sys
from pathlib import Path

import torch

from models_support import random_pairs, tiny

from models.training import Trainer, TrainingConfig
from models.transformer import Transformer

model = tiny(dropout=0.2)
pairs = random_pairs(model, [(2 + index % 5, 2 + index % 3) for index in range(40)])
config = TrainingConfig(epochs=3, batch_tokens=30, warmup_steps=5, learning_rate=3e-3, average=2, log_steps=1)


def trainer(name, seed, stop_at=-1):
    torch.manual_seed(seed)
    made = Trainer(
        Transformer(model), pairs, pairs[:3], config, Path(sys.argv[1], name), should_stop=lambda: asked(made, stop_at)
    )
    assert made.accelerator.num_processes == 2
    return made


def asked(trainer, stop_at):
    # Only the second process is asked.
    return trainer.accelerator.process_index == 1 and trainer.progress.step == stop_at


trainer("whole", 0).run()
assert trainer("parts", 0, stop_at=6).run().step == 6
trainer("parts", 9).run(resume=True)
"""


def test_two_processes_stop_together_and_resume_exactly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = Path(__file__).parent.parent
    import_path = os.pathsep.join([str(root), str(root / "tests")])
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path}
    done = subprocess.run(
        [*launcher, str(script), str(tmp_path)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    weights = sorted(path.relative_to(whole) for path in whole.rglob("*.safetensors"))
    assert len(weights) == 4
    for path in weights:
        one, other = load_file(whole / path), load_file(parts / path)
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items()), path
    lines = [[(type(line), line.step, line.loss) for line in read_metrics(folder)] for folder in (whole, parts)]
    assert lines[0] == lines[1]
    steps = [step for kind, step, _ in lines[0] if kind is StepMetrics]
    assert steps == list(range(1, len(steps) + 1))
    # The two have a random state each.
    states = load_file(whole / "state.safetensors")["random.cpu"]
    assert states.shape[0] == 2
    assert not torch.equal(states[0], states[1])

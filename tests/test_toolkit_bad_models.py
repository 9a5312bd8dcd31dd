"""Folders that must not become anything: by command, each is one line that names file and field, and leaves nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from importers_support import (
    TRANSLATING,
    Malice,
    edit_json,
    edit_weights,
    replace_tokenizer,
    write_json,
    write_tokenizer,
)
from safetensors.torch import load_file
from toolkit_support import refusal

pytestmark = pytest.mark.usefixtures("quiet")

SIZE = TRANSLATING.vocab
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
FC1 = "model.encoder.layers.0.fc1.weight"


class Damage(NamedTuple):
    """What is done to a good Marian folder, and what is then said."""

    change: Callable[[Path], object]
    said: tuple[str, ...]
    """Parts of the line; the first names the file."""


def remove(name: str) -> Damage:
    return Damage(lambda folder: (folder / name).unlink(), (f"{name} is missing",))


def link_out(name: str) -> Damage:
    def change(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / "outside" / name)
        (folder / name).symlink_to(folder.parent / "outside" / name)

    return Damage(change, (f"{name} leads out of the folder, to ",))


def foreign_pieces(name: str) -> Damage:
    def change(folder: Path) -> None:
        other = folder.parent / "outside"
        write_tokenizer(other, 60, pad=59, eos=0, sentences=["我爱猫猫也爱我吗", "今天天气很好我们去公园"])
        shutil.copyfile(other / name, folder / name)

    return Damage(change, (f"{name} does not match vocab.json: of its ", " pieces only "))


def pickled(folder: Path, content: object) -> None:
    (folder / WEIGHTS).unlink()
    torch.save(content, folder / PICKLED)


def only_an_index(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    write_json(folder / f"{WEIGHTS}.index.json", {"weight_map": {FC1: "part-1.safetensors"}})


DAMAGES = {
    **{f"without {name}": remove(name) for name in ("source.spm", "target.spm", "vocab.json")},
    "without weights": Damage(
        lambda folder: (folder / WEIGHTS).unlink(), ("model has no weights: expected one of model.safetensors, ",)
    ),
    "without config.json": Damage(
        lambda folder: (folder / "config.json").unlink(), ("model is no model: ", "no config.json")
    ),
    "without a part of the weights": Damage(
        only_an_index,
        ("part-1.safetensors is missing",),
    ),
    "without a field": Damage(
        lambda folder: edit_json(folder / "config.json", lambda config: config.pop("d_model")),
        ("config.json: ", "d_model is missing"),
    ),
    "a tensor of another shape": Damage(
        lambda folder: edit_weights(folder, lambda tensors: tensors.update({FC1: torch.zeros(32, 48)})),
        (f"{WEIGHTS} does not fit the model: ", f"{FC1} has shape [32, 48], expected [48, 32]"),
    ),
    "NaN": Damage(
        lambda folder: edit_weights(folder, lambda tensors: tensors[FC1].fill_(float("nan"))),
        (f"{WEIGHTS} does not fit the model: ", f"{FC1} holds values that are not finite"),
    ),
    "half a file of weights": Damage(
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000]),
        (f"{WEIGHTS} cannot be read: ",),
    ),
    "a vocabulary smaller than the embedding": Damage(
        lambda folder: replace_tokenizer(folder, SIZE - 3, pad=SIZE - 4),
        ("the tokenizer is not the model's: ", f"has {SIZE - 3} entries, the model's source vocabulary {SIZE}"),
    ),
    "a vocabulary larger than the embedding": Damage(
        lambda folder: replace_tokenizer(folder, SIZE + 4, pad=SIZE + 3),
        ("the tokenizer is not the model's: ", f"has {SIZE + 4} entries, the model's source vocabulary {SIZE}"),
    ),
    **{f"pieces of another model in {name}": foreign_pieces(name) for name in ("source.spm", "target.spm")},
    "code in a pickle": Damage(
        lambda folder: pickled(folder, {FC1: Malice(folder.parent / "traces")}),
        (f"{PICKLED} holds Python code or is damaged: ", "code is never run"),
    ),
    "a pickle of something else": Damage(
        lambda folder: pickled(folder, {"model": load_file(folder / WEIGHTS), "epoch": 3}),
        (f"{PICKLED} holds entries that are no tensors: model, epoch",),
    ),
    **{
        f"a link out of the folder for {name}": link_out(name)
        for name in ("config.json", "generation_config.json", WEIGHTS, "source.spm", "vocab.json")
    },
    "an option of the search that is not supported": Damage(
        lambda folder: edit_json(folder / "generation_config.json", lambda search: search.update(num_beam_groups=2)),
        ("generation_config.json: ", "num_beam_groups is 2, which is not supported"),
    ),
}


@pytest.mark.parametrize("command", ["export", "import"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_bad_folder_is_one_line_that_names_file_and_field_and_leaves_nothing(
    complete_marian: Path, name: str, command: str
) -> None:
    damage, root = DAMAGES[name], complete_marian.parent
    (root / "outside").mkdir()
    damage.change(complete_marian)
    before = sorted(path.relative_to(root) for path in root.rglob("*"))
    line = refusal(command, complete_marian, root / "target")
    assert line.startswith(f"Error: {complete_marian}")
    assert [part for part in damage.said if part not in line] == []
    assert sorted(path.relative_to(root) for path in root.rglob("*")) == before

"""A random model small enough to read a corpus in a second."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from regard.models import CausalConfig, CausalModel
from regard.models.folder import save
from regard.scanning import Job, Options
from tests.models.tiny import tokenizer_file

TEXTS = [
    "The cat sat on the mat.",
    "",
    "The dog sat on the cat, and the cat ran to the mat. The dog sat on the cat.",
    "A king had a daughter; the daughter had a cat.",
    "cat",
    "the cat and the dog and the cat and the dog " * 4,
    "It was 1611, and all was well.",
    '"Where is the cat?" said the king. "Where is the cat?"',
]
"""A blank line, which is no text, and a text longer than the model can read."""
LONGEST = 48
SHARDS = 4


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    made = CausalModel(CausalConfig(vocabulary=320, d_model=16, layers=2, heads=2, longest=LONGEST))
    with torch.no_grad():
        for weight in made.parameters():
            # Larger than they are drawn, so that heads look at something.
            weight.mul_(2)
    save(made, folder)
    shutil.copy(tokenizer_file(), folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


@pytest.fixture
def job(model: Path, texts: Path, tmp_path: Path) -> Job:
    return Job(str(model), (str(texts),), str(tmp_path / "out"), Options(shards=SHARDS, threads=1))


def everything(folder: str | Path) -> dict[str, bytes]:
    """The bytes of all files in a folder."""
    root = Path(folder)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def unlike(folder: str | Path, other: str | Path) -> list[str]:
    """What differs in two folders, in few words: the bytes themselves would fill pages."""
    one, two = everything(folder), everything(other)
    said = [f"{name}: in one alone" for name in sorted(one.keys() ^ two.keys())]
    for name in sorted(one.keys() & two.keys()):
        if one[name] != two[name]:
            said.append(name)
            if name.endswith(".safetensors"):
                tensors, others = load(one[name]), load(two[name])
                said += [
                    f"{name} {tensor}: {(t.double() - others[tensor].double()).abs().max():.1e}"
                    for tensor, t in tensors.items()
                    if not torch.equal(t, others[tensor])
                ]
    return said

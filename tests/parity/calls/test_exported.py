"""Programs exported, written to a file, read back and run: torch.export's and AOTInductor's."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import masks
from tests.parity import cases
from tests.parity.calls.call import Answer, Call, draw

pytestmark = [
    pytest.mark.compiled,
    # The compiler deprecates parts of itself while it works.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return (regard.attention(q, k, v, mask=masks.causal()),)


class Looks(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        t = regard.trace(q, k, v, mask=masks.causal())
        return t.out, t.lse, t.entropy, t.max_logit


class LooksIntoDocuments(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        t = regard.trace(q, k, v, mask=masks.causal() & masks.documents(ids), softcap=5.0)
        return t.out, t.lse, t.entropy, t.max_logit


class Both(nn.Module):
    """One program, since each takes long to build."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        out = regard.attention(q, k, v, mask=masks.causal())
        return out, *LooksIntoDocuments()(q, k, v, ids)


MODULES: dict[str, type[nn.Module]] = {
    "attention": Attends, "trace": Looks, "documents": LooksIntoDocuments,
}  # fmt: skip


def given(B: int = 3, n: int = 9) -> list[Tensor]:
    shapes = [(B, 4, n, 8), (B, 2, n, 8), (B, 2, n, 8)]
    three = [draw(*s, seed=i) for i, s in enumerate(shapes)]
    ids = torch.arange(n, device=cases.DEVICE) // 4
    return [*three, ids.expand(B, -1).contiguous()]


def exported(module: nn.Module, *, dynamic: bool) -> torch.export.ExportedProgram:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2)
    one = {0: batch, 2: length}
    shapes = {"q": one, "k": one, "v": one, "ids": {0: batch, 1: length}} if dynamic else None
    with torch.no_grad():
        return torch.export.export(module, tuple(given()), dynamic_shapes=shapes)


def assert_rows_right(found: tuple[Tensor, ...], tensors: list[Tensor], documents: bool) -> None:
    """Rows that a program gave, as the formula has them."""
    q, k, v, ids = tensors
    mask = masks.causal() & masks.documents(ids) if documents else masks.causal()
    call = Call(q, k, v, {"mask": mask} | ({"softcap": 5.0} if documents else {}))
    rows = dict(zip(("out", "lse", "entropy", "max_logit"), found, strict=False))
    call.assert_right(Answer("attention" if len(found) == 1 else "trace", rows, []))


@pytest.mark.parametrize("dynamic", [False, True], ids=["one length", "all lengths"])
@pytest.mark.parametrize("name", MODULES)
def test_a_program_from_a_file(name: str, dynamic: bool) -> None:
    file = io.BytesIO()
    torch.export.save(exported(MODULES[name](), dynamic=dynamic), file)
    file.seek(0)
    program = torch.export.load(file).module()
    for tensors in (given(), given(2, 30), given(5, 4)) if dynamic else (given(),):
        assert_rows_right(program(*tensors), tensors, name == "documents")


_PLAIN = """
import sys, torch
class Adds(torch.nn.Module):
    def forward(self, x):
        return x + 1
x = torch.ones(4, device=sys.argv[1])
program = torch.export.export(Adds(), (x,))
path = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[2])
torch._inductor.aoti_load_package(path)(x)
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where AOTInductor cannot load a library that has nothing to do with attention: on a
    card with torch 2.11 its own reading of the device's name may end the process."""
    if cases.DEVICE == "cpu":
        return
    path = tmp_path_factory.mktemp("plain") / "adds.pt2"
    command = [sys.executable, "-c", _PLAIN, cases.DEVICE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"AOTInductor cannot load a library here: it ended with {done.returncode}")


@pytest.mark.skipif(
    cases.DEVICE == "cpu" and shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="AOTInductor builds a library, and here is no C++ compiler",
)
@pytest.mark.usefixtures("libraries")
def test_a_library(tmp_path: Path) -> None:
    path = torch._inductor.aoti_compile_and_package(
        exported(Both(), dynamic=True), package_path=str(tmp_path / "both.pt2")
    )
    library = torch._inductor.aoti_load_package(path)
    for tensors in (given(), given(2, 30)):
        with torch.no_grad():
            out, *rows = library(*tensors)
        assert_rows_right((out,), tensors, documents=False)
        assert_rows_right(tuple(rows), tensors, documents=True)


@pytest.mark.usefixtures("libraries")
def test_a_library_of_a_trace_whose_mask_holds_no_tensor(tmp_path: Path) -> None:
    path = torch._inductor.aoti_compile_and_package(
        exported(Looks(), dynamic=False), package_path=str(tmp_path / "looks.pt2")
    )
    with torch.no_grad():
        rows = torch._inductor.aoti_load_package(path)(*given())
    assert_rows_right(tuple(rows), given(), documents=False)

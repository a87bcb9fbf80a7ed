"""What CI tells of the machine it runs on: nothing is wrong where something cannot be found out."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci"
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(
    not CI.exists() or BASH is None, reason="a checkout, on a machine with bash"
)
XEON = """processor	: 0
model name	: Intel(R) Xeon(R) Processor
flags		: fpu vme sse sse4_2 avx f16c fma avx2 avx512f avx512_bf16 amx_tile amx_bf16 rdrand
processor	: 1
model name	: another
flags		: avx
"""
NEOVERSE = """processor	: 0
Features	: fp asimd evtstrm aes fphp asimdhp asimddp sve bf16 i8mm
CPU part	: 0xd40
"""


def told(**env: str) -> dict[str, str]:
    assert BASH
    done = subprocess.run([BASH, str(CI / "machine")], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("described", "vectors"),
    [
        (XEON, "amx_bf16 amx_tile avx avx2 avx512_bf16 avx512f f16c fma sse4_2"),
        (NEOVERSE, "asimd asimddp asimdhp bf16 fphp i8mm sve"),
    ],
    ids=["x86-64", "aarch64"],
)
def test_vector_instructions_are_told(described: str, vectors: str, tmp_path: Path) -> None:
    (cpuinfo := tmp_path / "cpuinfo").write_text(described)
    (meminfo := tmp_path / "meminfo").write_text("MemTotal:       16777216 kB\n")
    found = told(PATH="/usr/bin:/bin", LC_ALL="C", CPUINFO=str(cpuinfo), MEMINFO=str(meminfo))
    assert found["vectors"] == vectors
    assert found["memory"] == "16.0 GiB"
    if described is XEON:
        assert found["cpu"] == "Intel(R) Xeon(R) Processor"


def test_this_machine_is_told() -> None:
    found = told(PATH="/usr/local/bin:/usr/bin:/bin", LC_ALL="C")
    assert list(found) == [
        "architecture", "cpu", "vectors", "cores", "memory", "python", "compiler", "node", "npm"
    ]  # fmt: skip
    assert platform.machine() in found["architecture"]
    assert found["cores"].isdecimal()


def test_what_cannot_be_found_out_is_unknown() -> None:
    found = told(PATH="/nowhere", CPUINFO="/nowhere/cpu", MEMINFO="/nowhere/memory")
    assert found["cpu"] == found["vectors"] == found["memory"] == "unknown"
    assert found["compiler"] == found["node"] == "not installed"


def test_it_is_told_first() -> None:
    lines = (CI / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands[0] == ".ci/machine"

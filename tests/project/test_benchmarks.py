"""Benchmarks find what they import, and pages the benchmarks: nothing else would notice a move."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOMES = {"regard": ROOT / "src", "benchmarks": ROOT, "models": ROOT, "tests": ROOT}
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))


def missing(text: str) -> list[str]:
    """What a file imports of the project that is not there, inside functions too."""
    return [f"{module}: {name}" for module, name in _imported(text) if not _there(module, name)]


def _imported(text: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def _there(module: str, name: str) -> bool:
    """Nothing is imported for it: what a benchmark measures beside may not be installed."""
    top = module.partition(".")[0]
    if top not in HOMES:
        return True
    path = HOMES[top] / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not name:
        return path.is_dir() or file.is_file()
    if (path / name).is_dir() or (path / f"{name}.py").is_file():
        return True
    return file.is_file() and name in _bound(file)


def _bound(file: Path) -> set[str]:
    """The names that a file binds, itself or by an import."""
    nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
    made = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    made |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    return made | {node.id for node in nodes if isinstance(node, ast.Name)}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_are_there(script: Path) -> None:
    assert not missing(script.read_text("utf-8"))


PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]


def test_pages_name_benchmarks_that_are_there() -> None:
    told = " ".join(page.read_text("utf-8") for page in PAGES)
    named = re.findall(r"\bbenchmarks/[\w/]+\.py", told)
    named += [f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (benchmarks[\w.]+)", told)]
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    "text",
    [
        "import regard.nowhere",
        "from regard.nowhere import x",
        "def f():\n    from regard.cost import nothing",
        "from benchmarks.measurement import nothing",
        "from benchmarks import measuring",
        "from benchmarks.grid.cases import Case",
    ],
)
def test_what_is_missing_is_noticed(text: str) -> None:
    assert len(missing(text)) == 1

"""Files do not import each other in circles, not even inside functions.

A circle means that neither file can be read, tested or moved without the other. Imports for type
checkers alone do not count, nor what a package imports by a name that it makes up.
"""

import ast
import re
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"

# Who imports what, and what the circle buys. Files may move: only their last names are here.
LEFT = {
    ("display", "bundle"): "a value shows itself in Jupyter; nobody else imports the view",
    ("display", "shown"): "the same in marimo",
    ("trace", "save_trace"): "Trace.save: a trace is asked to save itself, files hold traces",
    ("trace", "given_trace"): "Trace.of: a trace of given numbers, made where choices are made",
    ("trace", "trace_of_weights"): "Trace.of_weights: the same, of given weights",
    ("seen", "save"): "Seen.save: the same, for all layers of a model",
}

Imports = dict[str, set[tuple[str, str]]]
"""For each file, the files it imports from, and what."""


def imports(sources: Path) -> Imports:
    """The imports of all files among each other, all by the names of their modules."""
    paths = [path.relative_to(sources) for path in sources.rglob("*.py")]
    files = {_module(path): sources / path for path in paths if "node_modules" not in path.parts}
    found = {name: set(_imported(name, path, files)) for name, path in files.items()}
    return {
        name: {(file, what) for file, what in all_of_it if file in files and file != name}
        for name, all_of_it in found.items()
    }


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(name: str, path: Path, files: dict[str, Path]) -> Iterator[tuple[str, str]]:
    around = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in _running(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = around[: len(around) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in files else base, alias.name


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All parts of a file but those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _running(child)


def circle(found: Imports, left: Collection[tuple[str, str]] = ()) -> list[str]:
    """The files of one circle but for those that are left; none if there is no circle."""
    graph = {
        name: {file for file, what in imported if (name.rpartition(".")[2], what) not in left}
        for name, imported in found.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


@pytest.fixture(scope="module")
def found() -> Imports:
    return imports(SOURCES)


def test_no_circle_is_new(found: Imports) -> None:
    new = circle(found, LEFT)
    assert not new, "a circle: " + " imports ".join(new)


@pytest.mark.parametrize("one", LEFT, ids=" to ".join)
def test_what_is_left_is_still_a_circle(one: tuple[str, str], found: Imports) -> None:
    assert circle(found, LEFT.keys() - {one}), "no longer: take it off the list"


@pytest.mark.parametrize(
    ("one", "other", "is_circle"),
    [
        ("import package.b", "from package.a import x", True),
        ("from package import b", "def f():\n    from package import a", True),
        ("from .b import x", "class C:\n    from . import a", True),
        ("from package.b import x", "from package.c import x", False),
        (
            "from package.b import x",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import package.a",
            False,
        ),
    ],
)
def test_circles_are_found(one: str, other: str, is_circle: bool, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name, text in {"__init__": "", "a": one, "b": other, "c": ""}.items():
        (tmp_path / "package" / f"{name}.py").write_text(text)
    assert bool(circle(imports(tmp_path))) == is_circle


def test_a_package_and_its_file_may_be_a_circle(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from package.a import x\nlimit = 1")
    (tmp_path / "package" / "a.py").write_text("from package import limit")
    assert sorted(set(circle(imports(tmp_path)))) == ["package", "package.a"]


FRONT_END = SOURCES / "regard" / "view" / "frontend" / "src"
_FROM = re.compile(
    r"""^(?:import|export)\s+(?!type\b)(?:[^"';]*?\sfrom\s+)?["'](\.[^"']*)["']""", re.MULTILINE
)
"""What a file of the front end imports from others; types alone do not count."""


def front_end_imports(sources: Path) -> Imports:
    found: Imports = {}
    for path in sources.rglob("*.ts"):
        beside = path.parent
        names = [Path(name) for name in _FROM.findall(path.read_text("utf-8"))]
        files = [(beside / name.with_suffix(".ts")).resolve() for name in names]
        found[str(path)] = {(str(file), file.stem) for file in files if file.is_file()}
    return found


def test_the_front_end_has_no_circle() -> None:
    found = front_end_imports(FRONT_END)
    assert sum(map(len, found.values())) > len(found) > 50
    new = circle(found)
    assert not new, "a circle: " + " imports ".join(new)


@pytest.mark.parametrize(
    ("other", "is_circle"),
    [
        ('import { x } from "./a"', True),
        ('import {\n  x,\n} from "./a.js"', True),
        ('export * from "./a"', True),
        ('import "./a"', True),
        ('import type { X } from "./a"', False),
        ('import { x } from "./c"', False),
    ],
)
def test_circles_of_the_front_end_are_found(other: str, is_circle: bool, tmp_path: Path) -> None:
    for name, text in {"a": 'import { b } from "./b"', "b": other, "c": ""}.items():
        (tmp_path / f"{name}.ts").write_text(text)
    assert bool(circle(front_end_imports(tmp_path))) == is_circle

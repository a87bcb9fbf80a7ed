"""The front end's files and folders import each other in one direction."""

from __future__ import annotations

import os
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "src/regard/view/frontend/src"
# Types count as well, which a bundler leaves out: who reads one file has to read the other.
IMPORTED = re.compile(r'\bfrom "(\.[^"]*)"|^import "(\.[^"]*)"', re.MULTILINE)

Graph = dict[str, set[str]]


def imports(sources: Path) -> Graph:
    """Of each file, by its path without an ending, those that it imports."""
    graph: Graph = {}
    for file in sources.rglob("*.ts"):
        name = file.relative_to(sources).with_suffix("").as_posix()
        found = ["".join(groups) for groups in IMPORTED.findall(file.read_text("utf-8"))]
        folder = os.path.dirname(name)
        graph[name] = {os.path.normpath(os.path.join(folder, each)) for each in found}
    return graph


def folders(graph: Graph) -> Graph:
    """The same of folders; a file that is in none stands for itself."""
    merged: Graph = {}
    for file, used in graph.items():
        room = file.split("/")[0]
        merged.setdefault(room, set()).update({each.split("/")[0] for each in used} - {room})
    return merged


def circle(graph: Graph) -> str | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " <- ".join(error.args[1])
    return None


def test_no_file_imports_itself_through_others() -> None:
    graph = imports(SOURCES)
    known = {*graph, *(p.relative_to(SOURCES).as_posix() for p in SOURCES.rglob("*.css"))}
    assert len(graph) > 30
    assert set().union(*graph.values()) <= known
    assert circle(graph) is None


def test_no_folder_imports_itself_through_others() -> None:
    assert circle(folders(imports(SOURCES))) is None


@pytest.mark.parametrize(
    "line",
    [
        'import { b } from "../two/b";',
        'import type {\n  B,\n} from "../two/b";',
        'export * from "../two/b";',
        'import "../two/b";',
    ],
)
def test_a_circle_is_told(tmp_path: Path, line: str) -> None:
    for name, text in {"one/a": line, "two/b": 'import { c } from "./c";', "two/c": ""}.items():
        file = tmp_path / f"{name}.ts"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert circle(imports(tmp_path)) is None
    (tmp_path / "one/d.ts").write_text("")
    (tmp_path / "two/c.ts").write_text('import type { D } from "../one/d";')
    assert circle(imports(tmp_path)) is None
    assert circle(folders(imports(tmp_path))) in ("one <- two <- one", "two <- one <- two")
    (tmp_path / "two/c.ts").write_text('import type { A } from "../one/a";')
    told = circle(imports(tmp_path))
    assert told is not None
    assert {"one/a", "two/b", "two/c"} == set(told.split(" <- "))

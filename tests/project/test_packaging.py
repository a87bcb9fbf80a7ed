"""What is built and installed: an sdist holds the front end, and needs no npm to become a wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import regard
from regard import RegardError
from regard.models import installed, named_models
from regard.view.web import bundle

pytest.importorskip("hatchling", reason="the build backend; pip install 'regard[dev]'")
ROOT = Path(__file__).parents[2]
BUNDLE = "src/regard/view/bundle/regard.js"
MODELS = ROOT / "packages/regard-models"
LARGEST = 20e6
"""Bytes of a wheel. Models for which there is no room are in a package of their own."""
NPM = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *build) mkdir -p {root}/src/regard/view/bundle && echo built > {root}/{bundle} ;; esac
exit {code}
"""


def hook(root: Path, target: str) -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class App:
        told: list[str] = []  # noqa: RUF012

        def display_warning(self, text: str) -> None:
            self.told.append(text)

    return module.FrontEnd(str(root), {}, None, None, str(root / "dist"), target, App())


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout without a bundle, on a machine without npm."""
    sources = tmp_path / "src/regard/view/frontend/src"
    sources.mkdir(parents=True)
    (sources / "main.ts").write_text("export {};")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def with_npm(tree: Path, code: int = 0) -> Path:
    """Give a tree an npm that builds, or one that fails. What it was asked is in a file."""
    (tree / "bin").mkdir()
    (log := tree / "npm.log").touch()
    npm = tree / "bin" / "npm"
    npm.write_text(NPM.format(log=log, root=tree, bundle=BUNDLE, code=code))
    npm.chmod(0o755)
    os.environ["PATH"] += f"{os.pathsep}/usr/bin{os.pathsep}/bin"
    return log


def with_bundle(tree: Path, *, age: float = 0.0) -> Path:
    made = tree / BUNDLE
    made.parent.mkdir()
    made.write_text("bundle")
    now = made.stat().st_mtime
    os.utime(made, (now, now - age))
    return made


@pytest.mark.parametrize("target", ["sdist", "wheel"])
def test_npm_builds_what_is_not_there(tree: Path, target: str) -> None:
    log = with_npm(tree)
    hook(tree, target).initialize("standard", {})
    assert (tree / BUNDLE).read_text() == "built\n"
    assert [line.split()[2:] for line in log.read_text().splitlines()] == [["ci"], ["run", "build"]]


def test_npm_builds_what_is_older_than_its_sources(tree: Path) -> None:
    with_npm(tree)
    with_bundle(tree, age=60)
    hook(tree, "wheel").initialize("standard", {})
    assert (tree / BUNDLE).read_text() == "built\n"


@pytest.mark.parametrize("target", ["sdist", "wheel"])
def test_a_bundle_as_new_as_its_sources_is_used(tree: Path, target: str) -> None:
    with_bundle(tree)
    made = hook(tree, target)
    made.initialize("standard", {})
    assert (tree / BUNDLE).read_text() == "bundle"
    assert made.app.told == []


def test_the_bundle_of_an_sdist_is_used_whatever_its_time(tree: Path) -> None:
    with_bundle(tree, age=60)
    (tree / "PKG-INFO").touch()
    hook(tree, "wheel").initialize("standard", {})
    assert (tree / BUNDLE).read_text() == "bundle"


def test_a_wheel_from_a_checkout_goes_without(tree: Path) -> None:
    made = hook(tree, "wheel")
    made.initialize("standard", {})
    (said,) = made.app.told
    assert "install node 18 or later (npm was not found). This wheel is without them." in said
    assert not (tree / BUNDLE).exists()


def test_a_wheel_goes_without_what_npm_cannot_build(tree: Path) -> None:
    with_npm(tree, code=1)
    made = hook(tree, "wheel")
    made.initialize("standard", {})
    (said,) = made.app.told
    assert "returned non-zero exit status 1" in said


def test_an_sdist_is_not_made_without_the_front_end(tree: Path) -> None:
    with pytest.raises(RuntimeError, match=r"built with npm.*\(npm was not found\)"):
        hook(tree, "sdist").initialize("standard", {})


def test_a_wheel_is_not_made_with_an_old_front_end(tree: Path) -> None:
    with_bundle(tree, age=60)
    with pytest.raises(RuntimeError, match=r"regard\.js is older than its sources"):
        hook(tree, "wheel").initialize("standard", {})


def test_what_is_edited_is_built_by_hand(tree: Path) -> None:
    made = hook(tree, "wheel")
    made.initialize("editable", {})
    assert made.app.told == []


def built(target: str, root: Path, out: Path, path: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.mark.skipif(not bundle.BUNDLE.exists(), reason="make frontend")
def test_an_sdist_becomes_a_wheel_without_npm(tmp_path: Path) -> None:
    sdist = built("sdist", ROOT, tmp_path / "sdist", os.environ["PATH"])
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (tree,) = (tmp_path / "unpacked").iterdir()
    assert not (tree / "src/regard/view/frontend/node_modules").exists()
    wheel = built("wheel", tree, tmp_path / "wheel", str(tmp_path / "nothing"))
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
        for part in ("regard", "app", "later"):
            packed = archive.read(f"regard/view/bundle/{part}.js")
            assert packed == bundle.BUNDLE.with_name(f"{part}.js").read_bytes()
        entry = next(name for name in inside if name.endswith("entry_points.txt"))
        assert b"regard = regard_command:main" in archive.read(entry)
    assert wheel.stat().st_size < LARGEST
    assert not [name for name in inside if "regard-king-james" in name]
    assert "regard_command/__init__.py" in inside
    assert not [name for name in inside if "frontend" in name]
    for held in (
        "models/embedded/regard-small/model.safetensors",
        "lab/data/sayings.tsv.bz2",
        "py.typed",
    ):
        assert f"regard/{held}" in inside


def test_models_in_a_package_of_their_own_are_data_and_built_alike(tmp_path: Path) -> None:
    (name,) = installed.OWN
    made = []
    for i in range(2):
        # The second as from another checkout: other times, another place.
        root = shutil.copytree(MODELS, tmp_path / f"clone-{i}")
        for path in root.rglob("*"):
            os.utime(path, (i * 1e6 + 1e9,) * 2)
        sdist = built("sdist", root, tmp_path / f"sdist-{i}", os.environ["PATH"])
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp_path / f"unpacked-{i}", filter="data")
        (tree,) = (tmp_path / f"unpacked-{i}").iterdir()
        wheel = built("wheel", tree, tmp_path / f"wheel-{i}", os.environ["PATH"])
        made.append((sdist.read_bytes(), wheel.read_bytes()))
    assert made[0] == made[1]
    assert len(made[0][1]) < LARGEST
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
        kept = archive.read(f"regard_models/{name}/model.safetensors")
        about = next(archive.read(n) for n in inside if n.endswith("METADATA")).decode()
    assert kept == (named_models.own_place(name) / "model.safetensors").read_bytes()
    assert [n for n in inside if n.endswith(".py")] == ["regard_models/__init__.py"]
    assert "Requires-Dist" not in about


def test_the_extra_asks_for_models_that_are_there() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = tomllib.loads((MODELS / "pyproject.toml").read_text("utf-8"))["project"]
    (asked,) = wanted["project"]["optional-dependencies"]["models"]
    name, least = asked.split(">=")
    assert name == project["name"] == installed.OWN["regard-king-james"].package
    assert project["version"].startswith(least)
    assert (MODELS / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_extras_are_named_as_they_are_and_for_any_shell() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].keys()
    pages = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    # An opening bracket without quotation marks is a pattern to zsh.
    asked = re.compile(r"pip install\s+(.?)regard\[([\w,]+)\](.?)")
    found = {(page, *words) for page in pages for words in asked.findall(page.read_text("utf-8"))}
    assert len(found) > 10
    assert [one for one in found if (one[1], one[3]) != ("'", "'")] == []
    named = {extra for one in found for extra in one[2].split(",")}
    assert named | {model.extra for model in installed.MODELS.values()} <= extras


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("verb", ["test", "docs", "images"])
def test_verbs_whose_examples_write_pages_build_the_front_end(verb: str, tmp_path: Path) -> None:
    # A checkout as it is cloned: nothing is built.
    shutil.copy(ROOT / "Makefile", tmp_path)
    frontend = "src/regard/view/frontend"
    for name in ("package.json", "package-lock.json", "build.mjs"):
        (tmp_path / frontend).mkdir(parents=True, exist_ok=True)
        (tmp_path / frontend / name).touch()
    for name in ("pyproject.toml", "constraints.txt", "src/regard/version.py"):
        (tmp_path / name).touch()
    (tmp_path / "tests").mkdir()
    done = subprocess.run(
        ["make", "--dry-run", verb], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert f"npm --prefix {frontend} run --silent build" in done.stdout


def test_the_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert (ROOT / project["tool"]["hatch"]["version"]["path"]).name == "version.py"
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert cited
    assert cited[1] == regard.__version__


def test_what_an_sdist_names_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    named = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [name for name in named if not (ROOT / name).exists()] == []
    # What pages of docs/ link to comes with them.
    assert {"docs", "tests", "benchmarks", "CONTRIBUTING.md", "LOG.md", "SECURITY.md"} <= set(named)


def test_views_without_the_bundle_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "BUNDLE", tmp_path / "regard.js")
    with pytest.raises(RegardError, match="has not been built") as error:
        bundle.script()
    assert "node 18 or later and npm" in str(error.value)
    assert "install regard again" in str(error.value)
    assert "make frontend" in str(error.value)

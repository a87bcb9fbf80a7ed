"""Documentation that leads somewhere: links, anchors, navigation, names of the API, commands."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

import regard
from regard.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOP = [ROOT / f"{name}.md" for name in ("README", "SECURITY", "CONTRIBUTING")]
PAGES = sorted([*DOCS.rglob("*.md"), *TOP])
OTHER = [ROOT / "CHANGELOG.md", *ROOT.glob("packages/*/README.md")]
FENCE = re.compile(r"^(`{3,}|~{3,})(.*?)^\1\s*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")
HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHELL = re.compile(r"^```(sh|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`((?:regard|make) [a-z][^`\n]*)`(?!`)")
TOOLS = {"export", "make", "mypy", "pip", "python", "regard", "sha256sum", "torchrun"}
AUTODOC = re.compile(r"^\.\. (auto\w+|currentmodule):: ([\w.]+)", re.MULTILINE)


def prose(text: str) -> str:
    """A page without its code, in which brackets mean something else."""
    return re.sub(r"`[^`\n]*`", lambda code: "x" * len(code[0]), FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """The names of a page's headings, as made where a repository is browsed and by the site."""
    found: Counter[str] = Counter()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\]\([^)]*\)", "", heading).lower()
        found[re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")] += 1
    return {f"{name}-{i}" if i else name for name, count in found.items() for i in range(count)}


def broken(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    for link in LINK.findall(prose(text)):
        if re.match(r"(https?|mailto):", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        there = text if not path else _text(target)
        if there is None or (anchor and anchor not in anchors(there)):
            wrong.append(link)
    return wrong


def _text(path: Path) -> str | None:
    """What a file of the repository says, if it is one."""
    inside = path.is_file() and ROOT in path.parents
    return path.read_text("utf-8", errors="replace") if inside else None


def garbled(text: str) -> list[str]:
    """The commands of a page that could not be typed, such as those that a re-wrapping joined."""
    lines = INLINE.findall(FENCE.sub("", text))
    for kind, block in SHELL.findall(text):
        typed = block.replace("\\\n", " ").splitlines()
        # Of a session in a terminal the other lines are output.
        lines += typed if kind == "sh" else [x[2:] for x in typed if x.startswith("$ ")]
    return [line for line in lines if not _is_command(line)]


def _is_command(line: str) -> bool:
    """Whether each part of a line is a known command with the options it has, then one comment."""
    if re.search(r"#.*\s#", line):
        return False
    return all(_is_known(shlex.split(part, comments=True)) for part in line.split(" && "))


def _is_known(words: list[str]) -> bool:
    tool, *rest = [*words, ""]
    if Path(tool).name == "make":
        verbs = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return rest[0] in verbs
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    if Path(tool).name != "regard" or rest[0] not in commands:
        return Path(tool).name in TOOLS
    options = {"--help", *(x for one in commands[rest[0]].params for x in one.opts)}
    options |= {x for one in commands[rest[0]].params for x in one.secondary_opts}
    return {x.partition("=")[0] for x in rest if re.match("--?[a-z]|[–—]", x)} <= options


def below(page: Path) -> set[Path]:
    """The pages that the navigation leads to from one page, and from those."""
    found = set()
    for tree in TOCTREE.findall(page.read_text("utf-8")):
        for line in tree.splitlines():
            if line and not line.startswith(":"):
                entry = re.sub(r".*<(.+)>", r"\1", line)
                child = (page.parent / f"{entry}.md").resolve()
                assert child.is_file(), f"{page.name} names {entry}, which is not there"
                found |= {child, *below(child)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text("utf-8")) == []


def test_a_broken_link_is_noticed() -> None:
    text = "# A page\n[a](#a-page) [b](#another) [c](nowhere.md) [d](lab.md#no) `[e](no)`"
    assert broken(DOCS / "index.md", text) == ["#another", "nowhere.md", "lab.md#no"]


@pytest.mark.parametrize("page", [*PAGES, *OTHER], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_can_be_typed(page: Path) -> None:
    assert garbled(page.read_text("utf-8")) == []


def test_a_garbled_command_is_noticed() -> None:
    joined = "pip install regard  # with a model regard view  # in the browser:"
    for line in (
        joined,
        "what every word attends to",
        "regard view –numbers",
        "regard view --no-such-option",
        "make nothing",
        "pip install regard && attention",
    ):
        assert garbled(f"```sh\n{line}\n```\n") == [line]
        assert garbled(f"```console\n$ {line}\noutput\n```\n") == [line]
    assert garbled("say `regard view --numbr`, `make up` or `regard.view`") == [
        "regard view --numbr",
        "make up",
    ]
    assert garbled("```sh\nregard view \\\n    --page map.html   # all heads\n```\n") == []


def test_every_page_is_in_the_navigation() -> None:
    assert set(DOCS.rglob("*.md")) - below(DOCS / "index.md") == {DOCS / "index.md"}


def test_every_page_of_results_has_a_title_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    site = import_module("result_titles")
    for page in (ROOT / "benchmarks/results").glob("*.md"):
        source = [page.read_text("utf-8")]
        site.retitle(SimpleNamespace(srcdir=ROOT), f"benchmarks/results/{page.stem}", source)
        title, _, rest = source[0].partition("\n")
        assert re.match("# [A-Z][^_]+$", title), f"docs/results.md gives {page.name} no title"
        assert rest == page.read_text("utf-8").partition("\n")[2]


def test_every_public_name_is_in_the_api() -> None:
    documented = set()
    for page in (DOCS / "api").glob("*.md"):
        module = ""
        for directive, name in AUTODOC.findall(page.read_text("utf-8")):
            if directive == "currentmodule":
                module = f"{name}."
            elif directive == "automodule":
                listed = import_module(name)
                documented |= {name, *(f"{name}.{part}" for part in getattr(listed, "__all__", ()))}
            else:
                home, _, thing = f"{module}{name}".rpartition(".")
                assert hasattr(import_module(home), thing), f"{page.name} names {name}"
                documented.add(f"{home}.{thing}")
    assert {f"regard.{name}" for name in regard.__all__} <= documented

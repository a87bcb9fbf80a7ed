"""Words of the command: options with odd values, files that are none, names that are commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.fuzz.targets import Target
from tests.fuzz.trace_files import written

VALUES = [
    "", " ", "-1", "0", "1", "3", "99999999999999999999", "nan", "1e309", "auto", "mean", "*", "**",
    "[", "\x1b[31m", "\ud800", "../../x", "~nobody/x", "/dev/null", "/", ".", "-", "a" * 300, "é漢",
    "cpu", "causal", "window:3", "window:-1", "cosine", "spelling", "x.svg", "x.html", "128k", "1M",
    "gpt2", "H100 SXM", "here", "float32", "arcs", "heads", "statistics",
]  # fmt: skip
OPTIONS = {
    "view": ["--model", "--layer", "--head", "--token", "--call", "--mask", "--score",
             "--temperature", "--picture", "--page", "--kind"],
    "record": ["--model", "--text", "--out", "--keep", "--layers", "--max-tokens", "--dtype",
               "--device"],
    "cost": ["--model", "--context", "--batch", "--device", "--dtype", "--plot"],
}  # fmt: skip
FLAGS = {"view": ["--numbers", "--plain", "--dark"], "record": ["--force"], "cost": ["--json"]}


def prepare(kept: Path) -> Callable[[Random, Path], str]:
    from click import ClickException
    from typer.testing import CliRunner

    from regard import cli
    from regard.visible import visible

    written(kept / "x.regard")
    runner = CliRunner()

    def case(draw: Random, folder: Path) -> str:
        command = draw.choice(["view", "view", "record", "cost"])
        (folder / "text").write_text("a word and another word")
        files = [str(kept / "x.regard"), str(folder / "text"), str(folder / "out")]
        words = [command, *(["--terminal"] if command == "view" else [])]
        for _ in range(draw.randint(0, 4)):
            words.append(draw.choice(OPTIONS[command]))
            words.append(str(draw.choice([*VALUES, *files])))
            if words[-2] in ("--picture", "--page", "--out", "--plot"):
                words[-1] = str(folder / words[-1].strip("/.~")[:40])
        if command == "view":
            words += draw.choices([*files[:2], *VALUES], k=draw.randint(0, 2))
        words += draw.sample(FLAGS[command], draw.randint(0, 1))
        result = runner.invoke(cli.app, words)
        error = result.exception
        if error is not None and not isinstance(error, (SystemExit, ClickException)):
            raise error
        said = [s for s in result.output if s not in "\n\u200e" and visible(s) != s]
        usage = result.output.startswith("Usage:")
        assert usage or not said, f"commands to the terminal: {said!r} of {words!r}"
        return f"exit {result.exit_code}"

    return case


target = Target("command line", prepare, seconds=30.0)

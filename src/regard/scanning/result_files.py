"""What a scan leaves in its folder: tables, and the texts that they name."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from regard.files import expanded, finite_or_null, is_folder, replacing
from regard.scanning.scan_table import Extreme, Scan
from regard.scanning.scanner import Scanner

HEADS, EXTREMES, SUMMARY, TABLE = "heads.jsonl", "extremes.jsonl", "scan.json", "heads.parquet"


def write(scan: Scan, scanner: Scanner) -> list[Path]:
    """Write everything; the summary last, so that a folder that has one is done."""
    folder = scanner.folder
    (folder / "texts").mkdir(exist_ok=True)
    for number in sorted({extreme.text for extreme in scan.extremes}):
        _put(folder / text_file(number), scanner.as_read(number))
    _lines(folder / HEADS, (head.record() for head in scan))
    _lines(folder / EXTREMES, (_record(extreme, scanner) for extreme in scan.extremes))
    written = [folder / HEADS, folder / EXTREMES]
    if find_spec("pyarrow") is not None:
        _parquet(scan, folder / TABLE)
        written.append(folder / TABLE)
    about = {
        "model": scanner.reader.name,
        **{name: getattr(scan, name) for name in ("texts", "tokens", "cut", "empty")},
        "layers": list(scan.paths),
        "settings": scanner.settings.values,
    }
    _put(folder / SUMMARY, json.dumps(finite_or_null(about), indent=1) + "\n")
    return [*written, folder / SUMMARY]


def text_file(number: int) -> str:
    """Where in a folder a text is that is named in its tables."""
    return f"texts/{number:06d}.txt"


def view_command(extreme: Extreme, model: str, folder: Path | None = None) -> str:
    """What opens the row in the viewer: in the folder itself, or from elsewhere."""
    text = text_file(extreme.text)
    here = expanded(model)
    words = [
        "regard", "view", text if folder is None else str(folder / text),
        "--model", str(here.resolve()) if is_folder(here) else model,
        "--layer", extreme.path, "--head", str(extreme.head), "--token", str(extreme.place + 1),
    ]  # fmt: skip
    return shlex.join(words)


def _record(extreme: Extreme, scanner: Scanner) -> dict[str, Any]:
    source = scanner.corpus.source(extreme.text)
    return {
        **asdict(extreme),
        "file": source.file,
        "line": source.line,
        "view": view_command(extreme, scanner.reader.name),
    }


def _lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    lines = [json.dumps(finite_or_null(record), ensure_ascii=False) for record in records]
    _put(path, "".join(f"{line}\n" for line in lines))


def _put(path: Path, text: str) -> None:
    with replacing(path) as unfinished:
        unfinished.write_bytes(text.encode("utf-8", "surrogatepass"))


def _parquet(scan: Scan, path: Path) -> None:
    """One row a head, one column a number."""
    # Imported late: pyarrow is an extra.
    import pyarrow
    import pyarrow.parquet

    rows = []
    for head in scan:
        row = {n: getattr(head, n) for n in ("layer", "head", "path", "rows", "broken", "offset")}
        for name, s in head.statistics.items():
            for part in ("mean", "deviation", "least", "most"):
                row[f"{name}_{part}"] = getattr(s, part)
            row |= {f"{name}_q{share:g}": value for share, value in s.quantiles.items()}
        rows.append(row | {f"role_{name}": value for name, value in head.roles.items()})
    with replacing(path) as unfinished:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), unfinished)

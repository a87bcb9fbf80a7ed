"""The table of a scan as Parquet: a row for each head, a column for each number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from regard.scanning import Job, scan
from regard.scanning.scan_table import QUANTILES
from tests.scanning.conftest import everything

parquet: Any = pytest.importorskip("pyarrow.parquet", reason="regard[parquet] is not installed")


def test_the_table_has_every_number_to_the_last_bit(job: Job) -> None:
    found = scan(job)
    assert found is not None
    path = Path(job.folder) / "heads.parquet"
    table = parquet.read_table(path)
    rows, heads = table.to_pylist(), list(found)
    assert [(row["layer"], row["head"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for row, head in zip(rows, heads, strict=True):
        told = {"rows": head.rows, "broken": head.broken, "offset": head.offset, "path": head.path}
        for name, s in head.statistics.items():
            told |= {f"{name}_{part}": getattr(s, part) for part in ("mean", "deviation")}
            told |= {f"{name}_least": s.least, f"{name}_most": s.most}
            told |= {f"{name}_q{share:g}": s.quantiles[share] for share in QUANTILES}
        told |= {f"role_{name}": value for name, value in head.roles.items()}
        assert set(row) == {"layer", "head", *told}
        for name, value in told.items():
            unknown = isinstance(value, float) and math.isnan(value)
            assert math.isnan(row[name]) if unknown else row[name] == value, name
    # Asked for again it is the same file.
    before = everything(job.folder)
    scan(job)
    assert everything(job.folder) == before

"""A Plan: which backend will run a call, why the others will not, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from regard.display import table_html


@dataclass(frozen=True)
class Plan:
    """What `regard.plan` found. Prints as a table, and is one in a notebook."""

    call: str
    backend: str
    refusals: dict[str, list[str]]
    """For every other backend, why it does not run; an empty list: it could, but ranks lower."""
    flops_needed: int
    """Two matrix products over the pairs that the mask allows."""
    flops_executed: int
    """The same over the pairs that the backend computes."""
    flops_dense: int
    """The same over all pairs."""
    bytes_moved: int
    """Inputs read once, output written once."""
    peak_memory: int
    """Bytes held at most besides the inputs: the output, row statistics and scratch."""
    inner_loop: str = ""
    """What does the work inside a tile, and why nothing faster; empty where there is no choice."""

    def _rows(self) -> list[tuple[str, str]]:
        """What there is to say, each with its label."""
        dense = max(self.flops_dense, 1)
        rows = [("backend", self.backend)]
        if self.inner_loop:
            rows.append(("inner loop", self.inner_loop))
        for name, reasons in self.refusals.items():
            rows.append((f"not {name}", "; ".join(reasons) or "it could, but ranks lower"))
        for label, flops in (
            ("needed", self.flops_needed),
            ("executed", self.flops_executed),
            ("dense", self.flops_dense),
        ):
            rows.append((f"{label} FLOPs", f"{_si(flops)} ({flops / dense:.1%} of dense)"))
        rows.append(("bytes moved", _si(self.bytes_moved) + "B"))
        rows.append(("peak memory", _si(self.peak_memory) + "B beside the inputs"))
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(label) for label, _ in rows)
        body = "\n".join(f"  {label:<{width}}  {text}" for label, text in rows)
        return f"{self.call}\n{body}"

    def _repr_html_(self) -> str:
        """The same as the last line of a notebook's cell."""
        return table_html(self._rows(), title=self.call)


def _si(n: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if n < 1000:
            return f"{n:.3g} {unit}" if unit else f"{n:.0f} "
        n /= 1000
    return f"{n:.3g} E"

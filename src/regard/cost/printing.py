"""A cost as text, 80 columns wide, and as tables of HTML."""

from __future__ import annotations

import html
import textwrap
from typing import TYPE_CHECKING, NamedTuple

from regard.cost.parts import Step
from regard.cost.units import counted, sized, timed
from regard.display import table_html
from regard.visible import visible

if TYPE_CHECKING:
    from regard.cost.costs import Cost

WIDTH = 80


class Block(NamedTuple):
    """Some rows that belong together; a rule stands before some of them."""

    rows: list[list[str]]
    rules: tuple[int, ...] = ()
    words: bool = False
    """Whether cells are words, which stand to the left; numbers stand to the right."""


def table(rows: list[list[str]], *, rules: tuple[int, ...] = ()) -> str:
    """Columns: the first to the left, numbers to the right. A rule stands before some rows.

    >>> print(table([["", "a"], ["b", "10"]], rules=(1,)))
          a
    ───────
      b  10
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for at, row in enumerate(rows):
        if at in rules:
            lines.append("─" * (2 + sum(widths) + 2 * (len(widths) - 1)))
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def printed(cost: Cost) -> str:
    """A cost as text."""
    head = textwrap.fill(cost.what, WIDTH, subsequent_indent="  ", break_long_words=False)
    body = [_aside(b) if b.words else table(b.rows, rules=b.rules) for b in _blocks(cost)]
    notes = "\n".join(textwrap.fill(note, WIDTH) for note in _notes(cost))
    # A configuration's name is that of a folder.
    return visible("\n\n".join([head, *body, notes]))


def in_html(cost: Cost) -> str:
    """The same as tables of HTML."""
    first, *others = _blocks(cost)
    tables = [table_html(first.rows, header=True, numbers=True, title=cost.what)]
    tables += [table_html(b.rows, header=bool(b.rules), numbers=not b.words) for b in others]
    return "\n".join([*tables, *(f"<p>{html.escape(note)}</p>" for note in _notes(cost))])


def _blocks(cost: Cost) -> list[Block]:
    found = (_work(cost), _memory(cost), _cache(cost), _roofline(cost))
    return [block for block in found if block is not None]


def _aside(block: Block) -> str:
    """Labels, and words beside them; the first row is the heading."""
    width = max(len(label) for label, _ in block.rows)
    lines = [f"  {label:<{width}}  {text}" for label, text in block.rows]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])


def _work(cost: Cost) -> Block:
    total = max(cost.flops("needed"), 1)
    rows = [["forward pass", "MACs", "FLOPs: needed", "executed", "dense", "share"]]
    rows += [
        [
            part.name,
            counted(part.macs.dense),
            *(counted(part.flops(c)) for c in ("needed", "executed", "dense")),
            f"{part.flops('needed') / total:.1%}",
        ]
        for part in cost.parts
    ]
    after = len(rows)
    steps: tuple[tuple[str, Step], ...] = (
        ("forward", "forward"), ("backward", "backward"), ("training step", "training")
    )  # fmt: skip
    for label, step in steps:
        macs = counted(cost.macs.dense) if step == "forward" else ""
        flops = [counted(cost.flops(c, step)) for c in ("needed", "executed", "dense")]
        rows.append([label, macs, *flops, "100.0%" if step == "forward" else ""])
    return Block(rows, (1, after))


def _memory(cost: Cost) -> Block:
    moved = [sized(cost.bytes_moved(how)) for how in ("eager", "fused")]
    layers = cost.configuration is not None
    rows = [
        ["memory", "eager", "fused"],
        ["bytes moved, forward", *moved],
        ["FLOPs for each byte", *(_ratio(cost.intensity(how)) for how in ("eager", "fused"))],
        [
            "most held by attention" + (" (one layer)" if layers else ""),
            *(sized(m.peak) for m in (cost.eager, cost.fused)),
        ],
        [
            "kept for backward" + (" (all layers)" if layers else ""),
            *(sized(m.kept) for m in (cost.eager, cost.fused)),
        ],
    ]
    return Block(rows, (1,))


def _ratio(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def _cache(cost: Cost) -> Block | None:
    if cost.cache is None:
        return None
    rows = [
        ["weights", sized(cost.weights)],
        ["cache, one token", sized(cost.cache.per_token)],
        ["cache, this context", sized(cost.cache.in_context)],
    ]
    return Block(rows)


def _roofline(cost: Cost) -> Block | None:
    if cost.device is None:
        return None
    device = cost.device
    peaks = f"{counted(device.rate(cost.dtype))}FLOP/s, {counted(device.bandwidth)}B/s"
    ridge = f"ridge {_ratio(device.ridge(cost.dtype))} FLOPs a byte"
    rows = [[f"at best on {device.name}", f"{peaks}; {ridge}"]]
    for label, (seconds, by) in (
        ("forward, fused", cost.time()),
        ("forward, eager", cost.time(how="eager")),
        ("training step, fused", cost.time(step="training")),
    ):
        rows.append([label, f"{timed(seconds)}, bound by {by}"])
    if cost.decoding is not None:
        each = cost.decode_time()
        rate = cost.tokens_per_second()
        rows.append(["decoding", f"{rate:,.1f} tokens/s, bound by {each.by}"])
        if device.memory is not None and cost.cache is not None:
            need = cost.weights + cost.cache.in_context
            fits = "fits" if need <= device.memory else "does not fit"
            rows.append(["weights and cache", f"{sized(need)}: {fits} in {sized(device.memory)}"])
    return Block(rows, (1,), words=True)


def _notes(cost: Cost) -> list[str]:
    tile = "×".join(map(str, cost.tile))
    text = (
        "One MAC is two FLOPs; MACs are of all pairs, as in textbooks. needed: pairs that the mask "
        f"allows; executed: tiles of {tile} that hold one; dense: all. share: of what is needed."
    )
    return [*cost.notes, text]

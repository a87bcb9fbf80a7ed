"""What watching costs: a forward pass, generating and a step of training, each beside the same
without; and eager's n×n weights.

PYTHONPATH=src python -m benchmarks.models.watching [--device cuda] [--out FOLDER] [--quick]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import regard
from benchmarks.measurement import RESULTS, interleaved, ratios, write
from benchmarks.models.monitoring import steps

LAYERS, HEADS, WIDTH = 12, 12, 768
KEEPS: tuple[regard.watching.Keep, ...] = ("statistics", "traces")
CASES = {"unwatched": "sdpa", "watched": "sdpa", "eager with weights": "eager"}
"""The implementation of attention that each is built with."""


def build(case: str, n: int, device: str) -> Any:
    """GPT-2 small without its last layer, with random weights: the same for every case."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=1024, n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, n_positions=n
    )
    model = transformers.GPT2Model._from_config(config, attn_implementation=CASES[case])
    return model.eval().to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def llama(device: str) -> Any:
    """A model of Llama's shape: 16 layers of 32 heads over 8, each 64 wide; on a CPU a narrow one,
    whose time is that of Python. Few words, so that nothing but the layers takes time."""
    cuda = device == "cuda"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=2048 if cuda else 64,
        intermediate_size=8192 if cuda else 64,
        num_hidden_layers=16,
        num_attention_heads=32 if cuda else 4,
        num_key_value_heads=8 if cuda else 2,
    )
    # On a card at once: a CPU takes long to make so many random numbers.
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16 if cuda else torch.float32
        )
    return model.eval()


def beside(device: str, act: Callable[[Any], object], models: dict[str, Any]) -> dict[str, Any]:
    """What is done with a model that nobody watches, the same again, and with watched ones."""

    def run(name: str, seen: Any = None) -> Callable[[], None]:
        @torch.no_grad()
        def once() -> None:
            act(models[name])
            if seen is not None:
                seen.clear()
            if device == "cuda":
                torch.cuda.synchronize()

        return once

    runs = {"unwatched": run("unwatched"), "again": run("unwatched")}
    for keep in KEEPS:
        runs[keep] = run(keep, models[f"{keep}: seen"])
    return runs


def llama_rows(device: str, repeats: int) -> list[dict[str, Any]]:
    """Forward passes, and generating 64 tokens: of one prompt, and of several."""
    models: dict[str, Any] = {name: llama(device) for name in ("unwatched", *KEEPS)}
    for keep in KEEPS:
        models[f"{keep}: seen"] = regard.watch(models[keep], keep=keep).attach()
    rows = []
    for n in (512, 4096) if device == "cuda" else (8, 64):
        ids = torch.randint(1, 1024, (1, n), generator=torch.Generator().manual_seed(1)).to(device)
        runs = beside(device, lambda model, ids=ids: model(ids, use_cache=False), models)
        rows.append({"what": f"forward, {n} tokens"} | ratios(runs, repeats))
    one = ids[:, :128]
    four, shown = padded(one)
    for what, given in (
        ("generating 64 tokens", {"input_ids": one}),
        ("the same of four prompts, padded", {"input_ids": four, "attention_mask": shown}),
    ):
        runs = beside(device, partial(generate, given=given), models)
        rows.append({"what": what} | ratios(runs, max(repeats // 5, 1)))
    return rows


def generate(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.generate(**given, max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0)


def padded(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of four prompts, of which two are shorter and padded on the left; and its mask."""
    four = ids.repeat(4, 1)
    shown = torch.ones_like(four)
    for row, share in ((1, 4), (3, 2)):
        shown[row, : ids.shape[1] // share] = 0
    return four, shown


def prepared(case: str, n: int, device: str) -> Callable[[], Any]:
    """A run of a model. One that is watched is watched from here on."""
    model = build(case, n, device)
    ids = torch.randint(1024, (1, n), generator=torch.Generator().manual_seed(1)).to(device)
    how = {"output_attentions": True} if case == "eager with weights" else {}
    if case == "watched":
        regard.watch(model, keep="statistics").attach()

    @torch.no_grad()
    def run() -> Any:
        out = model(ids, use_cache=False, **how)
        if device == "cuda":
            torch.cuda.synchronize()
        return out

    return run


def check(device: str) -> str:
    """Whether watching gives the same answers and the right entropies, before it is measured."""
    n = 256
    out = prepared("eager with weights", n, device)()
    weights = torch.stack(out.attentions).double()
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1).mean((1, 3))
    watched = build("watched", n, device)
    with regard.watch(watched) as seen:
        ids = torch.randint(1024, (1, n), generator=torch.Generator().manual_seed(1)).to(device)
        with torch.no_grad():
            got = watched(ids, use_cache=False).last_hidden_state
    found = torch.stack([layer.entropy for layer in seen.values()]).double()
    apart = float((got - out.last_hidden_state).abs().max() / out.last_hidden_state.abs().max())
    wrong = float((found - entropy).abs().max())
    assert apart < (1e-4 if device == "cpu" else 0.05), apart
    assert wrong < (1e-3 if device == "cpu" else 0.05), wrong
    return f"output within {apart:.1e} of eager's, entropies within {wrong:.1e}"


def speed(n: int, device: str, repeats: int) -> dict[str, Any]:
    runs: dict[str, Callable[[], Any]] = {}
    for case in ("unwatched", "unwatched again", "watched", "eager with weights"):
        run = prepared(case.removesuffix(" again"), n, device)
        if _fits(run):
            runs[case] = run
    once = {case: _dropped(run) for case, run in runs.items()}
    # Eager's weights fill the memory, and who comes next would have to ask for its own again.
    eagerly = {case: once.pop(case) for case in ("eager with weights",) if case in once}
    seconds = interleaved(once, repeats) | interleaved(eagerly, repeats)
    runs.clear()
    if device == "cuda":
        torch.cuda.empty_cache()
    plain, eager = seconds["unwatched"], seconds.get("eager with weights")
    return {
        "tokens": n,
        "unwatched ms": plain * 1e3,
        # How far two measurements of one and the same thing are apart.
        "unwatched again / unwatched": seconds["unwatched again"] / plain,
        "watched / unwatched": seconds["watched"] / plain,
        "eager with weights / unwatched": "out of memory" if eager is None else eager / plain,
    }


def _fits(run: Callable[[], Any]) -> bool:
    """Whether a run finds memory. What it took is given back before anything else is measured."""
    try:
        run()
    except torch.OutOfMemoryError:
        found = False
    else:
        found = True
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _dropped(run: Callable[[], Any]) -> Callable[[], None]:
    """A run whose output is gone when it ends."""

    def once() -> None:
        run()

    return once


def memory(n: int, device: str) -> dict[str, Any]:
    """Peaks beside weights, each in a process of its own."""
    found: dict[str, Any] = {"tokens": n}
    for case in CASES:
        this = [sys.executable, "-m", "benchmarks.models.watching"]
        command = [*this, "--peak", case, "--device", device, "--tokens", str(n)]
        done = subprocess.run(command, capture_output=True, text=True)
        said = done.stdout.split()
        if done.returncode and "OutOfMemoryError" not in done.stderr:
            raise RuntimeError(done.stderr)
        found[f"{case} MiB"] = int(said[-1]) / 2**20 if said else "out of memory"
    return found


def peak(case: str, n: int, device: str) -> int:
    """Bytes that a run takes at most, beside what was there before."""
    run = prepared(case, n, device)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    # Libraries settle and the tiles' loop is built before it counts.
    prepared(case, 64, device)()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def about(device: str, commit: str | None) -> dict[str, Any]:
    load = os.getloadavg()[0]
    found = {
        "model": f"GPT-2 small's shape, {LAYERS} layers of {HEADS} heads, random weights, "
        + ("float32" if device == "cpu" else "bfloat16"),
        "transformers": transformers.__version__,
        "load of the machine before": f"{load:.1f} on {os.cpu_count()} cores",
        "checked": check(device),
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found | ({"commit": commit} if commit else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--quick", action="store_true", help="short; kept only with --out")
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peak", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if options.peak:
        print(peak(options.peak, options.tokens, options.device))
        return
    cpu = options.device == "cpu"
    lengths = [2048] if cpu else [16384]
    more = about(options.device, options.commit)
    repeats = 7 if cpu else 25
    quick = 5 if options.quick else 15
    tables = {
        "Llama's shape, watched (times as long as unwatched)": llama_rows(options.device, quick)
    }
    # What is measured is told at once: the rest may take longer than somebody waits.
    print(tables, file=sys.stderr, flush=True)
    tables["A step of training GPT-2 small's shape, monitored (times as long)"] = steps(
        options.device, options.quick
    )
    if not options.quick:
        tables["Time of a forward pass (lower is better)"] = [
            speed(n, options.device, repeats) for n in lengths
        ]
        tables["Peak memory beside the weights"] = [memory(n, options.device) for n in lengths]
    folder = options.out or (None if options.quick else RESULTS)
    write("watching" if cpu else "watching_gpu", tables, more, folder)


if __name__ == "__main__":
    main()

"""Devices by name: how much they compute and move in a second, at best.

Rates are the makers' published peaks of dense (not sparse) matrix products, accumulated in float32,
and of the memory. Where they come from:

- NVIDIA H100, H200, A100 80GB, L40S and L4 Tensor Core GPU data sheets (SXM modules of the first
  three; half of the figures that are given "with sparsity"); RTX 4090: Ada GPU architecture
  whitepaper, appendix A. float32 is that of the CUDA cores, not TF32.
- AMD Instinct MI300X data sheet (matrix rates).
- Apple's announcement of the M1 Max, which gives one rate for its GPU.
- CPUs: cores × base clock × FLOPs a cycle, memory channels × their rate, from the product pages and
  optimisation guides. EPYC 9654: 96 × 2.4 GHz × 32 (float32) or 64 (AVX-512 BF16), 12 × DDR5-4800.
  Xeon 8480+: 56 × 2.0 GHz × 64 (AVX-512) or 1024 (AMX), 8 × DDR5-4800.

Real programs reach 60 to 80 % of such peaks, so a time from here is a bound. `regard doctor
--measure` adds an entry "here" with what this machine's products and copies do reach.
"""

from __future__ import annotations

from regard.arguments import described
from regard.cost.rates import Device
from regard.cost.this_machine import here
from regard.errors import RegardError


def _device(name: str, half: float, single: float, bandwidth: float, memory: float) -> Device:
    rates = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12}
    return Device(name, rates, bandwidth * 1e9, memory * 1e9)


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        _device("H200 SXM", 989.4, 66.9, 4800, 141),
        _device("H100 SXM", 989.4, 66.9, 3350, 80),
        _device("A100 80GB", 312, 19.5, 2039, 80),
        _device("L40S", 362, 91.6, 864, 48),
        _device("L4", 121, 30.3, 300, 24),
        _device("RTX 4090", 165.2, 82.6, 1008, 24),
        _device("MI300X", 1307.4, 163.4, 5300, 192),
        _device("M1 Max", 10.4, 10.4, 400, 64),
        Device("EPYC 9654", {"bfloat16": 14.7e12, "float32": 7.37e12}, 460.8e9),
        Device("Xeon 8480+", {"bfloat16": 114.7e12, "float32": 7.17e12}, 307.2e9),
    )
}


def device(name: str | Device) -> Device:
    """A device by name, or by a part of its name that no other has; "here" is this machine.

    >>> device("h100").name, device("rtx-4090").name
    ('H100 SXM', 'RTX 4090')
    """
    if isinstance(name, Device):
        return name
    if not isinstance(name, str):
        raise RegardError("a device has a name", got=described(name), accepted=", ".join(DEVICES))
    if _bare(name) == "here":
        return here()
    wanted = _bare(name)
    exact = [d for d in DEVICES.values() if _bare(d.name) == wanted]
    near = exact or [d for d in DEVICES.values() if wanted and wanted in _bare(d.name)]
    if len(near) == 1:
        return near[0]
    raise RegardError(
        "several devices have that in their name" if near else "unknown device",
        got=repr(name),
        accepted=", ".join(d.name for d in near or DEVICES.values()) + ("" if near else ", here"),
        do="" if near else "for this machine: regard doctor --measure, then --device here",
    )


def _bare(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum() or c == "+")

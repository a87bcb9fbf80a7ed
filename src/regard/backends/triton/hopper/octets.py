"""Octets: eight logits of a thread and a row, kept in memory where one of them reaches a bound.

Few of a row's logits are among its strongest, but of a tile of 64 queries nearly always some are.
Any branch on that would be taken in nearly every tile, by all warps of a group, since the next
product waits for all. So there is none: a thread compares the largest of eight of its logits with
the bound, and stores all eight where that reaches it, one predicated instruction after the other.
Which of the eight it was is asked once, after the last tile.

Four threads hold a row, each 32 columns of a tile of 128: two beside each other, then those eight
keys further on, and so forth. So an octet is the columns 0, 1, 8, 9, 16, 17, 24 and 25 behind the
first of a thread, which is 0, 2, 4 or 6; those of a tile begin 32 keys apart.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GROUPS = gl.constexpr(3)
"""Groups of warps of a program, each with 64 rows."""
ROWS = 64 * GROUPS.value
PARTS = gl.constexpr(4 * ROWS)
"""Parts of rows: each has four threads, and each of these its own memory."""
WORDS = gl.constexpr(12)
"""32-bit words that an octet takes: logits, the key of the first, and three that nobody reads, as
four are stored at once."""
SPARE = gl.constexpr(4)
"""Octets of a tile that a thread may keep of a row beyond the last that it has room for."""
LISTED = gl.constexpr(31)
"""Logits that a thread lists of a row at most."""
_HELD = 64
_COLUMNS = [0, 1, 8, 9, 16, 17, 24, 25]
_NEXT_OCTET = 4 * WORDS.value * PARTS.value
_NEXT_ENTRY = 8 * PARTS.value
"""Bytes between a thread's octets, and between the entries of its list."""


def _octets() -> dict[tuple[int, int], list[int]]:
    """The numbers of a thread by row and octet. Its two rows alternate every two numbers."""
    found: dict[tuple[int, int], list[int]] = {}
    for i in range(_HELD):
        found.setdefault((i // 2 % 2, i // 16), []).append(i)
    return found


def _keep() -> str:
    """Store the octets of a tile that reach the bounds. In: logits, bounds, where the next octet
    goes and where none may go any more (bytes behind the base), the tile's first key, the base.
    Out: where the next octet goes. Of all but the logits, the first number is of one row and the
    third of the other."""
    logit, bound, place, last, first, base = (_HELD * (1 + i) for i in range(6))
    lines = [f"mov.b32 o{row}, ${place + 2 * row};" for row in range(2)]
    for (row, octet), numbers in _octets().items():
        e = [f"${logit + i}" for i in numbers]
        lines += [
            *(f"max.f32 m{i}, {e[2 * i]}, {e[2 * i + 1]};" for i in range(4)),
            "max.f32 m0, m0, m1;",
            "max.f32 m2, m2, m3;",
            f"max.f32 g{row}{octet}, m0, m2;",
        ]
    for (row, octet), numbers in _octets().items():
        e = [f"${logit + i}" for i in numbers]
        lines += [
            f"setp.ge.f32 p, g{row}{octet}, ${bound + 2 * row};",
            f"cvt.u64.u32 to, o{row};",
            f"add.s64 to, to, ${base};",
            f"@p st.global.v4.f32 [to], {{{', '.join(e[:4])}}};",
            f"@p st.global.v4.f32 [to+16], {{{', '.join(e[4:])}}};",
            f"add.s32 key, ${first}, {32 * octet};",
            "@p st.global.b32 [to+32], key;",
            f"@p add.u32 o{row}, o{row}, {_NEXT_OCTET};",
        ]
    lines += [f"min.u32 ${2 * row}, o{row}, ${last + 2 * row};" for row in range(2)]
    largest = ", ".join(f"g{row}{octet}" for row, octet in _octets())
    head = f".reg .pred p;\n.reg .f32 m<4>, {largest};\n.reg .b32 o0, o1, key;\n.reg .b64 to;\n"
    return "{\n" + head + "\n".join(lines) + "\n}"


def _gather() -> str:
    """List the logits of a thread's octets that reach the bounds, with their keys. In: where its
    octets end and begin, and where none may go any more; bounds; the base of octets and of lists;
    where its list begins there. How many are listed stands behind the last place of the list, more
    than there is room for if octets were lost."""
    end, begin, last, bound, base, lists, place = (_HELD * (1 + i) for i in range(7))
    lines = ["mov.u32 even, %laneid;", "and.b32 even, even, 3;", "shl.b32 even, even, 1;"]
    for row in (0, 1):
        r = 2 * row
        lines += [
            f"mov.b32 o, ${begin + r};",
            "mov.b32 n, 0;",
            f"NEXT{row}:",
            f"setp.ge.u32 p, o, ${end + r};",
            f"@p bra END{row};",
            "cvt.u64.u32 from, o;",
            f"add.s64 from, from, ${base};",
            "ld.global.v4.f32 {e0, e1, e2, e3}, [from];",
            "ld.global.v4.f32 {e4, e5, e6, e7}, [from+16];",
            "ld.global.b32 key, [from+32];",
            "add.s32 key, key, even;",
        ]
        for i, column in enumerate(_COLUMNS):
            lines += [
                f"setp.ge.f32 p, e{i}, ${bound + r};",
                f"setp.lt.and.u32 q, n, {LISTED.value}, p;",
                f"mad.lo.u32 w, n, {_NEXT_ENTRY}, ${place + r};",
                "cvt.u64.u32 to, w;",
                f"add.s64 to, to, ${lists};",
                f"add.s32 here, key, {column};",
                f"@q st.global.v2.b32 [to], {{e{i}, here}};",
                "@p add.u32 n, n, 1;",
            ]
        lines += [
            f"add.u32 o, o, {_NEXT_OCTET};",
            f"bra NEXT{row};",
            f"END{row}:",
            f"setp.ge.u32 p, ${end + r}, ${last + r};",
            f"@p mov.b32 n, {LISTED.value + 1};",
            f"add.u32 w, ${place + r}, {LISTED.value * _NEXT_ENTRY};",
            "cvt.u64.u32 to, w;",
            f"add.s64 to, to, ${lists};",
            "st.global.b32 [to], n;",
        ]
    head = (
        ".reg .pred p, q;\n.reg .f32 e<8>;\n.reg .b32 even, n, o, w, key, here;\n"
        ".reg .b64 from, to;\n"
    )
    return "{\n" + head + "\n".join(lines) + "\n}"


_KEEP, _GATHER = gl.constexpr(_keep()), gl.constexpr(_gather())


def _form(*kinds: str) -> str:
    """The constraints of assembly with one result, and arguments of these kinds."""
    return ",".join(["=&r"] * _HELD + [kind for kind in kinds for _ in range(_HELD)])


_KEEP_FORM = gl.constexpr(_form("f", "f", "r", "r", "r", "l"))
_GATHER_FORM = gl.constexpr(_form("r", "r", "r", "f", "l", "l", "r"))


@gluon.jit
def keep(s, bound, place, last, start, octets):
    """Where the next octet goes, after those of a tile that reach the bound of their row."""
    bound, _ = gl.broadcast(gl.expand_dims(bound, 1), s)
    given = [s, bound, place, last, _all_alike(start, s), _all_alike(octets.to(gl.int64), s)]
    return gl.inline_asm_elementwise(_KEEP, _KEEP_FORM, given, gl.int32, False, 64)


@gluon.jit
def gather(place, begin, last, bound, octets, lists, at):
    """Write the list of each thread, once all octets are kept."""
    bound, _ = gl.broadcast(gl.expand_dims(bound, 1), place)
    octets, lists = octets.to(gl.int64), lists.to(gl.int64)
    given = [
        place, begin, last, bound, _all_alike(octets, place), _all_alike(lists, place), at,
    ]  # fmt: skip
    gl.inline_asm_elementwise(_GATHER, _GATHER_FORM, given, gl.int32, False, 64)


@gluon.jit
def _all_alike(number, t):
    return gl.full(t.shape, 0, number.dtype, t.type.layout) + number

"""Instructions that the compiler does not choose by itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from regard.backends.triton.pairs import INTERPRETED
from regard.backends.triton.rules import BAND, SPANS, allowed, span_at

PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)
"""Whether the GPU that runs the kernels knows these instructions."""


def _below(other: str) -> str:
    """A number where one unsigned integer is below another, else `other`. Left to itself the
    compiler compares ahead of the products, packs the results into bits, and unpacks them."""
    return f"""{{
.reg .pred p;
setp.lt.u32 p, $2, $3;
selp.f32 $0, $1, {other}, p;
}}"""


LOGIT_BELOW, WEIGHT_BELOW = tl.constexpr(_below("0fFF800000")), tl.constexpr(_below("0f00000000"))
"""With minus infinity, and with 0, for masked pairs."""
MARKED_BELOW = tl.constexpr(_below("0f80000000"))
"""With -0 for them, by which they are told from weights that are 0."""
UNLESS_MARKED = tl.constexpr("""{
.reg .pred p;
.reg .b32 bits;
mov.b32 bits, $2;
setp.ne.u32 p, bits, 0x80000000;
selp.f32 $0, $1, 0f00000000, p;
}""")
"""A number, or 0 where another is -0."""
UNLESS_DROPPED = tl.constexpr("""{
.reg .pred p;
.reg .b32 word, high;
add.u32 word, $2, $3;
shr.u32 high, word, 16;
xor.b32 word, word, high;
mul.lo.u32 word, word, 0x85EBCA6B;
shr.u32 high, word, 13;
xor.b32 word, word, high;
mul.lo.u32 word, word, 0xC2B2AE35;
shr.u32 high, word, 16;
xor.b32 word, word, high;
setp.ge.u32 p, word, $4;
selp.f32 $0, $1, 0f00000000, p;
}""")
"""A weight, or 0 where dropout drops it: `pairs.kept` of a query's word, a key and the threshold.
Left to itself the compiler keeps sums of words and columns through the loop over keys, and has too
few registers for them."""


def _unless_one(many: int) -> str:
    """Multiply this many numbers of a thread by their factors, unless all of a warp's are 1.
    The numbers belong to two rows, which alternate every two numbers."""
    factors = [f"${2 * many + i}" for i in range(many)]
    products = "".join(f"mul.rn.f32 ${i}, ${i}, {factor};\n" for i, factor in enumerate(factors))
    return f"""{{
.reg .pred p;
.reg .f32 least;
min.f32 least, {factors[0]}, {factors[2]};
setp.lt.f32 p, least, 0f3F800000;
vote.sync.any.pred p, p, 0xffffffff;
@!p bra.uni DONE;
{products}DONE:
}}"""


def _in_place(many: int) -> str:
    """The constraints of the assembly: this many numbers, overwritten, and as many factors."""
    return ",".join(["=f"] * many + [str(i) for i in range(many)] + ["f"] * many)


SHRINK_32, SHRINK_64 = tl.constexpr(_unless_one(32)), tl.constexpr(_unless_one(64))
SHRINK_32_FORM, SHRINK_64_FORM = tl.constexpr(_in_place(32)), tl.constexpr(_in_place(64))


def _seen_bits(word: str, place: str, many: str, most: int) -> str:
    """A bit for each of a thread's numbers of one row, whether the row sees its key: the first of
    them is `place` keys behind the first that it sees, of `many`. They lie in twos, eight keys
    apart, so that those below a key are a number of the lowest bits."""

    def below(bits: str, key: str) -> str:
        return f"""
max.s32 {key}, {key}, 0;
min.s32 {key}, {key}, {most};
shr.u32 {bits}, {key}, 3;
and.b32 {key}, {key}, 7;
min.u32 {key}, {key}, 2;
shl.b32 {bits}, {bits}, 1;
add.u32 {bits}, {bits}, {key};
shl.b32 {bits}, one, {bits};
sub.u32 {bits}, {bits}, 1;"""

    return f"""
sub.s32 key, {many}, {place};{below(word, "key")}
neg.s32 key, {place};{below("rest", "key")}
not.b32 rest, rest;
and.b32 {word}, {word}, rest;"""


def _unless_hidden(numbers: int) -> str:
    """This many numbers of a thread, minus infinity where a row does not see the key. They belong
    to two rows, which alternate every two numbers. One comparison for each would be three
    instructions a number, in tiles that are a good part of a short text."""
    each = numbers // 2
    place, many = 2 * numbers, 3 * numbers
    words = [
        _seen_bits(f"seen{row}", f"${place + 2 * row}", f"${many + 2 * row}", 4 * each)
        for row in range(2)
    ]
    chosen = []
    for i in range(numbers):
        row, bit = i // 2 % 2, i // 4 * 2 + i % 2
        chosen.append(
            f"and.b32 key, seen{row}, {1 << bit:#x};\nsetp.ne.u32 p, key, 0;\n"
            f"selp.f32 ${i}, ${numbers + i}, 0fFF800000, p;\n"
        )
    return f"""{{
.reg .pred p;
.reg .b32 key, rest, one, seen0, seen1;
mov.b32 one, 1;{"".join(words)}
{"".join(chosen)}}}"""


def _form(numbers: int) -> str:
    """Its constraints: this many numbers, their places and how many keys a row sees."""
    return ",".join(["=&f"] * numbers + ["f"] * numbers + ["r"] * (2 * numbers))


SEEN_32, SEEN_64 = tl.constexpr(_unless_hidden(32)), tl.constexpr(_unless_hidden(64))
SEEN_32_FORM, SEEN_64_FORM = tl.constexpr(_form(32)), tl.constexpr(_form(64))


RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
"""One over a number, as exactly as one instruction has it."""


def _at_barrier(what: str) -> str:
    """Arrive or wait at barrier $1 of $2 threads."""
    return f"bar.{what} $1, $2; mov.b32 $0, $1;"


ARRIVE, MEET = tl.constexpr(_at_barrier("arrive")), tl.constexpr(_at_barrier("sync"))


@triton.jit
def only_allowed(s, rule, q, k, limit, table, BM: tl.constexpr, BN: tl.constexpr):
    """Logits of a partial tile, minus infinity where a pair is masked."""
    if PTX and (rule.kind == BAND or rule.kind == SPANS):
        first, many = span_at(rule, q, limit, table)
        return tl.inline_asm_elementwise(
            LOGIT_BELOW, "=f,f,r,r", [s, k - first, many], tl.float32, True, 1
        )
    else:
        return tl.where(allowed(rule, q, k, limit, table, BM, BN), s, float("-inf"))

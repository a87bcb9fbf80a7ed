"""Where the warps of a program meet: the processor's own barriers, by number.

To arrive at a barrier in shared memory, the warps of a group wait for each other and one of their
threads arrives. At these each warp arrives and goes on. What is copied needs the others: only they
count bytes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard.backends.triton.assembly import ARRIVE, MEET

# There are 16. Triton takes those from 0 on for itself.
_QUERIES_FREE, KEYS_FREE, VALUES_FREE = gl.constexpr(6), gl.constexpr(8), gl.constexpr(11)
"""The first of the barriers for queries, for slots of keys, and for slots of values."""
_TURN = gl.constexpr(14)
MOST_STAGES = gl.constexpr(3)
_OWN = gl.constexpr(12)
"""The first of those at which a group meets, in kernels without values."""
_GROUP, _COPIER = gl.constexpr(128), gl.constexpr(32)


@gluon.jit
def queries_free(place):
    """The barrier of one of two places for queries."""
    return _QUERIES_FREE + place


@gluon.jit
def free(barrier, GROUPS: gl.constexpr = 2):
    """A group has read a slot."""
    _at_barrier(ARRIVE, barrier, _GROUP, GROUPS * _GROUP + _COPIER)


@gluon.jit
def wait_until_free(barrier, taken, GROUPS: gl.constexpr = 2):
    """The copying warp waits until all groups have read a slot."""
    if taken:
        _at_barrier(MEET, barrier, _COPIER, GROUPS * _GROUP + _COPIER)


@gluon.jit
def await_turn(half):
    """A group waits until the other has started its products."""
    _at_barrier(MEET, _TURN + half, _GROUP, 2 * _GROUP)


@gluon.jit
def give_turn(half):
    """The other group may start its products."""
    _at_barrier(ARRIVE, _TURN + 1 - half, _GROUP, 2 * _GROUP)


@gluon.jit
def meet():
    """Both groups wait for each other."""
    _at_barrier(MEET, _TURN, _GROUP, 2 * _GROUP)


@gluon.jit
def meet_own(group):
    """The warps of a group wait for each other, and see what each has written."""
    _at_barrier(MEET, _OWN + group, _GROUP, _GROUP)


@gluon.jit
def _at_barrier(HOW: gl.constexpr, barrier, OWN: gl.constexpr, ALL: gl.constexpr):
    """OWN of ALL threads arrive at a barrier, or wait there for the others: HOW says which."""
    each = gl.zeros((OWN,), gl.int32, gl.BlockedLayout([1], [32], [OWN // 32], [0]))
    gl.inline_asm_elementwise(HOW, "=r,r,r", [each + barrier, each + ALL], gl.int32, False, 1)

"""Who knows of what: vector clocks, and the accesses to a piece of shared memory that a later one must come after.

Time has one axis for each partition of a program, for its bulk stores and its products, and for each barrier: an access
is (axis, moment) and comes before whoever's clock has reached that moment. A partition's own moment grows whenever it
tells others something; a store's or product's moment is its number and is reached by waiting for it; bytes that a bulk
load writes are there when their barrier has finished the phase that counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gem_kernels.simulator.faults import Fault

Clock = dict[int, int]


def join(clock: Clock, other: Clock) -> None:
    """What `other` knows is known to `clock` too."""
    for axis, moment in other.items():
        if moment > clock.get(axis, 0):
            clock[axis] = moment


@dataclass
class Access:
    """Bytes first .. last - 1, read or written by threads ("generic") or by the asynchronous proxy."""

    axis: int
    moment: int
    writes: bool
    threads: bool
    first: int
    last: int
    who: str
    where: str
    fenced: bool = False

    def before(self, clock: Clock) -> bool:
        """Whether who has this clock knows that it is done."""
        return clock.get(self.axis, 0) >= self.moment

    def __str__(self) -> str:
        what = ("stored" if self.writes else "read") if self.threads else ("filled" if self.writes else "being read")
        return f"{what} by {self.who} at {self.where}"


class History:
    """The accesses to one buffer that still matter."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.accesses: list[Access] = []

    def add(self, access: Access, clock: Clock) -> None:
        """Check the access, of somebody who knows of `clock`, against what went before and remember it."""
        kept = []
        for old in self.accesses:
            if old.last <= access.first or access.last <= old.first:
                kept.append(old)
                continue
            ordered = old.before(clock)
            if (old.writes or access.writes) and not ordered:
                raise Fault(
                    "race", f"{self.name} bytes {access.first}-{access.last} are {access}, but {old}, unordered"
                )
            if old.writes and old.threads and not access.threads and not old.fenced:
                raise Fault("proxy", f"{self.name} is {access}, but {old}, without a fence_async_shared between")
            covered = access.first <= old.first and old.last <= access.last
            same = access.axis == old.axis and not old.writes
            if not (covered and (access.writes or same)):
                kept.append(old)
        kept.append(access)
        self.accesses = kept

    def fence(self, clock: Clock) -> None:
        """Stores that the fencing threads know of are seen by the asynchronous proxy from now on."""
        for old in self.accesses:
            if old.writes and old.threads and old.before(clock):
                old.fenced = True

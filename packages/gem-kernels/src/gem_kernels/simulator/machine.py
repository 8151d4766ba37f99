"""Programs, their partitions, and a scheduler that lets one of them go on at a time.

Partitions are generators. They stop at every operation on a barrier or on memory that others share, and the scheduler
draws who goes on: a partition that need not wait, or a copy or product under way, which then happens. How likely each
is to be drawn differs by a factor of a thousand and changes while a launch runs, so that somebody may be slow for a
while and then fast. All draws come from one seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from gem_kernels.simulator.faults import Fault, place
from gem_kernels.simulator.memory import LIMIT, Buffer, User, Writer
from gem_kernels.simulator.order import Clock, join

MOST_BYTES = (1 << 20) - 1  # of a phase's transactions
Steps = Iterator[None]
SPEEDS = (0.003, 0.1, *(1.0,) * 6, *(5.0,) * 4)  # rather few are slow, so that others get far meanwhile
STEPS_OF_A_MOOD = 400  # draws until speeds are drawn again


class Barrier:
    """An mbarrier: `count` arrivals and the bytes that were expected end a phase."""

    def __init__(self, name: str, axis: int, count: int) -> None:
        self.name, self.axis, self.count = name, axis, count
        self.arrivals, self.bytes, self.finished = 0, 0, 0
        self.collected: Clock = {}
        self.released: Clock = {}
        self.waiting: list[tuple[Partition, int]] = []  # who has come to a wait for which parity, and not yet gone on

    def arrive(self, clock: Clock, count: int) -> None:
        """`count` arrivals, of somebody who knows of `clock`."""
        self.arrivals += count
        if self.arrivals > self.count:
            raise Fault("barrier", f"{self.name}: {self.arrivals} arrivals in a phase of {self.count}")
        join(self.collected, clock)
        self._turn()

    def expect(self, size: int) -> None:
        """More bytes are to come in this phase."""
        self.bytes += size
        if self.bytes > MOST_BYTES:
            raise Fault("barrier", f"{self.name} expects {self.bytes} bytes, more than {MOST_BYTES}")

    def complete(self, size: int) -> None:
        """Bytes have come."""
        self.bytes -= size
        if self.bytes < 0:
            raise Fault("barrier", f"{self.name}: {-self.bytes} bytes more have come than were expected")
        self._turn()

    def _turn(self) -> None:
        if self.arrivals == self.count and self.bytes == 0:
            able = [(who, parity) for who, parity in self.waiting if self.passed(parity)]
            self.finished += 1
            for who, _parity in able:
                raise Fault("barrier", f"{self.name} went through two phases while {who.name} waited for the first")
            self.arrivals = 0
            self.released, self.collected = {**self.collected, self.axis: self.finished}, {}

    def passed(self, parity: int) -> bool:
        """Whether a wait for the phase of this parity ends."""
        return (self.finished & 1) != parity

    def __str__(self) -> str:
        return f"{self.name} (phase {self.finished}, {self.arrivals} of {self.count} arrivals, {self.bytes} bytes due)"


class Doing:
    """Something under way: a copy or a product. `act` makes it happen."""

    def __init__(self, owner: Partition, act: Callable[[], None], number: int, speed: float) -> None:
        self.owner, self.act, self.number, self.speed, self.done = owner, act, number, speed, False

    def happen(self) -> None:
        """Once."""
        if not self.done:
            self.done = True
            self.act()


class Partition:
    """Warps that run one function of a program."""

    def __init__(self, machine: Machine, program: Program, name: str, clock: Clock) -> None:
        self.machine, self.program, self.name = machine, program, name
        self.axis, self.stores_axis, self.products_axis = machine.axis(), machine.axis(), machine.axis()
        self.clock: Clock = {**clock, self.axis: 1}
        self.stores: list[Doing] = []
        self.products: list[Doing] = []
        self.stores_made = self.products_made = 0
        self.waits: tuple[Callable[[], bool], Callable[[], str]] | None = None
        self.steps: Steps = iter(())
        self.speed = 1.0

    def tell(self) -> Clock:
        """What this partition knows, for somebody who waits for it; what it does after that they do not know."""
        told = dict(self.clock)
        self.clock[self.axis] += 1
        return told

    def writer(self) -> Writer:
        """This partition now, as somebody who touches global memory."""
        return Writer(self.program.number, self.axis, self.clock[self.axis], dict(self.clock), self.name, place())

    def wait(self, ready: Callable[[], bool], describe: Callable[[], str]) -> Steps:
        """Go on when `ready`."""
        self.waits = (ready, describe)
        yield
        self.waits = None

    def settle(self, doings: list[Doing], up_to: int) -> None:
        """Those up to this number happen."""
        for doing in [x for x in doings if x.number <= up_to]:
            self.machine.finish(doing)


class Program:
    """One program of a grid: its shared memory and barriers."""

    def __init__(self, machine: Machine, number: tuple[int, ...], flat: int) -> None:
        self.machine, self.place, self.number = machine, number, flat
        self.size = 0
        self.buffers: list[Buffer] = []
        self.barriers: dict[tuple[int, int], Barrier] = {}
        self.loads: list[Doing] = []

    def allocate(self, name: str, size: int, user: User) -> Buffer:
        """A buffer at the next multiple of 128 bytes."""
        self.size = (self.size + 127) // 128 * 128
        buffer = Buffer(name, size, self.size, user)
        self.size += size
        if self.size > LIMIT:
            raise Fault("bounds", f"{self.size} bytes of shared memory, more than {LIMIT}")
        self.buffers.append(buffer)
        return buffer

    def end(self, partition: Partition) -> None:
        """Raise if the program may not end now."""
        if self.loads:
            raise Fault("unfinished", f"program {self.number} ends with {len(self.loads)} loads under way", "the end")
        for buffer in self.buffers:
            for access in buffer.history.accesses:
                if not access.threads and not access.writes and not access.before(partition.clock):
                    raise Fault("unfinished", f"program {self.number} ends, but {buffer.name} is {access}", "the end")


class Machine:
    """Runs the programs of one launch, `resident` of them side by side."""

    def __init__(self, seed: int, resident: int) -> None:
        self.random = random.Random(seed)
        self.resident = resident
        self.axes = itertools.count(1)
        self.partitions: list[Partition] = []
        self.doings: list[Doing] = []
        self.current: Any = None
        self.mood = 0
        self.draws = 0

    def axis(self) -> int:
        """A new axis of time."""
        return next(self.axes)

    # Scheduling.

    def run(self, programs: Iterator[tuple[Partition, Steps]]) -> None:
        """Run them all; raises the first fault."""
        for first, steps in itertools.islice(programs, self.resident):
            self.start(first, steps)
        while self.partitions:
            self.current = self._draw()
            try:
                next(self.current.steps)
            except StopIteration:
                self.partitions.remove(self.current)
                if self.current.name == "default":
                    for first, steps in itertools.islice(programs, 1):
                        self.start(first, steps)
        for doing in list(self.doings):  # stores of programs that have ended
            self.finish(doing)

    def start(self, partition: Partition, steps: Steps) -> None:
        """A partition is there from now on."""
        partition.steps, partition.speed = steps, self.random.choice(SPEEDS)
        self.partitions.append(partition)

    def _draw(self) -> Partition:
        """Things happen, until a partition's turn comes."""
        while True:
            self.draws += 1
            self.mood -= 1
            if self.mood < 0:
                self.mood = STEPS_OF_A_MOOD
                for p in self.partitions:
                    p.speed = self.random.choice(SPEEDS)
            able = [p for p in self.partitions if p.waits is None or p.waits[0]()]
            if not able and not self.doings:
                told = [f"program {p.program.number}: {p.name} {p.waits[1]()}" for p in self.partitions if p.waits]
                raise Fault("deadlock", "; ".join(told), "everywhere")
            speeds = [p.speed for p in able] + [x.speed for x in self.doings]
            n = self.random.choices(range(len(speeds)), speeds)[0]
            if n < len(able):
                return able[n]
            self.finish(self.doings[n - len(able)])

    # What is under way.

    def begin(self, owner: Partition, act: Callable[[], None], kind: list[Doing], number: int) -> Doing:
        """Something that happens later."""
        doing = Doing(owner, act, number, self.random.choice(SPEEDS))
        self.doings.append(doing)
        kind.append(doing)
        return doing

    def finish(self, doing: Doing) -> None:
        """It happens now; products in their order."""
        if doing in doing.owner.products:
            while doing.owner.products and not doing.done:
                self._happen(doing.owner.products[0])
        else:
            self._happen(doing)

    def _happen(self, doing: Doing) -> None:
        self.doings.remove(doing)
        for kind in (doing.owner.products, doing.owner.stores, doing.owner.program.loads):
            if doing in kind:
                kind.remove(doing)
        doing.happen()

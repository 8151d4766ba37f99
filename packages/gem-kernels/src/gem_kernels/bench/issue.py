"""What a kernel's main loop could do if memory were infinitely fast, counted without a GPU:
`python -m gem_kernels.bench.issue [--match "norms layer backward"]`.

A loop's SASS says of every instruction how long the next one waits, which scoreboards it sets and which it waits for.
Replaying that for all warps that an SM has at once, on its four schedulers and their units, gives the cycles of a turn;
with the bytes of a turn's loads and stores that is a multiple of the rate of a copy. Near 1 the loop is the bound, far
above it memory is. Unit times are those of sm_90 as published or measured by others, memory is a queue with one
latency: good to compare two forms of a kernel with, not to predict a time.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gem_kernels import compile_check
from gem_kernels.tiling import CompileCase

RATE = 18.4  # bytes a cycle for each of 132 SMs at 4.25 TB/s and 1.75 GHz
LATENCY = 1050  # cycles of a load from memory
SCHEDULERS = 4
INTEGER = frozenset({
    "F2FP", "FMNMX", "FSEL", "FSETP", "HMNMX2", "I2FP", "IADD3", "IMAD", "IMNMX", "ISETP", "LEA", "LOP3", "MOV",
    "PLOP3", "PRMT", "SEL", "SHF", "VIADD", "VIADDMNMX", "VIMNMX", "VOTE",
})  # fmt: skip
AFTER = {"SHFL": 24, "MUFU": 22, "LDS": 31, "S2R": 30, "S2UR": 30, "R2UR": 12, "LDC": 35}  # cycles to a result; else 20


@dataclass(frozen=True)
class Instruction:
    """`stall` cycles before the next; `sets` a scoreboard with its result and `frees` one with its operands read (7:
    none); `waits` for scoreboards, as bits. `jump` is a label.
    """

    text: str
    stall: int
    sets: int = 7
    frees: int = 7
    waits: int = 0
    jump: str | None = None

    @property
    def base(self) -> str:
        """The operation without modifiers."""
        return self.operation.split(".")[0]

    @property
    def operation(self) -> str:
        """Without a predicate."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    @property
    def size(self) -> int:
        """Bytes of a thread's access."""
        found = re.search(r"\.(128|64|U16|U8)\b", self.operation)
        return {"128": 16, "64": 8, "U16": 2, "U8": 1}[found.group(1)] if found else 4

    @property
    def unit(self) -> tuple[str, int, bool]:
        """Which unit it takes for how many cycles, and whether the SM has but one of it."""
        if self.base in INTEGER:
            return "integer", 2, False
        if self.base == "MUFU":
            return "special", 8, False
        if self.base == "SHFL":
            return "memory", 1, True
        if self.base in ("LDS", "STS", "LDG", "STG", "LDGSTS", "LDSM", "STSM"):
            return "memory", max(1, self.size // 4), True
        return "", 0, False

    @property
    def pending(self) -> int:
        """Of a wait for asynchronous copies: how many groups may be on their way still."""
        found = re.search(r"SB\d+, (0x[0-9a-f]+|\d+)", self.text)
        return int(found.group(1), 0) if found else 0


def parse(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions and where labels point, from `nvdisasm -c -hex`."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    text = None
    for line in listing.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label.group(1)] = len(code)
        elif first := re.match(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);\s*/\* 0x[0-9a-f]+ \*/", line):
            text = first.group(1).strip()
        elif text is not None and (second := re.match(r"^\s+/\* 0x([0-9a-f]{16}) \*/", line)):
            word = int(second.group(1), 16)
            target = re.search(r"\bBRA\S* .*`\((\.L_x_\d+)\)", text)
            code.append(
                Instruction(
                    text, word >> 41 & 15, word >> 46 & 7, word >> 49 & 7, word >> 52 & 63,
                    target.group(1) if target else None,
                )
            )  # fmt: skip
            text = None
    return code, labels


def main_loop(code: Sequence[Instruction], labels: dict[str, int]) -> Sequence[Instruction]:
    """The longest loop; nothing where there is none."""
    loops = [(labels[x.jump], i) for i, x in enumerate(code) if x.jump is not None and labels[x.jump] <= i - 3]
    if not loops:
        return []
    first, last = max(loops, key=lambda span: span[1] - span[0])
    return code[first : last + 1]


@dataclass
class _Warp:
    program: int
    at: int = 0
    turns: int = 0
    ready: int = 0
    held: bool = False  # by a barrier
    boards: list[float] = field(default_factory=lambda: [0.0] * 6)
    groups: list[float] = field(default_factory=list)
    copies: float = 0.0

    def earliest(self, x: Instruction) -> float:
        """When its next instruction may be issued, units apart."""
        times = [t for board, t in enumerate(self.boards) if x.waits >> board & 1]
        if x.base == "DEPBAR" and len(self.groups) > x.pending:
            times += self.groups[: len(self.groups) - x.pending]
        return max([self.ready, *times])


def cycles(loop: Sequence[Instruction], warps: int, programs: int, *, rate: float = RATE, turns: int = 12) -> float:
    """Cycles of a turn of the loop for `programs` of `warps`, all of them on one SM."""
    all_warps = [_Warp(c, ready=c * 137 % 400) for c in range(programs) for _ in range(warps)]
    queues = [deque(all_warps[s::SCHEDULERS]) for s in range(SCHEDULERS)]
    units: dict[tuple[str, int], int] = {}
    waiting: list[list[_Warp]] = [[] for _ in range(programs)]
    ends: list[list[int]] = [[] for _ in range(programs)]
    memory, now = 0.0, 0
    while any(w.turns < turns for w in all_warps):
        soonest, issued = float("inf"), False
        for s, queue in enumerate(queues):
            for _ in range(len(queue)):
                w = queue[0]
                if w.held or w.turns == turns:
                    queue.rotate(-1)
                    continue
                x = loop[w.at]
                unit, taken, one = x.unit
                key = (unit, -1 if one else s)
                time = max(w.earliest(x), units.get(key, 0) if unit else 0)
                if time > now:
                    soonest = min(soonest, time)
                    queue.rotate(-1)
                    continue
                issued = True
                if unit:
                    units[key] = now + taken
                done = float(now + AFTER.get(x.base, 20))
                if x.base in ("LDG", "LDGSTS", "STG"):
                    memory = max(memory, now) + 32 * x.size / rate
                    done = memory + LATENCY if x.base != "STG" else done
                    w.copies = max(w.copies, done)
                if x.sets < 6 and x.base != "LDGSTS":
                    w.boards[x.sets] = max(w.boards[x.sets], done)
                if x.frees < 6:
                    w.boards[x.frees] = max(w.boards[x.frees], now + 20.0)
                if x.base == "LDGDEPBAR":
                    w.groups.append(w.copies)
                    w.copies = 0.0
                elif x.base == "DEPBAR":
                    w.groups = w.groups[len(w.groups) - x.pending :] if x.pending else []
                w.ready = now + max(1, x.stall)
                if x.base == "BAR":
                    w.held = True
                    waiting[w.program].append(w)
                    if len(waiting[w.program]) == warps:
                        for other in waiting[w.program]:
                            other.held, other.ready = False, max(other.ready, now + 12)
                        waiting[w.program] = []
                w.at += 1
                if w.at == len(loop):
                    w.at, w.turns = 0, w.turns + 1
                    ends[w.program].append(now)
                queue.rotate(-1)  # the others first, so that none runs ahead
                break
        now = now + 1 if issued else max(now + 1, int(soonest) if soonest < float("inf") else now + 1)
    skipped = turns // 3
    spans = [sorted(e)[warps - 1 :: warps] for e in ends]
    return sum((e[-2] - e[skipped]) / (turns - 2 - skipped) for e in spans) / programs


def resident(registers: int, warps: int, shared: int) -> int:
    """Programs that an SM has at once."""
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    return min(by_registers, 228 * 1024 // (shared + 1024), 64 // warps, 32)


def describe(case: CompileCase) -> str:
    """A line on a case's main loop."""
    import triton

    binary = compile_check.compile_case(case, 90)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [str(tool), "-c", "-hex", file.name], capture_output=True, text=True, check=True
        ).stdout
    loop = main_loop(*parse(listing))
    if not loop:
        return "no loop"
    found = re.search(r"registers +(\d+)", compile_check.build(case, 90))
    assert found is not None
    registers = int(found.group(1))
    warps = case.tile.warps
    programs = resident(registers, warps, binary.metadata.shared)
    moved = sum(x.size for x in loop if x.base in ("LDG", "LDGSTS", "STG")) * 32 * warps * programs
    fast, real = (cycles(loop, warps, programs, rate=rate) for rate in (1e9, RATE))
    return (
        f"registers {registers:3d}  warps {programs * warps:2d}  instructions {len(loop):4d}  bytes {moved:6d}  "
        f"compute {moved / fast / RATE:.2f} of copy  with memory {moved / real / RATE:.2f}"
    )


def _cases(match: str) -> Iterator[CompileCase]:
    return (case for case in compile_check.cases() if match in case.name and 90 in case.arch)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m gem_kernels.bench.issue", description=__doc__)
    parser.add_argument("--match", default="norms", help="only the compile cases whose name contains this")
    for case in _cases(parser.parse_args(arguments).match):
        print(f"{case.name:52s}{describe(case)}", flush=True)


if __name__ == "__main__":
    main()

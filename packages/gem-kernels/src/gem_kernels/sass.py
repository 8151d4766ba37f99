"""What the assembler made of a kernel: reading SASS for `compile_check`, without a GPU.

Two questions are asked of a cubin. Which special-function instructions (MUFU) are left, and are any in the loops with
tensor-core products? And is every register that addresses are made of written on every way to its use? ptxas 12.8 has
compiled two loops so that a descriptor which both need is computed in the first of them alone, and a kernel that is
right when that loop happens to run is wrong when it does not (docs/notes/hopper-attention.md).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*$")
_REGISTER = re.compile(r"\b(U?R)(\d+)\b")
_PREDICATE = re.compile(r"U?P[\dT]")
_PRODUCT = re.compile(r"\b(HGMMA|QGMMA|HMMA|UTCHMMA|UTCQMMA|OMMA|QMMA)\b")
_NO_RESULT = re.compile(
    "ARRIVES|BAR|BMOV|BRA|BREAK|BRX|BSSY|BSYNC|CCTLL?|DEPBAR|ERRBAR|EXIT|FENCE|MEMBAR|NANOSLEEP|NOP|REDG?|ST[GLS]|STSM|"
    "UBLKCP|USETMAXREG|UTMACMDFLUSH|UTMALDG|UTMAPF|UTMAREDG|UTMASTG|WARPGROUP|WARPSYNC|YIELD"
)
_TO_PREDICATES = frozenset({"FSETP", "HSETP2", "ISETP", "PLOP3", "R2P", "UISETP", "UPLOP3", "VOTE"})
_ADDRESSES = re.compile(r"HGMMA|QGMMA|SYNCS|R2UR|U(?!MOV)")  # and everything else of the uniform data path
_COPIES = frozenset({"MOV", "R2UR", "UMOV"})
_LOADS = frozenset({"LD", "LDC", "LDG", "LDL", "LDS", "S2UR", "SYNCS", "ULDC"})

Register = tuple[str, int]


@dataclass(frozen=True)
class Instruction:
    """One instruction: its text without the predicate, whether it has one, and its operation without modifiers."""

    text: str
    guarded: bool
    base: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """`special` special-function instructions, of which `special_in_loops` are in loops that hold tensor-core products;
    `undefined`: instructions that make or use an address of a register which some way to them does not write.
    """

    special: int
    special_in_loops: int
    undefined: tuple[str, ...]


def disassemble(cubin: bytes) -> str:
    """SASS by the disassembler that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout


def report(sass: str) -> Report:
    """Reads one kernel's SASS."""
    code, labels, targets = _parse(sass)
    loops = [(labels[t[0]], i) for i, t in enumerate(targets) if len(t) == 1 and labels[t[0]] <= i]
    inner: set[int] = set()
    for first, last in loops:
        body = range(first, last + 1)
        nested = any(
            first <= a and b <= last and (a, b) != (first, last) and _has_product(code, a, b) for a, b in loops
        )
        if _has_product(code, first, last) and not nested:
            inner.update(body)
    special = [i for i, x in enumerate(code) if x.base == "MUFU"]
    return Report(
        special=len(special),
        special_in_loops=sum(i in inner for i in special),
        undefined=tuple(_undefined(code, labels, targets)),
    )


def _has_product(code: list[Instruction], first: int, last: int) -> bool:
    return any(_PRODUCT.search(x.text) for x in code[first : last + 1])


def _parse(sass: str) -> tuple[list[Instruction], dict[str, int], list[list[str]]]:
    """Instructions, where labels point, and the labels that each instruction may jump to."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    targets: list[list[str]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(code)
            continue
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        text, _, comment = found.group(1).partition("(*")
        text = text.strip().rstrip(";").strip()
        guarded = text.startswith("@")
        if guarded:
            text = text.partition(" ")[2].strip()
        base = re.split(r"[\s.]", text, maxsplit=1)[0]
        code.append(Instruction(text, guarded, base))
        jumps = re.findall(r"\.L_x_\d+", comment) if base == "BRX" else []
        if base == "BRA":
            jumps = re.findall(r"`\((\.L_x_\d+)\)", text)
        targets.append(jumps)
    return code, labels, targets


def _registers(operand: str, width: int) -> set[Register]:
    return {(kind, int(n) + i) for kind, n in _REGISTER.findall(operand) for i in range(width)}


def _width(x: Instruction, operation: str) -> int:
    """Registers of a result."""
    if x.base in ("HGMMA", "QGMMA"):
        columns = re.search(r"64x(\d+)x", operation)
        assert columns is not None
        return int(columns.group(1)) // 2
    if x.base == "CS2R":
        return 1 if ".32" in operation else 2
    if x.base in _LOADS and ".128" in operation:
        return 4
    wide = ".64" in operation and x.base in (_LOADS | {"IADD3", "SHF", "UIADD3", "ULOP3", "USHF", "UMOV"})
    return 2 if wide or ".WIDE" in operation else 1


def _effects(x: Instruction) -> tuple[set[Register], set[Register]]:
    """(written, read). What is not known for sure counts as one register, and a guarded write as a write."""
    operation, _, rest = x.text.partition(" ")
    operands = [o.strip() for o in rest.split(",")] if rest else []
    written: set[Register] = set()
    if not _NO_RESULT.fullmatch(x.base) and operands:
        while operands and _PREDICATE.fullmatch(operands[0]):
            operands.pop(0)
        if x.base not in _TO_PREDICATES and operands:
            written = _registers(operands.pop(0), _width(x, operation))
    read: set[Register] = set()
    for n, operand in enumerate(operands):
        if address := re.match(r"desc\[(UR\d+)\]\[(.*)\]", operand):
            read |= _registers(address.group(1), 2) | _registers(address.group(2), 2 if ".64" in operand else 1)
        elif operand.startswith("gdesc"):  # A's two registers, which are not used where A is in registers, then B's
            read |= _registers(operand, 4) - (_registers(operand, 2) if operands[0].startswith("R") else set())
        elif x.base in ("HGMMA", "QGMMA") and operand.startswith("R"):
            read |= _registers(operand, 4 if n == 0 else _width(x, operation))
        else:
            read |= _registers(operand, 2 if ".64" in operand else 1)
    return written, read


def _undefined(code: list[Instruction], labels: dict[str, int], targets: list[list[str]]) -> list[str]:
    """Reads of registers that some way from the entry does not write: must-be-written data flow.

    Only where it is an address or a descriptor, or on its way there. Elsewhere a value that is not written is common
    and harmless: halves and predicates are put into a register one by one, loads are guarded as their uses are. A copy
    of what is not written is no use of it, but is not written either.
    """
    effects = [_effects(x) for x in code]
    after: list[list[int]] = []
    for i, x in enumerate(code):
        ways = [labels[t] for t in targets[i]]
        falls = x.base not in ("BRA", "BRX", "EXIT") or x.guarded or re.search(r"BRA\S* !?U?P\d", x.text) is not None
        if falls or (x.base == "BRA" and ".DIV" in x.text):
            ways.append(i + 1)
        after.append([w for w in ways if w < len(code)])
    known: list[frozenset[Register] | None] = [None] * len(code)
    if code:
        known[0] = frozenset()
    waiting = [0] if code else []
    while waiting:
        i = waiting.pop()
        before = known[i]
        assert before is not None
        written, read = effects[i]
        now = before - written if code[i].base in _COPIES and not read <= before else before | written
        for way in after[i]:
            there = known[way]
            new = now if there is None else there & now
            if new != there:
                known[way] = new
                waiting.append(way)
    found = []
    for x, (_, read), before in zip(code, effects, known, strict=True):
        if before is None or not _ADDRESSES.match(x.base) or x.base in _COPIES:
            continue
        missing = sorted(f"{kind}{n}" for kind, n in read - before)
        if missing:
            found.append(f"{x.text} reads {', '.join(missing[:4])}")
    return found

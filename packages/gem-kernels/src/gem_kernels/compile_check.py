"""Build every kernel for several GPU architectures without a GPU: `python -m gem_kernels.compile_check [--arch 90]
[--match dkv]`.

For each kernel it prints registers, spilled bytes, shared memory, the tensor-core instructions found in the PTX and the
special-function instructions (MUFU) found in the SASS, in the loops with products and in all. It exits with 1 when a
kernel does not build, when one that is checked for it makes addresses of registers that are not written on every way
there (`sass`), and when a kernel that is to use no special function uses one. The cases come from `compile_cases()` of
the operators' backends.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gem_kernels import sass
from gem_kernels.dispatch import OPERATORS
from gem_kernels.tiling import CompileCase

SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes of shared memory that a program may have
ARCHES = tuple(SHARED)
MMA = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*?\.(bf16|f16|tf32|e4m3|e5m2|kind::\w+)")


def cases() -> Iterator[CompileCase]:
    """All cases of all operators' backends."""
    for op in OPERATORS:
        for backend in ("triton", "hopper"):
            name = f"gem_kernels.{op}.{backend}"
            if importlib.util.find_spec(name) is not None:
                module = importlib.import_module(name)
                if hasattr(module, "compile_cases"):
                    yield from module.compile_cases()


def compile_case(case: CompileCase, arch: int) -> Any:
    """Triton's CompiledKernel of one case; raises what the compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible}
    source = (case.source or ASTSource)(
        fn=case.kernel, signature=dict(case.signature), constexprs=dict(case.constants), attrs=attributes
    )
    options = {"num_warps": case.tile.warps, "num_stages": case.tile.stages, "maxnreg": case.tile.registers}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def build(case: CompileCase, arch: int) -> str:
    """Compile one case and describe the result in a line; raises what the compiler raises."""
    binary = compile_case(case, arch)
    ptx = binary.asm["ptx"]
    if binary.metadata.shared > SHARED.get(arch, binary.metadata.shared):
        raise RuntimeError(f"needs {binary.metadata.shared} B of shared memory; sm_{arch} has {SHARED[arch]}")
    products = Counter(f"{unit}.{kind}" for unit, kind in MMA.findall(ptx))
    mma = ", ".join(f"{count} {name}" for name, count in products.most_common(3)) or "none"
    read = sass.report(sass.disassemble(binary.asm["cubin"]))
    if case.defined and read.undefined:
        raise RuntimeError(f"{len(read.undefined)} reads of what may not be written: {'; '.join(read.undefined[:3])}")
    if case.no_special and read.special_in_loops:
        raise RuntimeError(f"{read.special_in_loops} special-function instructions in the loops with products")
    mufu = f"mufu {read.special_in_loops}/{read.special}"
    if read.undefined:
        mufu += f"  undefined {len(read.undefined)}"
    return f"{_resources(ptx, arch)}  shared {binary.metadata.shared:6d}  {mufu:12s}  mma: {mma}"


def _resources(ptx: str, arch: int) -> str:
    """Registers and spills, from the assembler that comes with Triton; and whether it waits for every product of a
    warpgroup before the next one, as it does without an error where registers are short (C7510, C7512).
    """
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembler = tools / ("ptxas-blackwell" if arch >= 100 and (tools / "ptxas-blackwell").exists() else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        command = [str(assembler), "-v", "--gpu-name", name, file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said)))
    serialised = "  products one by one" if re.search(r"wgmma.*serialized", said) else ""
    return f"registers {registers:3d}  spilled {spilled:5d} B{serialised}"


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gem_kernels.compile_check", description=__doc__.split("\n\n")[0])
    parser.add_argument("--arch", type=int, action="append", help=f"may be repeated; default {ARCHES}")
    parser.add_argument("--match", default="", help="only the cases whose name contains this")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET=1 interprets kernels instead of compiling them; unset it")
    found = [case for case in cases() if options.match in case.name]
    if not found:
        parser.error(f"no kernel's name contains {options.match!r}; without --match all of them are listed")
    failures = 0
    for case in found:
        for arch in options.arch or ARCHES:
            if arch not in case.arch:
                continue
            try:
                line = build(case, arch)
            except Exception as error:  # whatever a compiler throws is the finding
                failures += 1
                line = f"FAILED {type(error).__name__}: {str(error)[-300:]}"
            print(f"sm_{arch:<4d}{case.name:52s}{line}", flush=True)
    print(f"{failures} failed" if failures else "all built")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

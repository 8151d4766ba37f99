"""Whether a change leaves compiled kernels as they were, without a GPU: `python -m gem_kernels.ptx_check before.json`,
the change, then `python -m gem_kernels.ptx_check after.json --against before.json`.

The file holds a digest of every kernel's PTX, by the name of its case. Line numbers, names of files and the kernel's
own name are no part of it: a function that moves to another module, or is renamed, keeps its digest. With `--against`
the exit code is 1 when a kernel of both files differs. Cases are those of `compile_check`, or with `--module` those of
`compile_cases()` in that module.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gem_kernels import compile_check
from gem_kernels.tiling import CompileCase

NO_CODE = re.compile(r"^\s*(//.*|\.loc\b.*|\.file\b.*|)$")


def digest(ptx: str) -> str:
    """Of the code alone: what is left of PTX without comments, places in source files, and the kernel's name."""
    name = re.search(r"\.entry\s+(\w+)\(", ptx)
    if name is None:
        raise ValueError(f"PTX must have an entry; got {ptx[:80]!r}")
    code = ptx.split("\n\t.section\t.debug", 1)[0]
    lines = (re.sub(r"\s*//.*$", "", line) for line in code.splitlines() if not NO_CODE.match(line))
    return hashlib.sha256("\n".join(lines).replace(name[1], "kernel").encode()).hexdigest()[:16]


def ptx_of(case: CompileCase, arch: int) -> str:
    """The PTX of a case; it is not assembled."""
    from triton import knobs

    def without_assembler(_backend: Any, stages: dict[str, Any], *_: Any) -> None:
        stages["cubin"] = lambda *_: b""

    with (
        tempfile.TemporaryDirectory() as cache,
        knobs.cache.scope(),
        knobs.compilation.scope(),
        knobs.runtime.scope(),
    ):
        knobs.cache.dir = cache  # an empty cubin must not be found by anybody else
        knobs.compilation.disable_line_info = True
        knobs.runtime.add_stages_inspection_hook = without_assembler
        return str(compile_check.compile_case(case, arch).asm["ptx"])


def _cases(modules: list[str]) -> Iterator[CompileCase]:
    if not modules:
        yield from compile_check.cases()
    for name in modules:
        yield from importlib.import_module(name).compile_cases()


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gem_kernels.ptx_check", description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path, help="where to write the digests")
    parser.add_argument("--against", type=Path, help="digests to compare with")
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--match", default="", help="only the cases whose name has a match of this")
    parser.add_argument("--module", action="append", default=[], help="with compile_cases(); may be repeated")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET=1 interprets kernels instead of compiling them; unset it")
    before = json.loads(options.against.read_text()) if options.against else {}
    found: dict[str, str] = {}
    for case in _cases(options.module):
        if not re.search(options.match, case.name) or options.arch not in case.arch:
            continue
        if case.name in found:
            parser.error(f"two cases are named {case.name!r}")
        found[case.name] = digest(ptx_of(case, options.arch))
        was = before.get(case.name)
        says = "" if not options.against else "new" if was is None else "same" if was == found[case.name] else "CHANGED"
        print(f"{found[case.name]}  {case.name:52s}{says}", flush=True)
    if not found:
        parser.error(f"no kernel for sm_{options.arch} has a name with a match of {options.match!r}")
    options.file.write_text(json.dumps(found, indent=1) + "\n")
    changed = [name for name, value in found.items() if before.get(name, value) != value]
    if options.against:
        print(f"{len(changed)} of {len(found)} changed", *changed, sep="\n  ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())

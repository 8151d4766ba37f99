"""`python -m gem_parallel.bench memory|comm|windows|held`: measure, print as it goes, write JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gem_parallel.bench import comm, held, memory, windows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit status 1 when a correctness gate fails."""
    parser = argparse.ArgumentParser(prog="python -m gem_parallel.bench", description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True)
    for module in (memory, comm, windows, held):
        name = module.__name__.rpartition(".")[2]
        first = (module.__doc__ or "").splitlines()[0]
        module.arguments(suites.add_parser(name, help=first, description=module.__doc__))
    args = parser.parse_args(arguments)
    status: int = {"memory": memory, "comm": comm, "windows": windows, "held": held}[args.suite].run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Name the nox sessions that a change needs: `nox -s $(python tools/affected.py)`.

`python tools/affected.py [BASE]` looks at what differs from BASE (default: the last common commit with `main`; on
`main` itself, the last commit), uncommitted and new files included. A file that no rule knows needs everything.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterable
from pathlib import Path

from workspace import ROOT, dependents, packages, siblings

EVERYTHING = ("lint", "types", "contracts", "docs", "release", "api", "tests")
TOOLS = "tests(tools)"  # also runs the pages, which use every package


def needs(path: str, root: Path = ROOT) -> set[str]:
    """The sessions that one changed file needs."""
    parts = Path(path).parts
    if parts[0] == "packages" and len(parts) > 2 and parts[1] in packages(root):
        package = parts[1]
        everyone = {f"tests({name})" for name in dependents(package, root)}
        match parts[2]:
            case "src":
                return {"lint", "types", "contracts", "docs", "api", TOOLS} | everyone
            case "tests":
                return {"lint", f"tests({package})"}
            case "README.md":
                return {TOOLS, f"tests({package})", f"wheel({package})"}
            case "pyproject.toml":
                oldest = {f"oldest({package})"} if len(siblings(package, root)) > 1 else set()
                return {"release", f"wheel({package})", TOOLS} | everyone | oldest
            case "changes" | "CHANGELOG.md" | "LICENSE":
                return {"release", TOOLS}
    if parts[0] == "docs" or path == "mkdocs.yml":
        return {"docs", TOOLS}
    if path in ("README.md", "LICENSE"):
        return {TOOLS}
    if path == "tools/docs.txt":
        return {"docs"}
    if parts[0] == "tools" and path.endswith((".py", ".sh")):
        return {"lint", "types", TOOLS}
    return set(EVERYTHING)


def sessions(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """The sessions that a set of changed files needs, cheap ones first; none for no files."""
    found: set[str] = set().union(*(needs(path, root) for path in paths))
    if "tests" in found:
        found = {name for name in found if not name.startswith("tests(")}
    order = [*EVERYTHING, TOOLS]
    return sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))


def changed(base: str | None, root: Path = ROOT) -> list[str]:
    """Paths that differ from `base`, and files that git does not know yet."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout

    if base is None:
        base = git("merge-base", "HEAD", "main").strip()
        if base == git("rev-parse", "HEAD").strip():
            base = "HEAD~1"
    new = git("ls-files", "--others", "--exclude-standard").splitlines()
    return sorted({*git("diff", "--name-only", base).splitlines(), *new})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="a commit, branch or tag")
    print(*sessions(changed(parser.parse_args().base)))


if __name__ == "__main__":
    main()

"""Run a Markdown page as a reader would: `python tools/documents.py docs/tutorials/first-training.md`.

The code blocks run from top to bottom in one empty folder. The language of a block says what happens to it:

    python, sh              run; the Python blocks of a page share their variables
    with title="NAME"       written to the file NAME, whatever the language
    any other, or none      shown to the reader alone (output, tables of a file)

A block is left out only below a comment that says why, `<!-- not run: needs two GPUs -->`. `NOT_RUN` lists the reasons.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
NOT_RUN = {
    "the test command itself": "tools/tests/test_readme.py compares it with what CI runs",
    "installs from the package index": "the sessions wheel(...) install every package from its wheel",
    "takes minutes": "the session `train` runs the recipe; the tutorials run the commands with few steps",
    "needs two GPUs": "the same lines run on two CPU processes elsewhere on the page",
    "needs a GPU": "no machine of CI has one",
    "needs Slurm": "tools/tests/test_slurm.py runs it with a stand-in for srun",
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced or indented code block of a page."""

    language: str
    title: str  # the file that it shows, or ""
    text: str
    line: int  # of its first line of text, from 1
    not_run: str  # why it is left out, or ""

    @property
    def runs(self) -> bool:
        """Whether `run` executes or writes it."""
        return not self.not_run and (bool(self.title) or self.language in ("python", "sh"))


def pages() -> list[Path]:
    """The pages whose blocks run: READMEs and tutorials."""
    return [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/tutorials/*.md"))]


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page in order. Raises ValueError for a `not run` comment with an unknown reason."""
    found, reason = [], ""
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "html_block":
            comment = re.fullmatch(r"<!-- not run: (.*) -->", token.content.strip())
            reason = comment[1] if comment else ""
            if reason and reason not in NOT_RUN:
                raise ValueError(f"{page.name}: unknown reason {reason!r}; expected one of {sorted(NOT_RUN)}")
        elif token.type in ("fence", "code_block"):
            language, _, rest = token.info.strip().partition(" ")
            title = re.search(r'title="([^"]+)"', rest)
            assert token.map is not None
            found.append(
                Block(
                    language=language,
                    title=title[1] if title else "",
                    text=token.content,
                    line=token.map[0] + (2 if token.type == "fence" else 1),
                    not_run=reason,
                )
            )
            reason = ""
    return found


def commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of every command in any code block that starts `gem-train`, `torchrun` or `python`.

    Without what a shell variable holds, and only up to a pipe, a redirection or a second command.
    """
    for block in blocks(page):
        if block.title.endswith(".py") or block.language == "python":
            continue
        number = block.line
        for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
            start = re.match(r"\s*(?:\$ )?((?:\S*/)?(?:gem-train|torchrun|python3?) \S.*)", line)
            if start:
                command = re.split(r" (?:\||&&?|>) ", start[1])[0]
                yield (
                    number,
                    [word for word in shlex.split(command, comments=True) if not word.startswith(("$", "..."))],
                )
            number += 1


def run(page: Path, folder: Path) -> int:
    """Run the page's blocks in `folder`; how many ran. A block that fails raises, with the page's name and line.

    Commands are those of this interpreter's environment; what they cache is cached in the folder.
    """
    scope: dict[str, Any] = {"__name__": "__main__"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    surroundings = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / ".cache")}
    ran = 0
    for block in blocks(page):
        if not block.runs:
            continue
        ran += 1
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.title:
            target = folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text)
        elif block.language == "python":
            with chdir(folder), mock.patch.dict(os.environ, surroundings):
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), scope)
        else:
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            outcome = subprocess.run(command, cwd=folder, env=surroundings, stdin=subprocess.DEVNULL, timeout=300)
            if outcome.returncode:
                raise RuntimeError(f"{where}: exit code {outcome.returncode} of\n{block.text}")
    return ran


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="*", help="Markdown files (default: all READMEs and tutorials)")
    for page in parser.parse_args().pages or pages():
        with tempfile.TemporaryDirectory() as folder:
            print(f"{page}: {run(page.resolve(), Path(folder))} blocks ran")


if __name__ == "__main__":
    main()

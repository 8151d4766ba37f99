"""Create the skeleton of a package: `python tools/new_package.py gem-foo "One line." dep1 dep2`.

Every package has the same bones (its own version, README, changelog, licence, typed marker and a first test), so that a
new one starts complete and the existing ones stay alike.
"""

from __future__ import annotations

import argparse
from pathlib import Path

PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{name}"
dynamic = ["version"]
description = "{summary}"
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = ">=3.11"
keywords = ["recommendation", "jagged", "attention", "training"]
classifiers = [
  "Development Status :: 3 - Alpha",
  "Programming Language :: Python :: 3.11",
  "Programming Language :: Python :: 3.12",
  "Topic :: Scientific/Engineering :: Artificial Intelligence",
  "Typing :: Typed",
]
dependencies = [{dependencies}]

[project.optional-dependencies]
test = ["hypothesis>=6.100", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6"]

[tool.hatch.version]
path = "src/{module}/__about__.py"

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]

[tool.hatch.build.targets.sdist]
include = ["/src", "/tests", "/CHANGELOG.md", "/LICENSE", "/README.md"]

[tool.towncrier]
name = "{name}"
directory = "changes"
filename = "CHANGELOG.md"
start_string = "<!-- releases -->\\n"
title_format = "## {{version}} ({{project_date}})"
type = [
  {{ directory = "added", name = "Added", showcontent = true }},
  {{ directory = "changed", name = "Changed", showcontent = true }},
  {{ directory = "deprecated", name = "Deprecated", showcontent = true }},
  {{ directory = "removed", name = "Removed", showcontent = true }},
  {{ directory = "fixed", name = "Fixed", showcontent = true }},
]
"""

INIT = '''\
"""{summary}"""

from {module}.__about__ import __version__

__all__ = ["__version__"]
'''


def create(root: Path, name: str, summary: str, dependencies: list[str]) -> Path:
    """Write the skeleton under `root / "packages" / name`; refuse to touch an existing folder."""
    module = name.replace("-", "_")
    home = root / "packages" / name
    if home.exists():
        raise SystemExit(f"{home} exists already; expected a new package name")
    listed = "".join(f'\n  "{d}",' for d in dependencies) + ("\n" if dependencies else "")
    files = {
        "pyproject.toml": PYPROJECT.format(name=name, module=module, summary=summary, dependencies=listed),
        "README.md": f"# {name}\n\n{summary}\n\n```python\nimport {module}\n\nprint({module}.__version__)\n```\n",
        "CHANGELOG.md": (
            f"# Changelog of {name}\n\nFragments of the next release are in `changes/`.\n\n<!-- releases -->\n"
        ),
        "LICENSE": (Path(__file__).resolve().parents[1] / "LICENSE").read_text(),
        "changes/+first.added.md": f"{summary}\n",
        "changes/.gitignore": "!.gitignore\n",
        f"src/{module}/__about__.py": '__version__ = "0.1.0"\n',
        f"src/{module}/__init__.py": INIT.format(module=module, summary=summary),
        f"src/{module}/py.typed": "",
        "tests/test_package.py": (
            f"import {module}\n\n\ndef test_version_is_semantic():\n"
            f'    assert len({module}.__version__.split(".")) == 3\n'
        ),
    }
    for path, text in files.items():
        target = home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return home


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="distribution name, e.g. gem-foo")
    parser.add_argument("summary", help="one sentence")
    parser.add_argument("dependencies", nargs="*", help="runtime requirements, e.g. 'torch>=2.11'")
    args = parser.parse_args()
    print(create(Path(__file__).resolve().parents[1], args.name, args.summary, args.dependencies))


if __name__ == "__main__":
    main()

"""What the workspace holds: packages, their versions, and which of them build on which."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def packages(root: Path = ROOT) -> tuple[str, ...]:
    """Names of the distributions, sorted."""
    return tuple(sorted(path.parent.name for path in root.glob("packages/*/pyproject.toml")))


def project(package: str, root: Path = ROOT) -> dict[str, Any]:
    """The `[project]` table of a package."""
    table: dict[str, Any] = tomllib.loads((root / "packages" / package / "pyproject.toml").read_text())["project"]
    return table


def version(package: str, root: Path = ROOT) -> str:
    """The version of a package in this tree."""
    about = root / "packages" / package / "src" / package.replace("-", "_") / "__about__.py"
    found = re.search(r'__version__ = "(.+)"', about.read_text())
    assert found is not None, f"{about} has no __version__"
    return found[1]


def sibling_requirements(package: str, root: Path = ROOT) -> list[Requirement]:
    """What a package requires of its siblings, as declared."""
    names = packages(root)
    requirements = [Requirement(line) for line in project(package, root)["dependencies"]]
    return [requirement for requirement in requirements if requirement.name in names]


def siblings(package: str, root: Path = ROOT) -> list[str]:
    """The package and the siblings that it needs, dependencies first."""
    found: list[str] = []
    for requirement in sibling_requirements(package, root):
        found += [name for name in siblings(requirement.name, root) if name not in found]
    return [*found, package]


def dependents(package: str, root: Path = ROOT) -> list[str]:
    """The package and the siblings that need it."""
    return [name for name in packages(root) if package in siblings(name, root)]

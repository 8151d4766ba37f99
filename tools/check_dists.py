"""Check built distributions before they are published: `python tools/check_dists.py FOLDER`.

FOLDER holds one sdist and one wheel of each package. Each must carry its licence, README and typed marker and sound
metadata; the sdist also its tests and changelog, the wheel nothing beside its module.
"""

from __future__ import annotations

import argparse
import tarfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata
from packaging.version import Version
from workspace import ROOT, packages, sibling_requirements, version


def problems(folder: Path, package: str) -> list[str]:
    """What is wrong with the sdist and the wheel of a package."""
    module = package.replace("-", "_")
    stem = f"{module}-{version(package)}"
    wheel, sdist = folder / f"{stem}-py3-none-any.whl", folder / f"{stem}.tar.gz"
    if not (wheel.exists() and sdist.exists()):
        return [f"expected {wheel.name} and {sdist.name}"]
    found = []
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for part in ("LICENSE", "README.md", "CHANGELOG.md", "PKG-INFO", "pyproject.toml", f"src/{module}/py.typed"):
        if part not in held:
            found.append(f"{sdist.name} lacks {part}")
    if not any(name.startswith("tests/test_") for name in held):
        found.append(f"{sdist.name} lacks the tests")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        information = archive.read(f"{stem}.dist-info/METADATA")
    for part in (f"{module}/py.typed", f"{stem}.dist-info/licenses/LICENSE"):
        if part not in names:
            found.append(f"{wheel.name} lacks {part}")
    source = ROOT / "packages" / package / "src"
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    for path in sorted(modules - set(names)):  # what git ignores, a build leaves out
        found.append(f"{wheel.name} lacks {path}")
    stray = sorted({name.partition("/")[0] for name in names} - {module, f"{stem}.dist-info"})
    if stray:
        found.append(f"{wheel.name} also holds {', '.join(stray)}")
    return found + metadata_problems(package, Metadata.from_email(information, validate=True))


def metadata_problems(package: str, metadata: Metadata) -> list[str]:
    """What a reader of the package index would miss."""
    found = []
    for field in ("summary", "description", "keywords", "classifiers", "requires_python"):
        if not getattr(metadata, field):
            found.append(f"no {field}")
    if metadata.license_expression != "Apache-2.0":
        found.append(f"licence {metadata.license_expression}, expected Apache-2.0")
    if metadata.description_content_type != "text/markdown":
        found.append(f"README as {metadata.description_content_type}")
    if "Typing :: Typed" not in (metadata.classifiers or []):
        found.append("no classifier Typing :: Typed")
    for requirement in sibling_requirements(package):
        now = Version(version(requirement.name))
        following = f"{now.major}.{now.minor + 1}.0" if now.major == 0 else f"{now.major + 1}.0.0"
        if now not in requirement.specifier or Version(following) in requirement.specifier:
            found.append(f"requires {requirement}, where {now} must be allowed and {following} must not")
    return [f"{package}: {problem}" for problem in found]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    found = [problem for package in packages() for problem in problems(folder, package)]
    if found:
        raise SystemExit("\n".join(found))
    print(f"{len(packages())} sdists and wheels: licence, typed marker, README, metadata and sibling ranges are sound")


if __name__ == "__main__":
    main()

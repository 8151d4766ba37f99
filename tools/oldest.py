"""Find the oldest sibling that a package still allows, and check it out: `python tools/oldest.py gem-train FOLDER`.

Writes the sources of every sibling that gem-train needs to FOLDER/<name>, each at the oldest release (tag
`<name>-v<version>`) that all requirements on it allow. Where no allowed version has been released, the tree's own
version is the oldest there is.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from workspace import ROOT, sibling_requirements, siblings, version


def allowed(package: str, sibling: str, root: Path = ROOT) -> SpecifierSet:
    """All that `package` and what it needs require of `sibling`."""
    found = SpecifierSet()
    for name in siblings(package, root):
        for requirement in sibling_requirements(name, root):
            if requirement.name == sibling:
                found &= requirement.specifier
    return found


def oldest(specifiers: SpecifierSet, released: Iterable[str], current: str) -> str:
    """The oldest version that the specifiers allow, among the released ones and the tree's current one.

    Raises ValueError where they allow none of them.
    """
    fit = [v for v in sorted({*released, current}, key=Version) if v in specifiers]
    if not fit:
        raise ValueError(f"{specifiers} allows neither the current version {current} nor a released one")
    return fit[0]


def released(package: str, root: Path = ROOT) -> list[str]:
    """Versions that have a tag."""
    prefix = f"{package}-v"
    tags = subprocess.run(
        ["git", "tag", "--list", f"{prefix}*"], cwd=root, check=True, capture_output=True, text=True
    ).stdout.split()
    return [tag.removeprefix(prefix) for tag in tags]


def checkout(package: str, wanted: str, folder: Path, root: Path = ROOT) -> str:
    """Write the sources of a version to `folder / package`; says where they come from."""
    target = folder / package
    shutil.rmtree(target, ignore_errors=True)
    if wanted in released(package, root):
        tag = f"{package}-v{wanted}"
        archive = subprocess.run(
            ["git", "archive", f"{tag}:packages/{package}"], cwd=root, check=True, capture_output=True
        ).stdout
        target.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            if hasattr(tarfile, "data_filter"):  # not in Python 3.11.2
                files.extraction_filter = tarfile.data_filter
            files.extractall(target)
        return f"the tag {tag}"
    assert wanted == version(package, root), f"{package} {wanted} is neither released nor the tree's version"
    shutil.copytree(root / "packages" / package, target, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    return "this tree (no allowed version has been released)"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    for sibling in siblings(options.package)[:-1]:
        wanted = oldest(allowed(options.package, sibling), released(sibling), version(sibling))
        print(f"{sibling} {wanted}, from {checkout(sibling, wanted, options.folder)}")


if __name__ == "__main__":
    main()

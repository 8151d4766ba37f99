"""The skeleton of a new package is complete and never overwrites one."""

import tomllib
from pathlib import Path

import new_package
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_skeleton_is_complete_and_not_overwritten(tmp_path):
    home = new_package.create(tmp_path, "gem-foo", "One line.", ["torch>=2.11"])
    assert (home / "src/gem_foo/py.typed").exists()
    assert '"torch>=2.11"' in (home / "pyproject.toml").read_text()
    with pytest.raises(SystemExit, match="exists already"):
        new_package.create(tmp_path, "gem-foo", "Again.", [])


def test_existing_packages_have_the_same_bones(tmp_path):
    """What a skeleton sets up, every package still has: build, release and licence settings, and the files."""
    skeleton = new_package.create(tmp_path, "gem-foo", "One line.", [])
    expected = tomllib.loads((skeleton / "pyproject.toml").read_text())
    for home in sorted((ROOT / "packages").iterdir()):
        module = home.name.replace("-", "_")
        found = tomllib.loads((home / "pyproject.toml").read_text())
        renamed = str(expected["tool"]).replace("gem-foo", home.name).replace("gem_foo", module)
        assert str({key: found["tool"][key] for key in expected["tool"]}) == renamed
        for key in ("license", "license-files", "readme", "requires-python", "classifiers"):
            assert found["project"][key] == expected["project"][key], (home.name, key)
        assert found["build-system"] == expected["build-system"]
        assert (home / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
        assert "<!-- releases -->" in (home / "CHANGELOG.md").read_text()
        for part in ("README.md", f"src/{module}/py.typed", f"src/{module}/__about__.py", "tests", "changes"):
            assert (home / part).exists(), f"{home.name} lacks {part}"

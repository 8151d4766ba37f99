"""The skeleton of a new package is complete and never overwrites one."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "new_package.py"


def load():
    spec = importlib.util.spec_from_file_location("new_package", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_skeleton_is_complete_and_not_overwritten(tmp_path):
    tool = load()
    home = tool.create(tmp_path, "gem-foo", "One line.", ["torch>=2.11"])
    assert (home / "src/gem_foo/py.typed").exists()
    assert '"torch>=2.11"' in (home / "pyproject.toml").read_text()
    with pytest.raises(SystemExit, match="exists already"):
        tool.create(tmp_path, "gem-foo", "Again.", [])

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import gem_data
import pytest


def test_version_is_semantic():
    assert len(gem_data.__version__.split(".")) == 3


def test_every_public_name_is_there():
    for name in gem_data.__all__:
        assert getattr(gem_data, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gem_data.nothing  # noqa: B018


def test_schemas_logs_and_sources_need_no_torch():
    code = (
        "import sys, gem_data.sources.movielens, gem_data.sources.synthetic\n"
        "from gem_data import Schema, EventLog, build_log, time_split\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_examples_of_the_readme_run(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
    assert "20" in capsys.readouterr().out

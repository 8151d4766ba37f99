import os
import re
import subprocess
import sys
from pathlib import Path

import gem_train
import pytest


def test_version_is_semantic():
    assert len(gem_train.__version__.split(".")) == 3


def test_the_public_names_exist():
    for name in gem_train.__all__:
        assert getattr(gem_train, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = gem_train.nothing


def test_the_readmes_python_example_runs(tmp_path):
    readme = Path(__file__).parents[1] / "README.md"
    (code,) = re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)
    home = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=home, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "from-python" / "eval.json").exists()


def test_the_readmes_commands_are_understood():
    from gem_train.cli.parser import parser

    readme = Path(__file__).parents[1] / "README.md"
    commands = re.findall(
        r"^    (?:gem-train|torchrun .* -m gem_train) (.*?)(?:\s+#.*)?$", readme.read_text(), re.MULTILINE
    )
    assert len(commands) > 8
    for command in commands:
        parser().parse_args(command.split())

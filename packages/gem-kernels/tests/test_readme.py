"""The README's example runs as printed."""

import re
from pathlib import Path


def test_the_example_runs():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict = {}
    exec(example, scope)
    assert scope["pooled"].shape == (3, 2, 128)
    assert scope["out"].shape == (8, 4, 32)

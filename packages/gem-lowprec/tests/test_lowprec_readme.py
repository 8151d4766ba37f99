import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    exec("\n".join(blocks), {})
    printed = capsys.readouterr().out.splitlines()
    shown = re.search(r"```\n(recipe mxfp8.*?)```", README.read_text(), flags=re.DOTALL).group(1).splitlines()
    assert printed[0] == shown[0]
    for line, expected in zip(printed[3:7], shown[3:], strict=True):
        assert line.startswith(expected.removesuffix(" ..."))

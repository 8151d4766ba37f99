import pathlib
import re


def test_the_example_runs(capsys):
    readme = pathlib.Path(__file__).parents[1] / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)
    exec(compile(example, str(readme), "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("torch.Size([64, 1])")

import pathlib
import re


def test_the_examples_run(capsys):
    readme = pathlib.Path(__file__).parents[1] / "README.md"
    examples = re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)
    scope = {}
    for example in examples:
        exec(compile(example, str(readme), "exec"), scope)
    assert len(examples) == 2
    assert scope["model"].config.width == 48
    printed = capsys.readouterr().out
    assert printed.startswith("torch.Size([64, 1])")

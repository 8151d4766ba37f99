from pathlib import Path

import gem_parallel


def test_version_is_semantic():
    assert len(gem_parallel.__version__.split(".")) == 3


def test_every_public_name_exists():
    for name in gem_parallel.__all__:
        assert getattr(gem_parallel, name) is not None
        assert name in dir(gem_parallel)


def test_the_readmes_example_runs(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "tables.item  table_wise  rank 0  rows 0..1000  cols 0..16" in printed
    assert "loaded step 3" in printed

"""The README's commands are what CI and users run, to the letter."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_ci_runs_the_readmes_test_command():
    command = (ROOT / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert command in (ROOT / "README.md").read_text().splitlines()


def test_every_package_has_the_same_bones():
    for pyproject in sorted((ROOT / "packages").glob("*/pyproject.toml")):
        home, module = pyproject.parent, pyproject.parent.name.replace("-", "_")
        for part in ("README.md", "CHANGELOG.md", f"src/{module}/py.typed", f"src/{module}/__about__.py", "tests"):
            assert (home / part).exists(), f"{home.name} lacks {part}"

"""A change names the sessions that it needs, and no test of a package that it cannot break."""

import subprocess
from pathlib import Path

import affected
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("path", "needed", "spared"),
    [
        (
            "packages/gem-kernels/src/gem_kernels/nn.py",
            {"lint", "types", "tests(gem-kernels)", "tests(gem-lowprec)", "tests(gem-model)", "tests(gem-train)"},
            {"tests(gem-data)", "tests(gem-parallel)", "tests"},
        ),
        (
            "packages/gem-data/src/gem_data/ragged.py",
            {"tests(gem-data)", "tests(gem-train)", "contracts", "api"},
            {"tests(gem-model)", "tests(gem-kernels)"},
        ),
        ("packages/gem-train/tests/test_config.py", {"lint", "tests(gem-train)"}, {"types", "docs", "tests(gem-data)"}),
        ("packages/gem-model/README.md", {"tests(tools)", "wheel(gem-model)"}, {"types", "tests(gem-train)"}),
        ("packages/gem-model/changes/+x.added.md", {"release"}, {"lint", "tests(gem-model)"}),
        (
            "packages/gem-lowprec/pyproject.toml",
            {"release", "wheel(gem-lowprec)", "oldest(gem-lowprec)", "tests(gem-train)"},
            {"types"},
        ),
        ("docs/tutorials/first-training.md", {"docs", "tests(tools)"}, {"lint", "tests"}),
        ("tools/benchmark_tables.py", {"lint", "tests(tools)"}, {"docs", "tests"}),
        ("tools/cpu.txt", set(affected.EVERYTHING), {"tests(tools)"}),
        ("noxfile.py", set(affected.EVERYTHING), set()),
        ("something/new.py", set(affected.EVERYTHING), set()),
    ],
)
def test_sessions_of_a_path(path, needed, spared):
    found = set(affected.sessions([path]))
    assert needed <= found
    assert not spared & found


def test_nothing_changed_needs_nothing_and_everything_includes_the_packages():
    assert affected.sessions([]) == []
    both = affected.sessions(["packages/gem-data/tests/test_balance.py", "noxfile.py"])
    assert "tests" in both
    assert "tests(gem-data)" not in both


def test_every_session_exists():
    """The names are those of noxfile.py, read as text: nox is not installed here."""
    text = (ROOT / "noxfile.py").read_text()
    for name in affected.EVERYTHING:
        assert f"def {name}(session" in text
    for pattern in ('"tests(tools)"', 'f"tests({package})"', 'f"wheel({package})"', 'f"oldest({package})"'):
        assert f"name={pattern}" in text


def test_files_from_git(tmp_path):
    def git(*words):
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    git("checkout", "-b", "topic")
    (tmp_path / "b").write_text("1")
    git("add", "b")
    git("commit", "-m", "b")
    (tmp_path / "a").write_text("2")
    (tmp_path / "c").write_text("new")
    assert affected.changed(None, tmp_path) == ["a", "b", "c"]
    assert affected.changed("HEAD", tmp_path) == ["a", "c"]

"""Sibling ranges hold, the oldest allowed sibling is found, and what breaks the public API is seen."""

import subprocess

import check_dists
import oldest
import public_api
import pytest
import workspace
from packaging.specifiers import SpecifierSet

PACKAGES = workspace.packages()


def test_dependencies_come_first():
    order = workspace.siblings("gem-train")
    assert set(order) == set(PACKAGES)
    assert order.index("gem-kernels") < order.index("gem-model") < order.index("gem-train")
    assert workspace.dependents("gem-lowprec") == ["gem-lowprec", "gem-train"]


@pytest.mark.parametrize("package", PACKAGES)
def test_sibling_ranges_hold(package):
    """The tree's version of every sibling is allowed, and so is one that exists at the lower end."""
    for sibling in workspace.siblings(package)[:-1]:
        specifiers = oldest.allowed(package, sibling)
        assert specifiers, f"{package} does not bound {sibling}"
        current = workspace.version(sibling)
        assert current in specifiers
        assert oldest.oldest(specifiers, oldest.released(sibling), current) in specifiers


def test_the_oldest_allowed_version():
    assert oldest.oldest(SpecifierSet(">=0.2,<0.4"), ["0.1.0", "0.2.0", "0.10.0", "0.3.1"], "0.3.2") == "0.2.0"
    assert oldest.oldest(SpecifierSet(">=0.1,<0.2"), [], "0.1.0") == "0.1.0"
    with pytest.raises(ValueError, match=r"neither the current version 0\.2\.0 nor a released one"):
        oldest.oldest(SpecifierSet(">=0.1,<0.2"), ["0.3.0"], "0.2.0")


def test_sources_of_a_release_come_from_its_tag(tmp_path):
    """A tree where gem-a 0.1.0 was tagged and has moved on to 0.2.0."""

    def git(*words):
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)

    root = tmp_path / "tree"
    about = root / "packages/gem-a/src/gem_a/__about__.py"
    about.parent.mkdir(parents=True)
    about.write_text('__version__ = "0.1.0"\n')
    (root / "packages/gem-a/pyproject.toml").write_text('[project]\nname = "gem-a"\ndependencies = []\n')
    (root / "packages/gem-b").mkdir()
    (root / "packages/gem-b/pyproject.toml").write_text('[project]\nname = "gem-b"\ndependencies = ["gem-a>=0.1,<1"]\n')
    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "first")
    git("tag", "gem-a-v0.1.0")
    about.write_text('__version__ = "0.2.0"\n')
    wanted = oldest.oldest(oldest.allowed("gem-b", "gem-a", root), oldest.released("gem-a", root), "0.2.0")
    assert oldest.checkout("gem-a", wanted, tmp_path / "out", root) == "the tag gem-a-v0.1.0"
    assert '"0.1.0"' in (tmp_path / "out/gem-a/src/gem_a/__about__.py").read_text()
    assert oldest.checkout("gem-a", "0.2.0", tmp_path / "out", root).startswith("this tree")
    assert '"0.2.0"' in (tmp_path / "out/gem-a/src/gem_a/__about__.py").read_text()


def test_missing_distributions_are_named(tmp_path):
    assert check_dists.problems(tmp_path, "gem-data")[0].startswith("expected gem_data-")


class TestPublicApi:
    """The listing tool on a package of two versions."""

    before = """
from pkg.parts import Thing, old, helper, gone
from typing_extensions import deprecated
__all__ = ["Thing", "old", "helper", "gone"]
"""

    def listing(self, folder, parts):
        home = folder / "pkg"
        home.mkdir(parents=True)
        (home / "__init__.py").write_text(self.before)
        (home / "parts.py").write_text(parts)
        return public_api.listing("pkg", folder)

    def test_what_has_gone_is_reported_unless_deprecated(self, tmp_path):
        first = self.listing(
            tmp_path / "one",
            "class Thing:\n    def __init__(self, a, *, b: int = 1): self.x = a\n    def run(self): ...\n"
            "    def _hidden(self): ...\n"
            "@deprecated('use helper')\ndef old(): ...\ndef helper(x, y=2): ...\ndef gone(): ...\n",
        )
        assert first == [
            "class pkg.Thing(a, *, b=1)",
            "pkg.Thing.run()",
            "pkg.gone()",
            "pkg.helper(x, y=2)",
            "pkg.old()  # deprecated",
        ]
        second = self.listing(
            tmp_path / "two",
            "class Thing:\n    def __init__(self, b, *, c=None): ...\n    def run(self, now=False): ...\n"
            "    def also(self): ...\ndef helper(x, y=2, z=(1, 2), *, w=None): ...\n",
        )
        broken, new = public_api.compare(first, second)
        assert [line.split("\n")[0] for line in broken] == ["- class pkg.Thing(a, *, b=1)", "- pkg.gone()"]
        assert new == ["+ pkg.Thing.also()"]

    @pytest.mark.parametrize(
        ("old", "new", "same"),
        [
            ("f(a, b=1)", "f(a, b=1, c=(1, 2))", True),
            ("f(a, *, k=1)", "f(a, *, j=2, k=1)", True),
            ("f(a)", "f(a, **options)", True),
            ("f(a)", "f(a, b)", False),
            ("f(a, b=1)", "f(a, c=1, b=1)", False),
            ("f(a, b=1)", "f(a, b=2)", False),
            ("f(a, *, k=1)", "f(a, *, k=1, j)", False),
            ("f(a, *, k=g(1, 2))", "f(a)", False),
            ("class f(a)", "f(a)", False),
            ("f.x", "f.x()", False),
        ],
    )
    def test_added_options_change_nothing(self, old, new, same):
        assert public_api.compatible(old, new) is same

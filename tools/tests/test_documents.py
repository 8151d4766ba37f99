"""What READMEs and tutorials show is what happens: blocks run, commands parse, links and modules exist."""

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import documents
import drawings
import pytest
from gem_train import recipes
from gem_train.cli.parser import parser
from gem_train.config import override

ROOT = Path(__file__).resolve().parents[2]
PROSE = [*documents.pages(), *sorted(ROOT.glob("docs/**/*.md"))]


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", documents.pages(), ids=name)
def test_every_block_runs(page, tmp_path):
    ran = documents.run(page, tmp_path)
    assert ran or not [block for block in documents.blocks(page) if block.language == "python"]


@pytest.mark.parametrize("page", dict.fromkeys(PROSE), ids=name)
def test_every_command_is_one(page):
    """`gem-train` lines parse and set what exists; `python -m` lines name modules of ours."""
    for line, words in documents.commands(page):
        program, *arguments = words
        if "-m" in arguments:
            module, *arguments = arguments[arguments.index("-m") + 1 :]
            if module.startswith("gem_"):
                assert importlib.util.find_spec(module), f"{page}:{line}: there is no module {module}"
            program = "gem-train" if module == "gem_train" else ""
        if Path(program).name != "gem-train" or arguments[:1] in (["--help"], ["--version"]):
            continue
        try:
            parsed = parser().parse_args(arguments)
        except SystemExit as error:
            raise AssertionError(f"{page}:{line}: {' '.join(words)}") from error
        recipe = getattr(parsed, "recipe", None)
        if recipe and "/" not in recipe and recipe.islower():  # not a run folder, not a placeholder
            override(recipes.load(recipe), parsed.set)


@pytest.mark.parametrize("page", dict.fromkeys(PROSE), ids=name)
def test_paths_in_links_and_code_exist(page):
    """Relative links, and `packages/...`, `tools/...` and `docs/...` paths in code spans."""
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text):
        assert (page.parent / target).exists(), f"{page}: the link {target} leads nowhere"
    for path in re.findall(r"`((?:packages|tools|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{page}: there is no {path}"
    for module, _, attribute in re.findall(r"`(gem_[a-z]+(?:\.[a-z_]+)*)(\.)?([A-Z]\w*)?`", text):
        assert importlib.util.find_spec(module.partition(".")[0]), f"{page}: there is no module {module}"
        assert exists(module, attribute), f"{page}: there is no {module}.{attribute}".rstrip(".")


def exists(module, attribute):
    """Whether the dotted name is a module, or an attribute of one."""
    parts = module.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in [*parts[cut:], *([attribute] if attribute else [])]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_a_block_that_fails_is_named(tmp_path):
    page = ROOT / "docs" / "not-there.md"

    class Page(type(page)):
        def read_text(self, *args, **kwargs):
            return "text\n\n```python\nx = 1\n```\n\n```sh\nfalse\n```\n"

    with pytest.raises(RuntimeError, match=r"docs/not-there.md:8: exit code 1"):
        documents.run(Page(page), tmp_path)


def test_a_block_is_left_out_only_for_a_known_reason(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: needs Slurm -->\n\n```sh\nsbatch x\n```\n\n```python\nx = 1\n```\n")
    first, second = documents.blocks(page)
    assert (first.runs, second.runs) == (False, True)
    page.write_text("<!-- not run: I do not feel like it -->\n\n```sh\nfalse\n```\n")
    with pytest.raises(ValueError, match="unknown reason"):
        documents.blocks(page)


TECHNIQUES = [page for page in sorted(ROOT.glob("docs/techniques/*.md")) if page.name != "README.md"]


@pytest.mark.parametrize("page", TECHNIQUES, ids=name)
def test_a_technique_says_where_what_was_measured_and_what_differs(page):
    text = page.read_text()
    headings = re.findall(r"^## (.*)", text, flags=re.MULTILINE)
    assert headings == ["Where it lives", "What was measured", "What differs, and why"]
    assert f"({page.name})" in (page.parent / "README.md").read_text()


def test_diagrams_are_those_of_the_script():
    drawn = {f"docs/figures/{name}": draw().svg() for name, draw in drawings.DRAWINGS.items()}
    assert drawn
    for path, svg in drawn.items():
        assert (ROOT / path).read_text() == svg, f"{path} is out of date; run python tools/drawings.py"
        ElementTree.fromstring(svg)


def test_every_figure_has_a_script():
    scripts = [*ROOT.glob("tools/*.py"), *ROOT.glob("packages/*/src/**/*.py")]
    source = "\n".join(script.read_text() for script in scripts)
    for figure in sorted(ROOT.glob("docs/**/*.svg")) + sorted(ROOT.glob("docs/**/*.png")):
        family = f"{figure.stem.partition('-')[0]}-"  # a script may put the rest of the name together
        assert figure.name in source or family in source, f"{figure.name} is drawn by no script in tools/ or a package"

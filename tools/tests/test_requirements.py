"""A package declares every distribution that its modules import; what it only measures against may be absent."""

import ast
import re
import sys
from importlib.metadata import packages_distributions

import pytest
import workspace

PEERS = {"fa3", "flash_attn", "liger_kernel", "fbgemm_gpu"}  # of benchmarks, imported where they are found


def imports(path):
    """(line, top-level module) of every absolute import in a file, also of those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module.partition(".")[0]


def normal(name):
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~\[;]", name)[0]).lower()


@pytest.mark.parametrize("package", workspace.packages())
def test_imports_are_declared(package):
    project = workspace.project(package)
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "test" for line in lines]
    declared = {normal(line) for line in [*project["dependencies"], *extras]}
    distributions = packages_distributions()
    source = workspace.ROOT / "packages" / package / "src"
    missing = {}
    for path in source.rglob("*.py"):
        for line, module in imports(path):
            if module in sys.stdlib_module_names or module in PEERS or module == package.replace("-", "_"):
                continue
            if not declared & {normal(name) for name in distributions.get(module, [module])}:
                missing.setdefault(module, f"{path.relative_to(source)}:{line}")
    assert not missing, f"{package} imports what its pyproject.toml does not ask for: {missing}"

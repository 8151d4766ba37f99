"""Check an installed package: import every module, run its commands, and all Python examples of its README.

`python tools/check_wheel.py gem-kernels`, with the interpreter of the environment that holds the wheel.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path


def modules(package: str) -> list[str]:
    """Names of the package and of all its modules, `__main__` ones excepted (they run)."""
    root = importlib.import_module(package)
    found = [package]
    for info in pkgutil.walk_packages(root.__path__, prefix=f"{package}."):
        if not info.name.endswith("__main__"):
            found.append(info.name)
    return found


def main() -> None:
    """Exit non-zero on the first module that does not import, command that does not start or example that fails."""
    distribution = sys.argv[1]
    package = distribution.replace("-", "_")
    location = Path(importlib.import_module(package).__file__ or "")
    if "site-packages" not in location.parts:
        raise SystemExit(f"{package} is imported from {location}, not from an installed wheel")
    if not (location.parent / "py.typed").exists():
        raise SystemExit(f"{package} ships no py.typed marker")
    names = modules(package)
    for name in names:
        importlib.import_module(name)
    scripts = [point for point in metadata.distribution(distribution).entry_points if point.group == "console_scripts"]
    for script in scripts:
        program = Path(sys.executable).parent / script.name
        for words in (["--version"], ["--help"]):
            subprocess.run([program, *words], check=True, stdout=subprocess.DEVNULL)
    readme = metadata.metadata(distribution).json["description"]
    examples = re.findall(r"```python\n(.*?)```", str(readme), flags=re.DOTALL)
    if not examples:
        raise SystemExit(f"the README of {distribution} has no Python example to run")
    with tempfile.TemporaryDirectory() as folder:
        example = Path(folder) / "example.py"
        example.write_text("\n".join(examples))
        subprocess.run([sys.executable, str(example)], check=True, cwd=folder)
    print(
        f"{distribution} {metadata.version(distribution)}: {len(names)} modules import, {len(scripts)} commands start, "
        f"{len(examples)} examples of the README run"
    )


if __name__ == "__main__":
    main()

"""Sessions of the workspace. `nox -l` lists them; plain `nox` is what CI runs."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = tuple(sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml")))
SOURCES = os.pathsep.join(str(ROOT / "packages" / p / "src") for p in PACKAGES)

# One thread per test process: pytest-xdist already uses every core.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
WORKERS = os.environ.get("GEM_TEST_WORKERS", str(os.cpu_count() or 1))

nox.options.default_venv_backend = "virtualenv"  # pip, since uv does not honour the CPU pin of torch
nox.options.sessions = ["lint", "types", "contracts", "docs", "tests"]


def siblings(package: str) -> list[str]:
    """The package and the siblings that it needs, dependencies first."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    found: list[str] = []
    for requirement in project["dependencies"]:
        for name in PACKAGES:
            if requirement.startswith(name):
                found += [s for s in siblings(name) if s not in found]
    return [*found, package]


def engines(package: str) -> list[str]:
    """CPU pins of the engines that the package needs (see tools/cpu.txt)."""
    lines = [line for line in (ROOT / "tools" / "cpu.txt").read_text().splitlines() if line and line[0] not in "#-"]
    wants_torchrec = any(
        "torchrec" in (ROOT / "packages" / s / "pyproject.toml").read_text() for s in siblings(package)
    )
    needed = ("torch==", "triton==", "numpy", "psutil") + (("./tools/fbgemm", "torchrec==") if wants_torchrec else ())
    return [line for line in lines if line.startswith(needed)]


def pytest(session: nox.Session, *paths: str) -> None:
    session.run("pytest", "-n", WORKERS, "--durations=8", *paths, *session.posargs, env=ONE_THREAD)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting (ruff)."""
    session.install("ruff==0.17.6")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Static types of every package (mypy; torch itself is not installed and counts as Any)."""
    session.install("mypy==2.4.1", "numpy")
    for package in PACKAGES:
        session.run("mypy", "-p", package.replace("-", "_"))


@nox.session
def contracts(session: nox.Session) -> None:
    """Who may import whom (import-linter)."""
    session.install("import-linter==2.17")
    session.run("lint-imports", env={"PYTHONPATH": SOURCES})


@nox.session
def docs(session: nox.Session) -> None:
    """The site, with warnings as errors."""
    session.install("-r", "tools/docs.txt")
    session.run("mkdocs", "build", "--strict", "--quiet")


@nox.session
def tests(session: nox.Session) -> None:
    """All packages in one environment."""
    session.install("-r", "tools/cpu.txt", *test_requirements())
    pytest(session, "packages", "tools")


def test_requirements() -> list[str]:
    """The union of the packages' test extras."""
    extras: set[str] = set()
    for package in PACKAGES:
        project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
        extras |= set(project["optional-dependencies"]["test"])
    return sorted(extras)


@nox.session
def train(session: nox.Session) -> None:
    """The main job: train and evaluate a small GEM on MovieLens-100K."""
    session.install("-r", "tools/cpu.txt")
    session.run("gem-train", "run", "ml100k", *session.posargs)


def one_package(package: str) -> None:
    """Register `tests(<package>)` and `wheel(<package>)`."""

    @nox.session(name=f"tests({package})")
    def tests_alone(session: nox.Session) -> None:
        editable = [part for s in siblings(package) for part in ("-e", f"packages/{s}")]
        session.install(*engines(package), *editable[:-1], f"packages/{package}[test]")
        pytest(session, f"packages/{package}/tests")

    @nox.session(name=f"wheel({package})")
    def wheel_alone(session: nox.Session) -> None:
        house = Path(session.create_tmp()).resolve() / "wheelhouse"
        shutil.rmtree(house, ignore_errors=True)
        session.install("hatch")
        for sibling in siblings(package):
            with session.chdir(ROOT / "packages" / sibling):
                session.run("hatch", "build", "-t", "wheel", str(house))
        empty = house.parent / "empty"
        shutil.rmtree(empty, ignore_errors=True)
        session.run("python", "-m", "venv", str(empty))
        python = str(empty / "bin" / "python")
        session.run(
            python, "-m", "pip", "install", "-q", "--find-links", str(house), *engines(package), package, external=True
        )
        session.run(python, str(ROOT / "tools" / "check_wheel.py"), package, external=True)

    tests_alone.__doc__ = f"{package} and what it depends on, in their own environment."
    wheel_alone.__doc__ = (
        f"The wheel of {package}, alone in an empty environment: every module imports, the README runs."
    )


for name in PACKAGES:
    one_package(name)

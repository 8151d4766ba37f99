"""Sessions of the workspace. `nox -l` lists them; plain `nox` is what CI runs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

from workspace import packages, project, siblings, version  # noqa: E402

PACKAGES = packages()
SOURCES = os.pathsep.join(str(ROOT / "packages" / p / "src") for p in PACKAGES)

# One thread per test process: pytest-xdist already uses every core.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
WORKERS = os.environ.get("GEM_TEST_WORKERS", str(os.cpu_count() or 1))

GRIFFE = "griffe==2.4.1"

nox.options.default_venv_backend = "virtualenv"  # pip, since uv does not honour the CPU pin of torch
nox.options.sessions = ["lint", "types", "contracts", "docs", "release", "api", "tests"]


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
    """Static types of every package and of the tools (mypy; torch itself is not installed and counts as Any)."""
    session.install("mypy==2.4.1", "numpy", "packaging")
    for package in PACKAGES:
        session.run("mypy", "-p", package.replace("-", "_"))
    session.run("mypy", *map(str, sorted(ROOT.glob("tools/*.py"))), env={"MYPYPATH": "tools"})


@nox.session
def contracts(session: nox.Session) -> None:
    """Who may import whom (import-linter)."""
    session.install("import-linter==2.17")
    session.run("lint-imports", env={"PYTHONPATH": SOURCES})


@nox.session
def docs(session: nox.Session) -> None:
    """The site, with warnings as errors."""
    session.install("-r", "tools/docs.txt")
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def release(session: nox.Session) -> None:
    """What would be released: sdists, wheels built from them, metadata, and the changelogs as they would read."""
    session.install("build==1.6.1", "hatchling==1.33.0", "packaging", "towncrier==26.9.0")
    dists = Path(session.create_tmp()).resolve() / "dists"
    shutil.rmtree(dists, ignore_errors=True)
    for package in PACKAGES:
        home = f"packages/{package}"
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dists), home, silent=True)
        draft = ("--draft", "--dir", home, "--config", f"{home}/pyproject.toml", "--version", version(package))
        session.run("towncrier", "build", *draft, silent="-v" not in session.posargs)
    session.run("python", "tools/check_dists.py", str(dists))


@nox.session
def api(session: nox.Session) -> None:
    """The public API beside its committed listing and the last release; `-- --write` writes the listing."""
    session.install(GRIFFE, "packaging")
    session.run("python", "tools/public_api.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """All packages in one environment."""
    session.install("-r", "tools/cpu.txt", *test_requirements())
    pytest(session, "packages", "tools")


@nox.session(name="tests(tools)")
def tests_of_tools(session: nox.Session) -> None:
    """The tools, and the code blocks of READMEs and tutorials, in an environment with all packages."""
    session.install("-r", "tools/cpu.txt", *test_requirements())
    pytest(session, "tools")


def test_requirements() -> list[str]:
    """The union of the packages' test extras, and what the tests of the tools need."""
    extras = {line for package in PACKAGES for line in project(package)["optional-dependencies"]["test"]}
    return sorted(extras | {GRIFFE, "markdown-it-py>=3", "packaging"})


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
        python = install_wheels(session, package, {name: ROOT / "packages" / name for name in siblings(package)})
        session.run(python, str(ROOT / "tools" / "check_wheel.py"), package, external=True)

    tests_alone.__doc__ = f"{package} and what it depends on, in their own environment."
    wheel_alone.__doc__ = (
        f"The wheel of {package}, alone in an empty environment: modules import, commands start, the README runs."
    )
    if len(siblings(package)) == 1:
        return

    @nox.session(name=f"oldest({package})")
    def with_oldest_siblings(session: nox.Session) -> None:
        session.install("packaging")
        sources = Path(session.create_tmp()).resolve() / "sources"
        session.run("python", "tools/oldest.py", package, str(sources))
        homes = {name: sources / name for name in siblings(package)[:-1]} | {package: ROOT / "packages" / package}
        python = install_wheels(session, package, homes)
        session.run(python, str(ROOT / "tools" / "check_wheel.py"), package, external=True)
        session.run(
            python, "-m", "pip", "install", "-q", *project(package)["optional-dependencies"]["test"], external=True
        )
        tests = f"packages/{package}/tests"
        session.run(
            python,
            "-m",
            "pytest",
            "-n",
            WORKERS,
            "-m",
            "not slow",
            tests,
            *session.posargs,
            env=ONE_THREAD,
            external=True,
        )

    with_oldest_siblings.__doc__ = f"{package} beside the oldest siblings that it allows."


def install_wheels(session: nox.Session, package: str, homes: dict[str, Path]) -> str:
    """Build wheels of the sources in `homes`; the interpreter of an empty environment with `package` from them.

    The engines' pins are constraints there, so that nothing is installed that the package does not ask for.
    """
    house = Path(session.create_tmp()).resolve() / "wheelhouse"
    empty = house.parent / "empty"
    for folder in (house, empty):
        shutil.rmtree(folder, ignore_errors=True)
    session.install("build==1.6.1", "hatchling==1.33.0")
    for home in homes.values():
        session.run(
            "python", "-m", "build", "--no-isolation", "--wheel", "--outdir", str(house), str(home), silent=True
        )
    session.run("python", "-m", "venv", str(empty))
    python = str(empty / "bin" / "python")
    pins = house / "pins.txt"
    pins.write_text("\n".join(line for line in engines(package) if not line.startswith(".")))
    stand_in = [line for line in engines(package) if line.startswith(".")]
    wanted = ("--find-links", str(house), "--constraint", str(pins), *stand_in, package)
    session.run(python, "-m", "pip", "install", "-q", *wanted, external=True)
    return python


for name in PACKAGES:
    one_package(name)

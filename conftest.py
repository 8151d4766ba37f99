"""Tests give the same answer each time: one seed for every test, and no verdict on how busy the machine is.

GEM_TEST_SEED=7 is another seed, GEM_TEST_SEED=random draws one, which the header of pytest's output names: it is
Hypothesis's, too, and that of `random`, NumPy and torch before each test.
"""

from __future__ import annotations

import os
import random
import sys

import pytest
from hypothesis import HealthCheck, settings

GIVEN = os.environ.get("GEM_TEST_SEED", "0")
SEED = random.SystemRandom().getrandbits(32) if GIVEN == "random" else int(GIVEN)
os.environ["GEM_TEST_SEED"] = str(SEED)  # the same in all workers of pytest-xdist

settings.register_profile("gem", database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gem")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before Hypothesis reads its own option."""
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_report_header() -> str:
    """The seed, for who looks for a failure."""
    return f"GEM_TEST_SEED={SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before any fixture of the test. An engine that the test imports later starts from its own constant seed."""
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Every converted model on a CPU says once that it is emulated; the test of that message catches it itself.
    config.addinivalue_line("filterwarnings", "ignore:.* is emulated on:UserWarning")

from __future__ import annotations

import pytest
from gem_data import EventLog, build_log
from gem_data.testing import small_events, small_schema


@pytest.fixture(scope="session")
def small_log(tmp_path_factory) -> EventLog:
    """150 events with many ties, of 6 users."""
    folder = tmp_path_factory.mktemp("logs") / "small"
    build_log(small_events(150), small_schema(), folder)
    return EventLog.open(folder)

"""Streams of a capture, with streams that only take notes: what a card would be asked for."""

from __future__ import annotations

import contextlib

import pytest
import torch
from gem_model.lanes import Lane, Lanes


class Stream:
    """Notes whom it waits for."""

    def __init__(self, capturing: bool) -> None:
        self.capturing, self.waited = capturing, []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


@pytest.fixture
def card(monkeypatch):
    """The stream of the capture, which is current until another one is made so."""
    current = [Stream(True)]

    @contextlib.contextmanager
    def made_current(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", made_current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1].capturing)
    return current[0]


def test_a_failure_in_a_capture_brings_back_the_lanes_that_take_part(card):
    lanes, taking_part, idle = Lanes(), Stream(True), Stream(False)
    lanes._lanes = {"clicks": Lane(taking_part), "views": Lane(idle)}
    with pytest.raises(torch.OutOfMemoryError, match="no room"), lanes.joined():
        raise torch.OutOfMemoryError("no room")
    assert card.waited == [taking_part]


def test_a_capture_that_goes_well_is_left_alone(card):
    lanes = Lanes()
    lanes._lanes = {"clicks": Lane(Stream(True))}
    with lanes.joined():
        pass
    assert card.waited == []

"""What is computed over all events of a log and kept with it: vocabularies, statistics, streaming counters."""

from __future__ import annotations

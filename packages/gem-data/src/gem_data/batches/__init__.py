"""From rows of a log to jagged batches on the device: collating, order, resume, worker processes."""

from __future__ import annotations

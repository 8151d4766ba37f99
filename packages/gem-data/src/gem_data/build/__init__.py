"""Making a log: in memory, out of core, or by growing one that is there. Rows are checked here."""

from __future__ import annotations

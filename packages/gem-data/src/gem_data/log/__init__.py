"""Reading a log: what lies on disk, histories and labels of rows, splits, and a page about what it holds."""

from __future__ import annotations

"""Gluon kernels for Hopper (compute capability 9): what jagged attention and GDPA share. `launch` is the entrance."""

from __future__ import annotations

HEAD_DIMS = (64, 128)

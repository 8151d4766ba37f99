"""What the model needs of a batch. Anything with these attributes will do; gem-data's JaggedBatch is one.

``B`` samples, ``T`` events of all samples together, ``N`` ids of all samples together, ``F`` dense features, ``K``
tasks. Offsets run from 0 to T (or N); rows ``offsets[b]:offsets[b + 1]`` belong to sample ``b``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class SequenceLike(Protocol):
    """A jagged history, oldest event first inside each sample."""

    @property
    def ids(self) -> Mapping[str, Tensor]:
        """Categorical columns: name -> [T] int64."""

    @property
    def floats(self) -> Mapping[str, Tensor]:
        """Float columns and fixed-size vectors: name -> [T, k] float32."""

    @property
    def time(self) -> Tensor:
        """[T] int64, seconds."""

    @property
    def offsets(self) -> Tensor:
        """[B + 1] int64."""

    @property
    def max_len(self) -> int:
        """No sample's history is longer. A host int, so that no one needs to ask the device."""


class IdsLike(Protocol):
    """A jagged list of ids: zero or more for each sample.

    Those of a feature that `ModelInputs.weighted` names also have ``weights``, [N] float32.
    """

    @property
    def values(self) -> Tensor:
        """[N] int64."""

    @property
    def offsets(self) -> Tensor:
        """[B + 1] int64."""


class BatchLike(Protocol):
    """One batch of samples.

    Where samples share histories (:mod:`gem_model.sharing`) it also has ``requests``, [B] int64: the sequences then
    hold R histories, and that of sample b is number ``requests[b]``. Samples of one request have one time.
    """

    @property
    def sequences(self) -> Mapping[str, SequenceLike]:
        """By source name."""

    @property
    def sparse(self) -> Mapping[str, IdsLike]:
        """By feature name."""

    @property
    def dense(self) -> Tensor:
        """[B, F] float32."""

    @property
    def time(self) -> Tensor:
        """[B] int64, seconds: when the request was made."""

    @property
    def labels(self) -> Tensor:
        """[B, K] float32."""

    @property
    def label_mask(self) -> Tensor:
        """[B, K] bool: which labels are known."""

    @property
    def weights(self) -> Tensor:
        """[B] float32: 0 for a padding sample."""

"""What can go wrong with a checkpoint, in one line of plain words."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; earlier ones are untouched."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's remarks on a world of one and on ShardedTensor, which TorchRec's tables are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*ShardedTensor", category=FutureWarning)
        yield


def reason(error: BaseException) -> str:
    """One line; a full disk is said in plain words wherever in the chain it hides."""
    chain: list[BaseException] = [error]
    if isinstance(error, CheckpointException):
        chain += [failure[0] for failure in error.failures.values()]
    for link in chain:
        cause: BaseException | None = link
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                return f"the disk is full ({cause.strerror or 'ENOSPC'})"
            cause = cause.__cause__ or cause.__context__
    inner = chain[-1]
    if isinstance(inner, CheckpointError):
        return str(inner)
    return f"{type(inner).__name__}: {str(inner).strip().splitlines()[0] if str(inner).strip() else ''}"

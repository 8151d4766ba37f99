"""The errors that end a command, each with the exit code that a script may rely on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UserError(ValueError):
    """Something that the person at the keyboard can put right: shown as one line, without a traceback."""

    exit_code = 2


class NonFiniteError(RuntimeError):
    """The loss or its gradient stopped being a number; the run stops before the bad update is applied."""

    exit_code = 3


class PeerLost(RuntimeError):
    """Another rank died, hangs or left; what was waited for is in the message. Go on with --resume."""

    exit_code = 4


class Interrupted(Exception):
    """The run was asked to stop (SIGTERM) and did so after writing a checkpoint: not a failure."""

    exit_code = 0


@contextlib.contextmanager
def user_errors(doing: str) -> Iterator[None]:
    """Present a library's ValueError, TypeError or OSError, raised while `doing`, as the user's to mend.

    The libraries name the offending value and what they expected in exactly these types. Only the phases that digest
    the user's settings run under this; an error inside a training step keeps its traceback.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"{doing}: {error}") from error

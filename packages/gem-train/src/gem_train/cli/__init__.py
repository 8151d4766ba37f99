"""The command line. This module imports nothing heavy: `gem-train --help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from gem_train.cli.parser import parser
from gem_train.errors import Interrupted, NonFiniteError, PeerLost, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 done, 2 the user's to mend, 3 NaN or infinity, 4 another rank is gone, 130 Ctrl-C.
    """
    arguments = parser().parse_args(argv)
    if arguments.verb is None:
        parser().print_help()
        return 2
    # Read when torch is imported. Every batch has other sizes, and blocks of fixed sizes would soon fit none of them.
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    try:
        from gem_train.cli import commands

        code: int = getattr(commands, arguments.verb)(arguments)
        return code
    except (UserError, NonFiniteError, PeerLost, Interrupted) as error:
        if arguments.debug and not isinstance(error, Interrupted):
            raise
        if os.environ.get("RANK", "0") == "0" or isinstance(error, PeerLost):  # the others would only repeat it
            kind = "" if isinstance(error, Interrupted) else "error: "
            print(f"gem-train: {kind}{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("gem-train: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `gem-train show x | head`
        sys.stderr.close()
        return 0


__all__ = ["main"]

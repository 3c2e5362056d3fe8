"""Running a command, and its exit code."""

import argparse
import os
import sys
from collections.abc import Callable

from ..utils.options import OptionError

#: Errors of a user's input or surroundings: one line without a traceback.
EXPECTED_ERRORS = (ValueError, TypeError, NotImplementedError, OSError, ImportError, FloatingPointError)


def exit_code(command: Callable[[], int | None], *, traceback: bool = False) -> int:
    """Run a command and return its exit code: expected errors become one line on stderr.

    That is the command's own exit code (None stands for 0), or 1 for an expected error (which `traceback` raises
    instead), 2 for wrong usage (an `OptionError` or an `ArgumentError`), 130 for Ctrl-C.
    """
    try:
        return command() or 0
    except SystemExit as finished:
        return finished.code if isinstance(finished.code, int) else 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of our output is gone. Without this, the interpreter would report the error again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (*EXPECTED_ERRORS, argparse.ArgumentError) as error:
        if traceback:
            raise
        dashes = "--" if isinstance(error, OptionError) else ""
        sys.stderr.write(f"error: {dashes}{' '.join(str(error).split())}\n")
        return 2 if isinstance(error, OptionError | argparse.ArgumentError) else 1
    except RuntimeError as error:
        # An InterruptedRunError, whose module loads torch, has a code: a signal stopped training, after a checkpoint.
        code = getattr(error, "code", None)
        if not isinstance(code, int):
            raise
        sys.stderr.write(f"{error}\n")
        return code

"""`python -m hf_linear_attn` is the command `hf-linear-attn`."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m hf_linear_attn` is the command `hf-linear-attn`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

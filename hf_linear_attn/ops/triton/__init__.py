"""Fused GPU kernels for kernelized attention, in Triton: imported when first used, on a machine that has Triton.

This module holds the sizes that the kernels support, known without Triton.
"""

import os

from ..calls import KernelizedCall, WindowedCall
from ..formulas import PARTS

#: Largest number of features (padded to powers of two) and largest head size that fit into one block of a kernel, and
#: the largest number of features in pairs, both of which a projection makes at once.
MAX_FEATURES, MAX_PROJECTED_PAIRS = 512, 256
MAX_HEAD_DIM = 256

#: Environment variable that, set to 1 before Triton is imported, runs the kernels on the CPU, slowly: for tests.
INTERPRETER_VARIABLE = "TRITON_INTERPRET"


def interpreted() -> bool:
    """Return whether Triton interprets the kernels on the CPU."""
    return os.environ.get(INTERPRETER_VARIABLE, "0") == "1"


def power_of_two(number: int) -> int:
    """Return the next power of two, at least 16, the minimum of the tensor cores."""
    return max(1 << (number - 1).bit_length(), 16)


def padded_features(call: KernelizedCall | WindowedCall) -> int:
    """Return the number of columns that the kernels use for the features of a call."""
    head_dim = call.query.shape[3]
    return max(PARTS[fused.activation] * power_of_two(fused.width(head_dim)) for fused in call.fused or ())

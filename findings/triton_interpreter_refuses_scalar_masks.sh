#!/usr/bin/env bash
# From Triton 3.9.0 on the interpreter refuses a mask that a scalar condition is a part of; 3.8.0 takes it.
#
# triton 3.8.0 and 3.9.0 with TRITON_INTERPRET=1, torch 2.13.0. A mask (offsets < size) & (flag > 0), whose second
# part is the same for the whole block, stops with "mask has unsupported dtype" at the load, whether the scalar is an
# argument or a program's number, and in either order. With the condition spread over the block by tl.full the same
# kernel runs, and its result is that of 3.8.0. So tests of kernels that pass on a GPU can fail in the interpreter.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 TRITON_INTERPRET=1
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$work"
cat > kernel.py <<'PYTHON'
import sys

import torch
import triton
from triton import language as tl


@triton.jit
def copy(x, y, size, flag, way: tl.constexpr, block: tl.constexpr):
    offsets = tl.arange(0, block)
    if way == "scalar first":
        mask = (flag > 0) & (offsets < size)
    elif way == "scalar second":
        mask = (offsets < size) & (flag > 0)
    elif way == "program":
        mask = (offsets < size) & (tl.program_id(0) < 3)
    else:
        mask = (offsets < size) & (tl.full([block], flag, tl.int32) > 0)
    tl.store(y + offsets, tl.load(x + offsets, mask=mask, other=0.0), mask=mask)


results = []
for way in ("scalar first", "scalar second", "program", "spread by full"):
    y = torch.zeros(8)
    try:
        copy[(1,)](torch.ones(8), y, 5, 1, way=way, block=8)
        assert y.tolist() == [1.0] * 5 + [0.0] * 3
        result = "runs"
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        assert str(error) == "mask has unsupported dtype", error
        result = str(error)
    print(f"triton {triton.__version__}, {way}: {result}")
    results.append(result == "runs")
assert results == [triton.__version__ == "3.8.0"] * 3 + [True], "This has changed."
PYTHON
for version in 3.8.0 3.9.0; do
    "$work/venv/bin/pip" install --quiet "triton==$version"
    "$work/venv/bin/python" kernel.py
done

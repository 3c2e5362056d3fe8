"""The Triton backend: its kernels in the interpreter and through the compiler, and a machine that has no Triton.

No GPU is needed, and Triton only for the first two: `pip install triton` (PyTorch for CUDA brings it along).
"""

from __future__ import annotations

import sys
from importlib import metadata

import pytest
import torch

from hf_linear_attn.ops import backends
from hf_linear_attn.ops.triton import backend
from hf_linear_attn.ops.triton.backend import TritonBackend
from tests.ops.test_native import build, inputs, make_call
from tests.subprocesses import run_python

needs_triton = pytest.mark.skipif(
    not backend.installed(), reason="Triton is not installed; `pip install triton` runs its kernels on the CPU"
)
#: The interpreted tests in parts, by pytest's -k.
PARTS = ("output", "gradient", "state or nan", "not (output or gradient or state or nan)")


def run(*command: str, **environment: str) -> str:
    done = run_python("-m", *command, timeout=1800, PYTEST_ADDOPTS="", **environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@needs_triton
@pytest.mark.skipif(
    backend.installed() and metadata.version("triton") == "3.9.0",
    reason="The interpreter of Triton 3.9.0 refuses masks with a scalar condition, which its compiler takes",
)
@pytest.mark.parametrize("part", PARTS)
def test_the_kernels_in_the_interpreter(part):
    output = run("pytest", "tests/ops/triton_kernels.py", "-n", "0", "-m", "", "-k", part, TRITON_INTERPRET="1")
    assert " passed" in output or "100%" in output


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
@pytest.mark.parametrize("architecture", ["80", "90", "100"])
def test_the_kernels_through_the_compiler(architecture):
    output = run("tests.ops.triton_compiles", architecture, "16", "elu", "hedgehog", "t2r", "favor+", "vq")
    kernels = (
        "sum_tokens",
        "scan",
        "attend_bidirectional",
        "attend_causal",
        "backward_bidirectional",
        "backward_causal_keys",
        "step_window",
    )
    assert all(name in output for name in kernels)


def test_tensors_on_the_cpu_are_refused():
    call = make_call(build("elu", 2, 2, 9, 6), *inputs((1, 2, 2, 10)), False)
    assert TritonBackend().unsupported_reason(call) == "the tensors are on cpu"
    assert list(backends.list_backends()).index("native") < backends.list_backends().index("triton")
    with backends.use_backend("triton"), pytest.raises(NotImplementedError, match="on cpu"):
        backends.attend(call)


def test_a_machine_without_triton(monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda: False)
    monkeypatch.setattr(backend, "interpreted", lambda: True)
    call = make_call(build("elu", 2, 2, 9, 6), *inputs((1, 2, 2, 10)), False)
    assert "not installed" in TritonBackend().unsupported_reason(call)


def test_the_package_imports_no_triton():
    code = "import sys, hf_linear_attn; assert 'triton' not in sys.modules"
    assert run_python("-c", code).returncode == 0


def test_windows_are_refused(monkeypatch):
    from hf_linear_attn.ops.calls import WindowedCall

    monkeypatch.setattr(backend, "interpreted", lambda: True)
    call = make_call(build("elu", 2, 2, 9, 6), *inputs((1, 2, 2, 10)), False)
    windowed = WindowedCall(**vars(call), window=3, scaling=1.0, log_mix=torch.zeros(2))
    assert TritonBackend().unsupported_reason(windowed) == "windows are not fused"

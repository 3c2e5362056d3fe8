"""Choosing a backend, and what happens where the native kernels cannot be built."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.ops import backends
from hf_linear_attn.ops.native import backend, build
from tests.ops.test_native import REASON, inputs, make_call
from tests.ops.test_native import build as build_map

LIBRARY = None if REASON else build.library_path()[1]


@pytest.fixture
def call():
    return make_call(build_map("elu", 2, 2, 9, 6), *inputs((1, 2, 2, 10)), False)


def test_names_and_choice(call):
    assert {"native", "torch", "triton"} <= set(hla.list_backends())
    assert hla.get_backend() == "auto"
    with hla.use_backend("torch"):
        assert hla.get_backend() == "torch"
        assert backends.select_backend(call).name == "torch"
    assert hla.get_backend() == "auto"
    if REASON is None:
        assert backends.select_backend(call).name == "native"


def test_an_unknown_name_names_the_near_one():
    with pytest.raises(ValueError, match="Did you mean 'native'"):
        hla.set_backend("nativ")
    assert hla.get_backend() == "auto"


@pytest.mark.skipif(REASON is not None, reason=f"the native kernels cannot run here: {REASON}")
def test_a_named_backend_never_gives_way_in_silence(call):
    with hla.use_backend("native"), pytest.raises(NotImplementedError, match=r"'native' cannot.*float64"):
        backends.attend(call.replace(query=call.query.double(), key=call.key.double(), value=call.value.double()))


def test_a_third_partys_backend_is_requested_first(call, monkeypatch):
    class Doubling:
        name = "doubling"

        def unsupported_reason(self, call):
            return None if call.query.shape[2] == 10 else "it takes 10 tokens only"

        def run(self, call):
            out, state = backends.TorchBackend().run(call)
            return out * 2, state

    monkeypatch.setattr(backends, "_BACKENDS", dict(backends._BACKENDS))
    hla.register_backend(Doubling())
    with pytest.raises(ValueError, match="exists already"):
        hla.register_backend(Doubling())
    doubled, _ = backends.attend(call)
    with hla.use_backend("torch"):
        reference, _ = backends.attend(call)
    assert torch.equal(doubled, reference * 2)
    assert backends.select_backend(call.replace(query=call.query[:, :, :5])).name != "doubling"


@pytest.mark.slow
def test_the_environment_names_a_backend():
    code = "import hf_linear_attn as hla; print(hla.get_backend())"
    arguments = {**os.environ, backends.BACKEND_VARIABLE: "torch"}
    done = subprocess.run([sys.executable, "-c", code], env=arguments, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "torch"


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Kernels that were never built, with a cache of their own."""
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(build.INSTRUCTIONS_VARIABLE, raising=False)
    monkeypatch.setattr(build, "wheel_library", lambda name: tmp_path / f"kernels-{name}.so")
    for tensor in (build.library, backend.unavailable_reason):
        tensor.cache_clear()
    yield tmp_path / "cache"
    for tensor in (build.library, backend.unavailable_reason):
        tensor.cache_clear()


def test_without_a_compiler_torch_serves_after_one_line(call, fresh, monkeypatch, caplog):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert backends.select_backend(call).name == "torch"
        assert backends.select_backend(call).name == "torch"
    (line,) = [record.getMessage() for record in caplog.records if "native" in record.getMessage()]
    assert "no C++ compiler" in line
    assert "torch operations" in line
    with hla.use_backend("native"), pytest.raises(NotImplementedError, match=r"no C\+\+ compiler"):
        backends.attend(call)


def test_windows_uses_torch_after_one_line(call, fresh, monkeypatch, caplog):
    monkeypatch.setattr(build, "sys", SimpleNamespace(platform="win32"))
    with caplog.at_level(logging.WARNING):
        assert backends.select_backend(call).name == "torch"
        assert backends.select_backend(call).name == "torch"
    (line,) = [record.getMessage() for record in caplog.records if "native" in record.getMessage()]
    assert "not built on Windows" in line


@pytest.mark.skipif(REASON is not None, reason=f"the native kernels cannot run here: {REASON}")
def test_a_wheels_kernels_need_no_compiler(call, fresh, monkeypatch, tmp_path):
    """The best library that the processor can run is loaded; the content is that of this machine in every file."""
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    sets = build.INSTRUCTION_SETS["x86_64"]
    for name in sets:
        shutil.copy(LIBRARY, tmp_path / f"kernels-{name}.so")
    for name in sets:
        monkeypatch.setattr(build, "_processor", lambda name=name: f"flags : {sets[name][1]}")
        assert build.library_path() == (name, tmp_path / f"kernels-{name}.so")
    assert backends.select_backend(call).name == "native"
    monkeypatch.setenv(build.INSTRUCTIONS_VARIABLE, "native")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.library_path()
    (tmp_path / "kernels-avx2.so").unlink()
    monkeypatch.delenv(build.INSTRUCTIONS_VARIABLE)
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.library_path()


def test_instructions_by_name(call, fresh, monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_processor", lambda: "flags : sse2")
    monkeypatch.setenv(build.INSTRUCTIONS_VARIABLE, "avx512")
    assert backends.select_backend(call).name == "torch"
    assert "the processor lacks avx2, avx512bw" in backend.unavailable_reason()
    monkeypatch.setenv(build.INSTRUCTIONS_VARIABLE, "avx3")
    with pytest.raises(ValueError, match="is 'avx3'; on this machine it can be amx, avx512, avx2, native"):
        build.library_path()


def test_a_compiler_that_fails_is_named(call, fresh, monkeypatch, tmp_path):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'out of order' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert backends.select_backend(call).name == "torch"
    assert "out of order" in backend.unavailable_reason()
    assert not list(fresh.glob("*.so"))


def test_a_cache_that_others_can_write_is_not_trusted(call, fresh):
    fresh.mkdir()
    fresh.chmod(fresh.stat().st_mode | stat.S_IWOTH)
    assert backends.select_backend(call).name == "torch"
    assert "written by others" in backend.unavailable_reason()


def test_a_cache_that_cannot_be_made(call, fresh, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    assert backends.select_backend(call).name == "torch"
    assert "cannot be created" in backend.unavailable_reason()


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=f"the native kernels cannot run here: {REASON}")
def test_built_once_then_read(call, fresh, monkeypatch):
    assert backends.select_backend(call).name == "native"
    (made,) = fresh.glob("*.so")
    when = made.stat().st_mtime_ns
    for tensor in (build.library, backend.unavailable_reason):
        tensor.cache_clear()
    monkeypatch.setattr(build, "compile_kernels", lambda *arguments: pytest.fail("compiled twice"))
    assert backends.select_backend(call).name == "native"
    assert made.stat().st_mtime_ns == when

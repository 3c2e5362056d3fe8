"""A pytest plugin: the native kernels are those of `$HLA_DRIVER`, a command that runs driver.cpp (see `run`)."""

from __future__ import annotations

import ctypes
import os
import shlex
import struct
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hf_linear_attn.ops.native import backend, binding, build

#: In the order of the driver.
FUNCTIONS = (
    "lanes",
    "call_bytes",
    "bidirectional",
    "causal",
    "bidirectional_backward",
    "causal_backward",
    "windowed",
    "windowed_step",
    "windowed_backward",
)


def pointer_offsets(structure: type[ctypes.Structure], base: int = 0) -> Iterator[int]:
    """Yield the offsets of the pointers in a structure."""
    for name, kind, *_ in structure._fields_:
        offset = base + getattr(structure, name).offset
        if issubclass(kind, ctypes.Structure):
            yield from pointer_offsets(kind, offset)
        elif kind is ctypes.c_void_p:
            yield offset


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


class EmulatedKernels:
    """The functions of the kernels' library, each of which runs in the driver."""

    def __init__(self, command: str) -> None:
        self.driver = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.calls = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = FUNCTIONS.index(name.removeprefix("hla_"))
        return lambda *argument: self.call_with_structure(function, *(reference._obj for reference in argument))

    def call_with_structure(self, function: int, argument: Any = None) -> int:
        """Call a function with the structure that it takes and all memory of the tensors that the structure names."""
        if argument is None:
            return self.call(function, b"", {}, [])
        storages = [tensor.untyped_storage() for tensor in tensors_in(vars(argument))]
        content = bytes(argument)
        offsets = [at for at in pointer_offsets(type(argument)) if content[at : at + 8] != bytes(8)]
        return self.call(function, content, {one.data_ptr(): one.nbytes() for one in storages if one.nbytes()}, offsets)

    def call(self, function: int, argument: bytes, regions: dict[int, int], offsets: list[int]) -> int:
        """Call a function of the driver and copy what it wrote."""
        source, target = self.driver.stdin, self.driver.stdout
        assert source is not None
        assert target is not None
        source.write(struct.pack("4q", function, len(argument), len(regions), len(offsets)) + argument)
        source.write(b"".join(struct.pack("2Q", *region) for region in regions.items()))
        source.write(struct.pack(f"{len(offsets)}q", *offsets))
        for address, count in regions.items():
            source.write(ctypes.string_at(address, count))
        source.flush()
        answer = target.read(8)
        if len(answer) < 8:
            raise RuntimeError(f"the driver stopped in {FUNCTIONS[function]} with status {self.driver.wait()}")
        for address, count in regions.items():
            ctypes.memmove(address, target.read(count), count)
        self.calls += function > FUNCTIONS.index("call_bytes")
        return int(struct.unpack("q", answer)[0])


KERNELS = EmulatedKernels(os.environ["HLA_DRIVER"])
for module in (build, binding, backend):
    module.library = lambda: KERNELS  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tell how many calls ran in the driver."""
    terminalreporter.write_line(
        f"{KERNELS.calls} calls of kernels with {KERNELS.hla_lanes()} lanes by {KERNELS.driver.args}"
    )

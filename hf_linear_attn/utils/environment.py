"""Versions and hardware, as reports state them, and values in a form that JSON can hold."""

import math
import os
import platform
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..version import __version__

#: Packages whose versions `package_versions` reports beside our own.
REPORTED_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "peft", "datasets", "numpy", "triton")


def utc_now() -> str:
    """Return the time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def json_safe(value: Any) -> Any:
    """Return nested data with lists for tuples, strings for keys, and None for NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def cpu_name() -> str:
    """Return the processor's name as the operating system gives it."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", path.read_text(encoding="utf-8")) if path.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def has_slow_bfloat16(device: str) -> bool:
    """Return whether products in bfloat16 take many times as long as in float32: on x86 without AVX-512."""
    import torch

    old = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    return device == "cpu" and old and platform.machine() in ("x86_64", "AMD64")


def environment(device: Any = None) -> dict[str, Any]:
    """Return versions and hardware, to be stored beside every measurement, for a torch device (None: the CPU)."""
    import torch
    import transformers

    on_gpu = device is not None and torch.device(device).type == "cuda"
    return {
        "versions": {
            "hf_linear_attn": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "hardware": {
            "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
            "cpu": cpu_name(),
            "logical_cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average_at_start": None if sys.platform == "win32" else os.getloadavg()[0],
            "platform": f"{platform.system()} {platform.machine()}",
        },
    }


def package_versions() -> dict[str, str]:
    """Return the versions and hardware that a bug report needs, as text."""
    import torch

    report = {"hf-linear-attn": __version__, "python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        try:
            report[package] = version(package)
        except PackageNotFoundError:
            report[package] = "not installed"
    devices = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return {
        **report,
        "platform": platform.platform(),
        "cpu": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "cuda": f"{torch.version.cuda}: {devices}" if devices else "not available",
    }

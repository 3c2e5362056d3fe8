"""`hf-linear-attn env`."""

import sys
from dataclasses import dataclass

from .verb import Verb


@dataclass(frozen=True)
class EnvConfig:
    """`env` has no options."""


def run(config: EnvConfig) -> None:
    """Print the versions and the hardware that a bug report needs."""
    from ..ops.native.backend import unavailable_reason
    from ..ops.native.build import library_path
    from ..utils.environment import package_versions

    reason = unavailable_reason()
    kernels = f"none: {reason}" if reason is not None else "native, {}: {}".format(*library_path())
    versions = {**package_versions(), "kernels": kernels}
    width = max(map(len, versions))
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in versions.items()))


VERB = Verb(
    "show versions and hardware, for a bug report",
    EnvConfig,
    run,
    (),
)

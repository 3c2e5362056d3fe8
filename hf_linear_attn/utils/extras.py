"""Optional dependencies."""

from __future__ import annotations

import importlib


def require_packages(*packages: str, extra: str, purpose: str) -> None:
    """Import optional packages, or say how to install them.

    Args:
        packages: Names of the modules to import.
        extra: The extra of this package that installs them.
        purpose: What needs them, as the subject of the message: `"The demo"`.

    Raises:
        ImportError: One of the packages is not installed.
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ImportError(
                f"{purpose} needs {error.name or package}, which is not installed: "
                f"pip install 'hf-linear-attn[{extra}]'"
            ) from error

"""Optional dependencies."""

import importlib


def require_packages(*packages: str, extra: str, purpose: str) -> None:
    """Raise an ImportError that says which `extra` of this package installs them if optional packages are missing.

    `purpose` is what needs them, as the subject of the message: `"The demo"`.
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            missing = f"{error.name or package}, which is not installed"
            raise ImportError(f"{purpose} needs {missing}: pip install 'hf-linear-attn[{extra}]'") from error

from typing import Any

from .bench import Bench


def run_decode(bench: Bench) -> list[dict[str, Any]]:
    return []

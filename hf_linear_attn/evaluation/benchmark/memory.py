from typing import Any

from .bench import Bench


def run_memory(bench: Bench) -> list[dict[str, Any]]:
    return []

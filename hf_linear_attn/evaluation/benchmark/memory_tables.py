from typing import Any

from .tables import Table


def memory_tables(report: dict[str, Any]) -> list[Table]:
    return []

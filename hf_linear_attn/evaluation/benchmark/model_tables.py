from typing import Any

from .tables import Table


def model_tables(report: dict[str, Any]) -> list[Table]:
    return []

"""What a fault test records for the table: group, what goes wrong, what is expected, and what was observed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.faults.checks import Observed


@pytest.fixture
def observed(request: pytest.FixtureRequest, tmp_path: Path, record_property: Any) -> Observed:
    """Record what happened, in one line; every fault test calls it at its end."""
    marker = request.node.get_closest_marker("fault")
    case = f": {request.node.callspec.id}" if hasattr(request.node, "callspec") else ""
    record_property("group", marker.kwargs["group"])
    record_property("what", marker.kwargs["what"] + case)
    record_property("expected", marker.kwargs["expected"])

    def record(text: str) -> None:
        text = text.replace(f"{tmp_path}/", "").replace(str(tmp_path), ".")
        text = re.sub(r"\.[0-9a-f]{8}\.part", ".….part", text)
        record_property("observed", " ".join(text.split())[:400])

    return record

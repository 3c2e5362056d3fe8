"""Every fault that is done within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import data, disks, files, processes  # noqa: F401  (the faults add themselves)
from tests.faults.trying import FAULTS, Fault, NotPossibleHereError


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.quick], ids=lambda fault: fault.run.__name__)
def test_fault(fault: Fault, tmp_path: Path) -> None:
    try:
        assert fault.run(tmp_path)
    except NotPossibleHereError as reason:
        pytest.skip(str(reason))

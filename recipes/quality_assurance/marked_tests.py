"""Tests of one marker, run by pytest in a process of its own, and what they recorded."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_marked_tests(*arguments: str) -> list[dict[str, Any]]:
    """Run pytest from the root of the repository.

    Args:
        arguments: Of pytest, such as `-m fault`.

    Returns:
        One row a test: `name`, `outcome` ("passed", "failed" or "skipped"), `message` unless it passed, `seconds`, and
        `properties`: name -> values, all that the test recorded by `record_property`.

    Raises:
        RuntimeError: pytest ended without a report.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", "-n", "0", f"--junitxml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if not report.exists():
            raise RuntimeError(f"`{' '.join(command)}` ended with exit code {code} and wrote no report.")
        cases = list(ET.parse(report).iter("testcase"))
    return [_row(case) for case in cases]


def _row(case: ET.Element) -> dict[str, Any]:
    failure = next((part for tag in ("failure", "error", "skipped") if (part := case.find(tag)) is not None), None)
    outcome = "passed" if failure is None else "skipped" if failure.tag == "skipped" else "failed"
    properties: defaultdict[str, list[str]] = defaultdict(list)
    for item in case.iter("property"):
        properties[item.get("name", "")].append(item.get("value", ""))
    return {
        "name": case.get("name", ""),
        "outcome": outcome,
        "message": "" if failure is None else failure.get("message", ""),
        "seconds": float(case.get("time", 0)),
        "properties": properties,
    }

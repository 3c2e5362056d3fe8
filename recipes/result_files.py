"""Files of results."""

import gzip
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "recipes" / "results"


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON file, or one that gzip has compressed, by its path or its name in recipes/results."""
    content = (RESULTS / path).read_bytes()
    return json.loads(gzip.decompress(content) if str(path).endswith(".gz") else content)

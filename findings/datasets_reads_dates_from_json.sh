#!/usr/bin/env bash
# load_dataset("json") turns a column of texts into timestamps where each text is a date, and whole numbers into floats.
#
# datasets 5.2.0, pyarrow 26.0.1. The types of a column are guessed from its values. Quoted texts that all look like ISO
# dates arrive as datetime objects, one other text keeps them texts, and the same column in a csv stays text. Asked for
# strings by features=, the reader writes the timestamps out: "2024-05-01" comes back as "2024-05-01 00:00:00". One number
# beyond 64 bits turns its whole column into floats: two different identifiers become equal. No error, no warning.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 HF_HOME=$work/cache
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from pathlib import Path

from datasets import Features, Value, disable_progress_bars, load_dataset

disable_progress_bars()
DATES = ["2024-05-01", "2024-05-02T10:00:00Z"]


def read(kind, column, values, **options):
    if kind == "json":
        text = "".join(json.dumps({column: value}) + "\n" for value in values)
    else:
        text = "".join(f"{value}\n" for value in [column, *values])
    path = Path(f"{abs(hash((kind, *values)))}.{kind}")
    path.write_text(text)
    rows = load_dataset(kind, data_files=str(path), split="train", **options)
    print(f"{kind}, {json.dumps(values)}: {rows.features[column].dtype}, {rows[column][:]}")
    return rows[column][:]


dates = read("json", "text", DATES)
assert [type(value).__name__ for value in dates] == ["datetime", "datetime"], "Dates in json stay texts now."
assert read("json", "text", [*DATES, "plain"]) == [*DATES, "plain"]
assert read("csv", "text", DATES) == DATES
written = read("json", "text", DATES, features=Features({"text": Value("string")}))
assert written == ["2024-05-01 00:00:00", "2024-05-02 10:00:00"], "Features of strings keep the texts now."

identifiers = [9007199254740993, 9007199254740992, 2**64 - 1]
numbers = read("json", "id", identifiers)
assert numbers[0] == numbers[1] and isinstance(numbers[0], float), "Numbers beyond 64 bits keep the others whole now."
PYTHON

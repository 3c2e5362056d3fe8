#!/usr/bin/env bash
# load_dataset("csv", delimiter="\t") joins rows of a GLUE-style tsv at a quote mark, and empties words such as NA.
#
# datasets 5.2.0, pandas 3.1.1. In such files quote marks are text. By default a field that begins with one goes on to
# the next quote mark, over the ends of rows, so 3 of 8 rows disappear in another one; quotes around a word are dropped;
# and a text that reads NA, null or nan becomes None. No error, no warning. quoting=csv.QUOTE_NONE and
# keep_default_na=False keep every row and every text.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 HF_HOME=$work/cache
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 pandas==3.1.1
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import csv
from pathlib import Path

from datasets import disable_progress_bars, load_dataset

disable_progress_bars()
rows = [
    ("1", 'He said "yes" twice.'),
    ("0", '"An open quote begins this sentence.'),
    ("1", "plain"),
    ("0", "plain too"),
    ("1", 'this one ends with a quote"'),
    ("0", '"Quoted" word first'),
    ("1", "NA"),
    ("0", "last"),
]
Path("train.tsv").write_text("label\tsentence\n" + "".join(f"{label}\t{text}\n" for label, text in rows))
texts = [text for _, text in rows]


def read(**options):
    return list(load_dataset("csv", data_files="train.tsv", delimiter="\t", split="train", **options)["sentence"])


by_default = read()
exactly = read(quoting=csv.QUOTE_NONE, keep_default_na=False)
print(f"by default {len(by_default)} of {len(rows)} rows: {by_default}")
assert exactly == texts
joined = "\n".join(['An open quote begins this sentence.', "1\tplain", "0\tplain too", "1\tthis one ends with a quote"])
assert by_default == [texts[0], joined, "Quoted word first", None, "last"], "Another default reads the file now."
PYTHON

"""Transformers' own common tests, on patched models and on unpatched ones as the control.

    python -m recipes.quality_assurance.transformers_tests

Called from the root of the repository. Downloads the sdist of the installed Transformers (and `parameterized`, which
its tests import) with pip into a temporary folder, and runs its mixins over tiny BERT, GPT-2 and Llama models for the
main mechanisms; some ten minutes on one core. Writes recipes/results/transformers-tests.json and .md. Expect: no
failure without an explanation (exit code 1 otherwise).

The sdist carries the tests at the top of `tests/`, with the mixins of models and of training, and none of its folders:
the mixins of generation and of export are missing there. `--source` takes an unpacked source archive of the same
version (the repository's tag), which has them: then they run too.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from hf_linear_attn.study.tables import to_markdown
from hf_linear_attn.utils.environment import environment, utc_now
from hf_linear_attn.utils.files import atomic_write
from recipes.quality_assurance.marked_tests import run_tests
from recipes.result_files import RESULTS, ROOT

CASES = ROOT / "tests" / "peers" / "transformers_models.py"
SUITE = "transformers_suite"
CONTROL = "exact"
BOTH = ("elu", "favor+", "hedgehog", "window")
MECHANISMS = {"bert": (*BOTH, "linformer"), "gpt2": (*BOTH, "gla"), "llama": (*BOTH, "gla")}
#: What the common tests import and an sdist lacks: module -> class, which is then an empty one.
MISSING = {"generation.test_utils": "GenerationTesterMixin", "exporters.test_export": "ExportTesterMixin"}

#: Why a test must fail on a patched model: a part of its name, a part of the message, the reason.
EXPLAINED = (
    (
        "test_attention_outputs",
        "`output_attentions` attribute is not supported",
        "sets config.output_attentions, which Transformers allows for 'eager' alone (for sdpa neither); the argument "
        "output_attentions=True works, and this project's tests cover it",
    ),
    (
        "test_retain_grad_hidden_states_attentions",
        "unexpectedly None",
        "wants a gradient at the attention weights; linear attention does not compute its output from weights: those "
        "that output_attentions shows are worked out beside it",
    ),
    (
        "test_can_set_attention_dynamically",
        "",
        "switches to eager softmax attention with set_attn_implementation, which a patched model refuses: it would "
        "silently undo the patch",
    ),
    (
        "test_sdpa_can_dispatch_non_composite_models",
        "",
        "wants the config to name sdpa; a patched model's names hf_linear_attn",
    ),
    (
        "test_load_with_mismatched_shapes",
        "has no linear attention",
        "loads the checkpoint with AutoModel and without trust_remote_code, and runs it: such a model refuses to run",
    ),
    (
        "test_base_model_prefix_loads_base_weights",
        "do not match the linear attention",
        "saves a plain base model under the config of a patched one: a checkpoint without the learned parts that its "
        "config names, which is refused",
    ),
    (
        "test_init_weights_can_init_buffers",
        "not properly handled in `_init_weights()`",
        "wants _init_weights to fill every buffer anew; random features are drawn from the seed in the config when a "
        "model is patched, and a checkpoint without them is refused, so that they are never left unset",
    ),
    (
        "test_model_weights_reload_no_missing_tied_weights",
        "do not match the linear attention",
        "deletes every weight from the file and loads it; missing weights of linear attention are refused, not "
        "reported",
    ),
    (
        "_generate_dict_outputs_use_cache",
        "output_attentions needs all keys",
        "asks for the weights while decoding from a state, which has summed the keys up: refused with the remedy "
        "(use_cache=False); a variant of the test without a cache passes",
    ),
    (
        "test_generate_compilation_all_outputs",
        "output_attentions needs all keys",
        "asks for the weights while decoding from a state, which has summed the keys up: refused with the remedy",
    ),
    (
        "test_custom_4d_attention_mask",
        "A 4D attention mask cannot be used with a cache",
        "gives a mask made by hand together with a cache; a recurrent state cannot honour it: refused with the remedy",
    ),
    (
        "static_cache",
        "torch.Size([0])",
        "wants keys and values of a fixed size in the cache; a layer of linear attention holds a state instead",
    ),
    (
        "test_past_key_values_format",
        "torch.Size([0])",
        "wants keys and values in the cache; a layer of linear attention holds a state instead",
    ),
    (
        "test_inherits_generation_mixin",
        "",
        "looks for GenerationMixin among the direct bases; a patched model's class has it through its base class",
    ),
    (
        "test_generate_compile_model_forward_fullgraph",
        "False is not true",
        "wants generate() to compile itself over a static cache; a cache of states is no static one, and generate() "
        "runs as it is",
    ),
)


# --------------------------------------------------------------------------------------------------------------------
# The suite


def fetched(folder: Path) -> Path:
    """The unpacked sdist of the installed version, downloaded by pip from the index that it is configured for."""
    requirement = f"transformers=={version('transformers')}"
    pip = [sys.executable, "-m", "pip", "--quiet"]
    command = [*pip, "download", "--no-deps", "--no-binary", "transformers", requirement, "--dest", str(folder)]
    subprocess.run(command, check=True)
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def arranged(source: Path, folder: Path) -> list[str]:
    """Copy the tests into `folder` as a package of their own name; returns the mixins that are empty stand-ins."""
    target = folder / SUITE
    shutil.copytree(source / "tests", target, ignore=shutil.ignore_patterns("models", "fixtures"))
    (target / "__init__.py").touch()
    absent = []
    for module, name in MISSING.items():
        path = target / Path(*module.split(".")).with_suffix(".py")
        if path.is_file():
            continue
        absent.append(name)
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(f"class {name}:\n    pass\n", encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q\n", encoding="utf-8")
    return absent


def run(family: str, attention: str, folder: Path) -> list[dict[str, str]]:
    """One process: every test with its outcome (`passed`, `skipped`, `failed`) and the first line of its reason."""
    names = {"SUITE_FAMILY": family, "SUITE_ATTENTION": attention}
    names |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    names["PYTHONPATH"] = os.pathsep.join(str(path) for path in (ROOT, folder, folder / "site"))
    options = ["-c", str(folder / "pytest.ini"), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-W", "ignore"]
    by_test: dict[str, dict[str, str]] = {}
    for case in run_tests(str(CASES), *options, "--tb=no", **names):
        text = " ".join(case["message"].replace(str(folder), "").split())
        text = re.sub(r"'/tmp/\S*'", "'a folder'", re.sub(r"<class '[\w.]*\.(\w+)'>", r"\1", text))
        row = {"test": case["name"], "outcome": case["outcome"], "reason": text[:300]}
        # A test with subtests has an entry for each that failed or was skipped: the worst one counts.
        by_test[row["test"]] = max(by_test.get(row["test"], row), row, key=lambda one: RANK[one["outcome"]])
    return sorted(by_test.values(), key=lambda row: row["test"])


RANK = {"passed": 0, "skipped": 1, "failed": 2}


# --------------------------------------------------------------------------------------------------------------------
# What the outcomes say


def classified(row: dict[str, str], control: dict[str, dict[str, str]]) -> dict[str, str]:
    """The row with a verdict: `fails unpatched too`, `explained` or `unexplained` for what is not as in the control."""
    before = control.get(row["test"], {"outcome": "not there"})["outcome"]
    if row["outcome"] == "passed" or (row["outcome"] == "skipped" and before == "skipped"):
        return row
    if row["outcome"] == "failed" and before == "failed":
        return {**row, "verdict": "fails unpatched too"}
    for test, message, why in EXPLAINED:
        if test in row["test"] and message in row["reason"]:
            return {**row, "verdict": "explained", "why": why}
    return {**row, "verdict": "unexplained", "why": f"unpatched: {before}"}


OUTCOMES = ("fails unpatched too", "explained", "unexplained")


def counts(rows: list[dict[str, str]]) -> dict[str, int]:
    by_kind = {kind: sum(row.get("verdict") == kind for row in rows) for kind in OUTCOMES}
    return {kind: sum(row["outcome"] == kind for row in rows) for kind in RANK} | by_kind


def page(report: dict[str, Any]) -> str:
    """Return numbers by run, and every failure with its reason."""
    rows: list[dict[str, str]] = []
    for run in report["runs"]:
        where = {"family": run["family"], "attention": run["attention"]}
        rows += [{**row, **where} for row in run["tests"] if "verdict" in row]
    tests = pd.DataFrame(rows).fillna("")
    groups = tests.groupby(["test", "reason", "verdict", "why"])[["family", "attention"]]
    failed = groups.apply(_where).reset_index(name="where")
    failed["why"] = failed["why"].where(failed["why"] != "", failed["verdict"])
    failed = failed.assign(test="`" + failed["test"] + "`", reason=failed["reason"].str.slice(stop=140))
    failed = failed[["test", "where", "reason", "why"]].rename(columns={"reason": "what it says"})
    parts = [
        "# Transformers' common tests on patched models",
        "By `python -m recipes.quality_assurance.transformers_tests`: the tests of transformers "
        f"{report['transformers']} ({report['source']}), over tiny models of five classes for each family. `exact` is "
        "the control: the same tests on models that are not patched.",
        _numbers(report["runs"]),
        "## Not as in the control",
        to_markdown(failed, text_columns=None),
    ]
    return "\n\n".join(parts) + "\n"


def _numbers(runs: list[dict[str, Any]]) -> str:
    rows = ({"family": run["family"], "attention": f"`{run['attention']}`", **run["counts"]} for run in runs)
    titles = {OUTCOMES[0]: "of these unpatched too", OUTCOMES[1]: "explained below"}
    return to_markdown(pd.DataFrame(rows).rename(columns=titles), text_columns=2)


def _where(runs: pd.DataFrame) -> str:
    families = runs.groupby("family", sort=False)["attention"].agg(list)
    return "; ".join(
        f"{family}: {'all' if set(MECHANISMS[family]) <= set(names) else ', '.join(names)}"
        for family, names in families.items()
    )


# --------------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="unpacked source archive of Transformers (default: its sdist)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(argv)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        site = ["install", "--no-deps", "--target", str(folder / "site"), "parameterized"]
        subprocess.run([sys.executable, "-m", "pip", "--quiet", *site], check=True)
        absent = arranged(options.source or fetched(folder), folder)
        for family, mechanisms in MECHANISMS.items():
            control: dict[str, dict[str, str]] = {}
            for attention in (CONTROL, *mechanisms):
                rows = run(family, attention, folder)
                control = control or {row["test"]: row for row in rows}
                rows = [classified(row, control) for row in rows]
                listed = [row for row in rows if row["outcome"] != "passed"]
                runs.append({"family": family, "attention": attention, "counts": counts(rows), "tests": listed})
                sys.stderr.write(f"{family} {attention}: {counts(rows)}\n")
    source = "its sdist" if options.source is None else "a source archive"
    source += f", which lacks {' and '.join(absent)}: nothing of these is run" if absent else ""
    report = {"format_version": 1, "created": utc_now(), "transformers": version("transformers"), "source": source}
    report |= {"environment": environment(), "runs": runs}
    atomic_write(options.out / "transformers-tests.json", packed(report))
    atomic_write(options.out / "transformers-tests.md", page(report))
    return 1 if any(entry["counts"]["unexplained"] for entry in runs) else 0


def packed(report: dict[str, Any]) -> str:
    """Return JSON with one test that did not pass a line."""
    text = json.dumps(report, ensure_ascii=False, indent=1)
    return re.sub(r"\{\n\s+\"test\"[^}]*\}", lambda match: " ".join(match[0].split()), text) + "\n"


if __name__ == "__main__":
    sys.exit(main())

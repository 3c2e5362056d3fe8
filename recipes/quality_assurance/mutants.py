"""Mutation testing of hf_linear_attn/ops and hf_linear_attn/feature_maps with mutmut, and what survived.

    pip install mutmut==3.8.1
    python -m recipes.quality_assurance.mutants               # a sample, some twenty minutes on one core
    python -m recipes.quality_assurance.mutants --per-file 0  # every mutant, many hours

Called from the root of the repository. mutmut makes copies of functions with one change each (`<` to `<=`, 1 to 2, an
argument left out, a string altered) and runs the tests that reach the function: a mutant that no test notices survives.
Of every file a sample is drawn, the same each time. Writes recipes/results/mutants.json and .md. Expect: no survivor
without an explanation (exit code 1 otherwise).

Not mutated: `ops/native` and `ops/triton`, which drive compiled kernels (minutes for each mutant; their tests compare
every kernel with the definitions), what builds, checks and chooses them, and what mutmut leaves alone: constants of
modules, decorated functions and decorators.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from hf_linear_attn.utils.environment import environment, utc_now
from hf_linear_attn.utils.files import atomic_write, write_json
from recipes.tables import RESULTS, ROOT, commit, to_markdown

PACKAGE = "hf_linear_attn"
PER_FILE = 10
SEED = 0
#: A mutant gets so many seconds, and so many times what its tests take unchanged.
TIMEOUT, MULTIPLIER = 30, 5
#: Tests that take long and whose statements the others make as well; the last one counts functions.
SLOW = "not gradcheck and not compil and not unbiased and not two_thousand and not every_definition_is_compared"
#: See above for why.
LEFT_OUT = {"ops/__init__.py", "ops/backends.py", "ops/check.py", "ops/fla_backend.py", "ops/flex.py"}

#: Tests that should notice a change in a file: those of a group by its files, given as patterns.
GROUPS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("ops/common.py", "ops/kernelized.py", "ops/calls.py", "ops/formulas.py", "ops/kernel_inputs.py", "ops/ranks.py"): (
        *(
            "tests/ops/test_kernelized.py",
            "tests/feature_maps/test_definitions.py",
            "tests/mechanisms/test_contract.py",
        ),
        *("tests/ops/test_native.py", "tests/ops/test_native_windowed.py", "tests/feature_maps/test_maps.py"),
    ),
    ("ops/windowed.py", "ops/sinks.py"): (
        *("tests/ops/test_windowed.py", "tests/ops/test_windowed_maps.py", "tests/mechanisms/test_scatterbrain.py"),
        "tests/mechanisms/test_window_sinks.py",
    ),
    ("ops/gated.py", "ops/gated_delta.py"): (
        *("tests/ops/test_gated.py", "tests/ops/test_gated_delta.py", "tests/mechanisms/test_gla.py"),
        *("tests/mechanisms/test_gated_delta.py", "tests/mechanisms/test_rfa.py"),
    ),
    ("ops/efficient.py", "ops/linformer.py", "ops/luna.py", "ops/nystrom.py"): (
        *("tests/ops/test_linformer.py", "tests/mechanisms/test_efficient.py", "tests/mechanisms/test_luna.py"),
        *("tests/mechanisms/test_linformer.py", "tests/mechanisms/test_nystrom.py"),
    ),
    ("ops/int8.py", "ops/prepared.py"): ("tests/ops/test_int8.py", "tests/ops/test_prepared.py"),
    ("ops/parallel.py",): ("tests/integration/test_parallel.py",),
    ("feature_maps/*.py",): ("tests/feature_maps", "tests/ops/test_native.py"),
}

#: Why a mutant survives: a part of the function's name, a part of the changed lines, the reason.
EXPLAINED: tuple[tuple[str, str, str], ...] = (
    ("", 'float("-INF")', "the same number: float() reads either case"),
    ("naive_feature_maps.taylor_weights", "BHID,BHJD->BHIJ", "the same sum: the letters of einsum are names"),
    ("naive_scatterbrain.scatterbrain_attention", "transpose(-1, +2)", "axis 2 of four is axis -2"),
    (
        "windowed.dense_windowed_weights",
        "query_features, None",
        "the place of the first token is for maps with positions, which windows refuse",
    ),
    (
        "RandomFeatureOptions.draw",
        "- LAYER_SEED_STRIDE",
        "other rows of the same kind; which layer draws which rows is not promised, and they are saved with the model",
    ),
    (
        "FavorPlusFeatureMap._rows",
        "and False else self.num_features",
        "noticed: the process dies, as a kernel writes beyond a tensor; since then kernels refuse such a formula",
    ),
    (
        "WindowedCall.needs_grad",
        "_needs_grad(self, )",
        "decides over a gradient of the mixture alone through a carried state; noticed since, by a test of just that",
    ),
)


def tracked(*folders: str) -> list[str]:
    """Return the files under version control."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.split()


def files_of(patterns: tuple[str, ...]) -> list[str]:
    """Return the files of the package that fit one of the patterns."""
    files = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in (ROOT / PACKAGE).glob(pattern)}
    return sorted(files & set(tracked(PACKAGE)))


def check_groups() -> None:
    """Raise a ValueError where a file belongs to no group."""
    left_out = {f"{PACKAGE}/{name}" for name in LEFT_OUT}
    rest = set(files_of(("ops/*.py", "feature_maps/*.py"))) - left_out - {*files_of(sum(GROUPS, ()))}
    if rest:
        raise ValueError(f"No group has {', '.join(sorted(rest))}: add it, with tests, or leave it out.")


# --------------------------------------------------------------------------------------------------------------------
# mutmut


def prepare(folder: Path, files: list[str], tests: tuple[str, ...]) -> None:
    """Copy the package and its tests, with the settings of mutmut beside them."""
    for name in tracked(PACKAGE, "tests", "recipes", "pyproject.toml"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    settings = {
        "source_paths": [PACKAGE],
        "only_mutate": files,
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": ["-k", SLOW, "-p", "no:cacheprovider"],
        "timeout_constant": [TIMEOUT],
        "timeout_multiplier": [MULTIPLIER],
        "track_dependencies": ["false"],
        # Workers come of a process that has run nothing: threads of native kernels do not survive a fork.
        "use_setproctitle": ["false"],
        "process_isolation": ["forkserver"],
    }
    lines = ["[mutmut]", *(f"{name} =\n    " + "\n    ".join(map(str, values)) for name, values in settings.items())]
    (folder / "setup.cfg").write_text("\n".join(lines) + "\n", encoding="utf-8")


def mutants_of(folder: Path, files: list[str]) -> dict[str, list[str]]:
    """Return every mutant by file. mutmut has no command that lists them without running the tests."""
    code = (
        "import json, sys\nfrom pathlib import Path\n"
        "from mutmut.mutation.file_mutation import mutate_file_contents\n"
        "from mutmut.utils.format_utils import get_mutant_name\n"
        "print(json.dumps({name: [get_mutant_name(Path(name), mutant) for mutant in\n"
        "    mutate_file_contents(name, Path(name).read_text()).mutant_names] for name in sys.argv[1:]}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *files], cwd=folder, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def mutmut(folder: Path, *arguments: str) -> str:
    """Run mutmut in a folder and return what it prints."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # The folder comes first: the mutated package must be found before this one.
    inherited = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
    environ["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in inherited if path != ".")
    command = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"mutmut {arguments[0]} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def statuses(folder: Path, file: str) -> dict[str, str]:
    """Return mutant -> `killed`, `survived`, `timeout`, `no tests`, … for what has been run."""
    from mutmut.stats import status_by_exit_code

    path = folder / "mutants" / (file + ".meta")
    exit_codes = json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
    return {name: status_by_exit_code[code] for name, code in exit_codes.items() if code is not None}


def survivor(folder: Path, name: str, status: str) -> dict[str, str]:
    """Return the function of a mutant, the lines that it removes and adds, and why it survives, if that is known."""
    lines = mutmut(folder, "show", name).splitlines()
    before, after = (
        " ".join(line[1:].strip() for line in lines if line.startswith(sign) and not line.startswith(3 * sign))
        for sign in "-+"
    )
    function = re.sub(r"__mutmut_\d+$", "", name.removeprefix(PACKAGE + "."))
    function = re.sub(r"xǁ(\w+)ǁ", r"\1.", function).replace(".x_", ".")
    why = next((reason for part, change, reason in EXPLAINED if part in function and change in after), "")
    return {"mutant": name, "function": function, "status": status, "before": before, "after": after, "why": why}


def run_group(files: list[str], tests: tuple[str, ...], per_file: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each file: how many mutants there are, were tried, were killed, and those that were not."""
    prepare(folder, files, tests)
    drawn: dict[str, list[str]] = {}
    names = mutants_of(folder, files)
    for file, every in names.items():
        count = min(per_file or len(every), len(every))
        drawn[file] = sorted(random.Random(f"{SEED} {file}").sample(every, count), key=every.index)
    mutmut(folder, "run", "--max-children", "1", *(name for chosen in drawn.values() for name in chosen))
    rows = []
    for file, chosen in drawn.items():
        tried = {name: status for name, status in statuses(folder, file).items() if name in chosen}
        counts = {status: list(tried.values()).count(status) for status in ("killed", "timeout")}
        left = [survivor(folder, name, status) for name, status in tried.items() if status not in counts]
        rows.append({"file": file, "mutants": len(names[file]), "tried": len(tried), **counts, "survivors": left})
        sys.stderr.write(f"{file}: {len(names[file])} mutants, {len(tried)} tried, {len(left)} left\n")
    return rows


def page(report: dict[str, Any]) -> str:
    """Return the numbers by file, and all survivors."""
    files = pd.DataFrame(report["files"])
    counts = pd.DataFrame({"file": "`" + files["file"].str.removeprefix(PACKAGE + "/") + "`"})
    counts[["mutants", "tried", "killed", "timed out"]] = files[["mutants", "tried", "killed", "timeout"]]
    counts["survived"] = files["survivors"].map(len)
    counts["of these unexplained"] = files["survivors"].map(lambda left: sum(not one["why"] for one in left))
    counts.loc[len(counts)] = {"file": "all", **counts.drop(columns="file").sum()}
    left = pd.DataFrame(
        {
            "function": f"`{one['function']}`",
            **{title: f"`{cell(one[key])}`" for title, key in (("instead of", "before"), ("it says", "after"))},
            "why it survives": one["why"] or "**unexplained**",
        }
        for row in report["files"]
        for one in row["survivors"]
    )
    head = (
        f"By `python -m recipes.quality_assurance.mutants`: mutmut {report['mutmut']}, {report['sample']}, at "
        f"{report['commit']}. A mutant is a function with one change; it is killed when a test fails or runs past its "
        "time, and survives when every test that reaches it passes."
    )
    parts = ["# Mutants of ops/ and feature_maps/", head, to_markdown(counts), "## Survivors"]
    return "\n\n".join([*parts, to_markdown(left, text_columns=None)]) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "¦").replace("`", "'")[:160] or "(nothing)"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-file", type=int, default=PER_FILE, help="mutants of each file (0: all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(argv)
    check_groups()
    rows: list[dict[str, Any]] = []
    for patterns, tests in GROUPS.items():
        with tempfile.TemporaryDirectory() as name:
            rows += run_group(files_of(patterns), tests, options.per_file, Path(name))
    sample = f"{options.per_file} of each file, drawn with seed {SEED}" if options.per_file else "every one"
    report = {"format_version": 1, "created": utc_now(), "mutmut": version("mutmut"), "commit": commit()}
    report |= {"sample": sample, "environment": environment(), "files": sorted(rows, key=lambda row: row["file"])}
    write_json(options.out / "mutants.json", report)
    atomic_write(options.out / "mutants.md", page(report))
    return 1 if any(not one["why"] for row in rows for one in row["survivors"]) else 0


if __name__ == "__main__":
    sys.exit(main())

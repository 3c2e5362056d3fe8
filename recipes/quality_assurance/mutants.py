"""Mutation testing of hf_linear_attn/ops and hf_linear_attn/feature_maps with mutmut, and what survived.

    pip install mutmut==3.8.1
    python -m recipes.quality_assurance.mutants               # a sample, some twenty minutes on one core
    python -m recipes.quality_assurance.mutants --again       # only those that survived in the committed results
    python -m recipes.quality_assurance.mutants --per-file 0  # every mutant, many hours

Called from the root of the repository. mutmut makes copies of functions with one change each (`<` to `<=`, 1 to 2, an
argument left out, a string altered) and runs the tests that reach the function: a mutant that no test notices survives.
Of every file a sample is drawn, the same each time. Writes recipes/results/mutants.json and .md. Expect: no survivor
without an explanation (exit code 1 otherwise).

Not mutated: `ops/native` and `ops/triton`, which drive compiled kernels (minutes for each mutant; their tests compare
every kernel with the definitions), `ops/backends.py` and `ops/fla_backend.py`, which build and choose them, and what
mutmut leaves alone: constants of modules, decorated functions and decorators.
"""

from __future__ import annotations

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

from recipes.quality_assurance.mutants_explained import EXPLAINED

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "recipes" / "results"
PACKAGE = "hf_linear_attn"
PER_FILE = 10
SEED = 0
#: A mutant gets so many seconds, and so many times what its tests take unchanged.
TIMEOUT, MULTIPLIER = 30, 5
#: Tests that take long and whose statements the others make as well; the last one counts functions.
SLOW = "not gradcheck and not compil and not unbiased and not two_thousand and not every_definition_is_compared"

AGAIN = ", the survivors tried again with the tests that they led to"

#: See above for why.
LEFT_OUT = {"ops/__init__.py", "ops/backends.py", "ops/fla_backend.py"}

#: Files of the package, and the tests that should notice a change in them.
GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("ops/common.py", "ops/kernelized.py"),
        ("tests/ops/test_kernelized.py", "tests/feature_maps/test_definitions.py", "tests/mechanisms/test_contract.py"),
    ),
    (
        ("ops/windowed.py", "ops/buckets.py"),
        ("tests/ops/test_windowed.py", "tests/ops/test_windowed_maps.py", "tests/mechanisms/test_scatterbrain.py"),
    ),
    (
        ("ops/gated.py", "ops/gated_delta.py"),
        (
            *("tests/ops/test_gated.py", "tests/ops/test_gated_delta.py", "tests/mechanisms/test_gla.py"),
            *("tests/mechanisms/test_gated_delta.py", "tests/mechanisms/test_rfa.py"),
        ),
    ),
    (
        ("ops/efficient.py", "ops/linformer.py", "ops/luna.py", "ops/nystrom.py"),
        (
            *("tests/ops/test_linformer.py", "tests/mechanisms/test_efficient.py", "tests/mechanisms/test_luna.py"),
            *("tests/mechanisms/test_linformer.py", "tests/mechanisms/test_nystrom.py"),
        ),
    ),
    (
        ("feature_maps/*.py",),
        ("tests/feature_maps", "tests/mechanisms/test_cosformer.py", "tests/ops/test_native.py"),
    ),
    (
        ("ops/calls.py", "ops/formulas.py"),
        ("tests/ops/test_native.py", "tests/ops/test_native_windowed.py", "tests/feature_maps/test_maps.py"),
    ),
)


# --------------------------------------------------------------------------------------------------------------------
# mutmut


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.split()


def prepared(folder: Path, files: list[str], tests: tuple[str, ...]) -> None:
    """A copy of the package and its tests, with the settings of mutmut beside them."""
    for name in tracked(PACKAGE, "tests", "pyproject.toml"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    chosen = "\n    ".join(tests)
    mutated = "\n    ".join(files)
    (folder / "setup.cfg").write_text(
        f"[mutmut]\nsource_paths =\n    {PACKAGE}\nonly_mutate =\n    {mutated}\n"
        f"pytest_add_cli_args_test_selection =\n    {chosen}\n"
        f"pytest_add_cli_args =\n    -k\n    {SLOW}\n    -p\n    no:cacheprovider\n"
        f"timeout_constant = {TIMEOUT}\ntimeout_multiplier = {MULTIPLIER}\ntrack_dependencies = false\n"
        # Workers come of a process that has run nothing: threads of native kernels do not survive a fork.
        "use_setproctitle = false\nprocess_isolation = forkserver\n",
        encoding="utf-8",
    )


def names_of(folder: Path, files: list[str]) -> dict[str, list[str]]:
    """Every mutant by file. mutmut has no command that lists them without running the tests."""
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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # The folder comes first: the mutated package must be found before this one.
    inherited = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in inherited if path != ".")
    command = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"mutmut {arguments[0]} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def statuses(folder: Path, file: str) -> dict[str, str]:
    """Mutant -> `killed`, `survived`, `timeout`, `no tests`, … for what has been run."""
    from mutmut.stats import status_by_exit_code

    path = folder / "mutants" / (file + ".meta")
    exit_codes = json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
    return {name: status_by_exit_code[code] for name, code in exit_codes.items() if code is not None}


def change(folder: Path, name: str) -> tuple[str, str]:
    """The lines that a mutant removes and adds."""
    lines = mutmut(folder, "show", name).splitlines()
    removed = [line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---")]
    added = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    return " ".join(removed), " ".join(added)


# --------------------------------------------------------------------------------------------------------------------
# Sampling and results


def drawn(names: list[str], file: str, per_file: int) -> list[str]:
    if not per_file or len(names) <= per_file:
        return names
    return sorted(random.Random(f"{SEED} {file}").sample(names, per_file), key=names.index)


def files_of(patterns: tuple[str, ...]) -> list[str]:
    files = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in (ROOT / PACKAGE).glob(pattern)}
    return sorted(files & set(tracked(PACKAGE)))


def check_groups() -> None:
    named = {name for patterns, _ in GROUPS for name in files_of(patterns)}
    every = set(files_of(("ops/*.py", "feature_maps/*.py"))) - {f"{PACKAGE}/{name}" for name in LEFT_OUT}
    if every - named:
        raise ValueError(f"No group has {', '.join(sorted(every - named))}: add it, with tests, or leave it out.")


def survivor(folder: Path, name: str, status: str) -> dict[str, str]:
    before, after = change(folder, name)
    function_name = re.sub(r"__mutmut_\d+$", "", name.removeprefix(PACKAGE + "."))
    function_name = re.sub(r"xǁ(\w+)ǁ", r"\1.", function_name).replace(".x_", ".")
    return {"mutant": name, "function": function_name, "status": status, "before": before, "after": after}


def explained(item: dict[str, str]) -> str:
    for function, fragment, why in EXPLAINED:
        if function in item["function"] and fragment in item["after"]:
            return why
    return ""


def run(group: int, per_file: int, again: dict[str, list[str]] | None, folder: Path) -> list[dict[str, Any]]:
    """Rows by file: how many mutants there are, were tried, were killed, and those that were not."""
    patterns, tests = GROUPS[group]
    files = files_of(patterns)
    prepared(folder, files, tests)
    names = names_of(folder, files)
    selected = {file: again.get(file, []) if again else drawn(names[file], file, per_file) for file in files}
    chosen = [name for file in files for name in selected[file]]
    rows = []
    if chosen:
        mutmut(folder, "run", "--max-children", "1", *chosen)
    for file in files:
        tried = statuses(folder, file) if chosen else {}
        statuses_of_file = {name: status for name, status in tried.items() if name in selected[file]}
        left = [
            survivor(folder, name, status)
            for name, status in statuses_of_file.items()
            if status not in ("killed", "timeout")
        ]
        counts = {status: list(statuses_of_file.values()).count(status) for status in ("killed", "timeout")}
        rows.append(
            {"file": file, "mutants": len(names[file]), "tried": len(statuses_of_file), **counts, "survivors": left}
        )
        sys.stderr.write(f"{file}: {len(names[file])} mutants, {len(statuses_of_file)} tried, {len(left)} left\n")
    return rows


def merged(before: dict[str, Any], rows: list[dict[str, Any]], again: bool) -> list[dict[str, Any]]:
    """The earlier rows and the new ones in their place; of mutants that were tried again only the outcome changes."""
    new = {row["file"]: row for row in rows}
    result = []
    for row in before["files"]:
        now = new.pop(row["file"], None)
        if now is not None and not again:
            row = now
        elif now is not None and now["tried"]:
            row = {**row, "survivors": now["survivors"], "timeout": row["timeout"] + now["timeout"]}
            row["killed"] = row["tried"] - row["timeout"] - len(row["survivors"])
        result.append(row)
    return sorted([*result, *new.values()], key=lambda row: row["file"])


def table(report: dict[str, Any]) -> str:
    keys = ("mutants", "tried", "killed", "timeout")
    left = [item for row in report["files"] for item in row["survivors"]]
    total = [sum(row[key] for row in report["files"]) for key in keys]
    unexplained = sum(not item["why"] for item in left)
    lines = [
        "# Mutants of ops/ and feature_maps/",
        "",
        "By `python -m recipes.quality_assurance.mutants`: "
        f"mutmut {report['mutmut']}, {report['sample']}, at {report['commit']}. A "
        "mutant is a function with one change; it is killed when a test fails or runs past its time, and survives when "
        "every test that reaches it passes.",
        "",
        "| file | mutants | tried | killed | timed out | survived | of these unexplained |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["files"]:
        numbers = [*(row[key] for key in keys), len(row["survivors"]), sum(not i["why"] for i in row["survivors"])]
        lines.append(f"| `{row['file'].removeprefix(PACKAGE + '/')}` | " + " | ".join(map(str, numbers)) + " |")
    lines.append("| all | " + " | ".join(map(str, [*total, len(left), unexplained])) + " |")
    lines += [
        "",
        "## Survivors",
        "",
        "| function | instead of | it says | why it survives |",
        "| --- | --- | --- | --- |",
    ]
    for item in left:
        before, after = (cell(item[key]) for key in ("before", "after"))
        lines.append(f"| `{item['function']}` | `{before}` | `{after}` | {item['why'] or '**unexplained**'} |")
    return "\n".join(lines) + "\n"


def written(rows: list[dict[str, Any]], arguments: argparse.Namespace, before: dict[str, Any] | None) -> dict[str, Any]:
    import torch

    from hf_linear_attn.utils.environment import environment, utc_now

    for row in rows:
        for item in row["survivors"]:
            item["why"] = explained(item)
    report = {"format_version": 1, "created": utc_now(), "files": rows}
    if arguments.explain and before is not None:
        return {**before, **report, "created": before["created"]}
    size = f"{arguments.per_file} of each file, drawn with seed {SEED}" if arguments.per_file else "every one"
    sample = size
    if before is not None and arguments.again:
        sample = before["sample"].removesuffix(AGAIN) + AGAIN
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    provenance = {"mutmut": version("mutmut"), "commit": commit.strip() or "no commit", "sample": sample}
    provenance |= {"environment": environment(torch.device("cpu"))}
    return {**report, **provenance}


def cell(text: str) -> str:
    return text.replace("|", "¦").replace("`", "'")[:160] or "(nothing)"


# --------------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-file", type=int, default=PER_FILE, help="mutants of each file (0: all)")
    parser.add_argument("--group", type=int, nargs="+", default=list(range(len(GROUPS))), help="these groups of files")
    parser.add_argument("--again", action="store_true", help="only those that survived; the other results stay")
    parser.add_argument("--explain", action="store_true", help="run nothing, write the explanations into the results")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args(argv)
    check_groups()
    path = arguments.out / "mutants.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    part = arguments.again or arguments.explain or len(arguments.group) < len(GROUPS)
    if part and before is None:
        before = {"files": [], "sample": ""}
    again = None
    if arguments.again and before is not None:
        again = {row["file"]: [item["mutant"] for item in row["survivors"]] for row in before["files"]}
    rows: list[dict[str, Any]] = []
    for group in () if arguments.explain else arguments.group:
        with tempfile.TemporaryDirectory() as name:
            rows += run(group, arguments.per_file, again, Path(name))
    report = written(merged(before, rows, arguments.again) if before and part else rows, arguments, before)
    path.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "mutants.md").write_text(table(report), encoding="utf-8")
    return 1 if any(not item["why"] for row in report["files"] for item in row["survivors"]) else 0


if __name__ == "__main__":
    sys.exit(main())

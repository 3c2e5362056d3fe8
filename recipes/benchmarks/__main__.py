"""One runner of all benchmarks.

    python -m recipes.benchmarks                      # lists them
    python -m recipes.benchmarks attention --help
    python -m recipes.benchmarks attention --attention '[elu, hedgehog]' --lengths '[256, 4096]' --output out
    python -m recipes.benchmarks attention --output out --resume
    python -m recipes.benchmarks attention --output now --compare recipes/results/attention.json.gz

Each cell of a benchmark is on disk at once, in OUTPUT/records.jsonl. Ctrl-C stops; the same command with --resume goes
on. OUTPUT/results.json has the settings, the machine and all rows: copied to recipes/results/, it is what
`python -m recipes.benchmarks.write_tables` makes the published tables from. `--compare` takes the results of an earlier
run and compares ratios, never times; the exit code is 1 if one became worse by more than the noise.
"""

import argparse
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from hf_linear_attn.cli.running import exit_code

#: Name -> module and function.
BENCHMARKS = {
    "attention": "attention:attention",
    "compiled": "models:compiled",
    "decoding": "decoding:decoding",
    "embedders": "embedders:embedders",
    "encoder-start": "conversion:encoder_start",
    "fidelity": "conversion:fidelity",
    "glue": "conversion:glue",
    "gpu": "gpu:gpu",
    "linear-part": "conversion:linear_part",
    "memory": "attention:memory",
    "models": "models:models",
    "proteins": "proteins:proteins",
    "proteins-costs": "proteins:costs",
    "runtimes": "runtimes:runtimes",
    "serving": "serving:serving",
    "serving-endurance": "serving:endurance",
    "serving-profile": "serving:profile",
    "transfer-cost": "models:transfer_cost",
}


class HelpFormatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring of a benchmark as it is."""


def benchmark_of(name: str) -> Any:
    """Return the function of a benchmark."""
    module, _, function = BENCHMARKS[name].partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), function)


def parser_of(name: str) -> ArgumentParser:
    """Return the parser of a benchmark: its own options, and those of every benchmark."""
    function = benchmark_of(name)
    program = f"python -m recipes.benchmarks {name}"
    description = inspect.getdoc(function)
    parser = ArgumentParser(prog=program, description=description, formatter_class=HelpFormatter)
    parser.add_function_arguments(function, as_group=False)
    parser.add_argument("--output", type=str, default=f"benchmark-{name}", help="folder for records and results")
    parser.add_argument("--resume", action="store_true", help="go on with the records in the folder")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, for all alike")
    parser.add_argument("--compare", type=str, help="results of an earlier run; exit code 1 if a ratio became worse")
    parser.add_argument("--tolerance", type=float, default=0.1, help="a smaller change of a ratio is noise")
    return parser


def main(argv: list[str] | None = None) -> int:
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if name not in BENCHMARKS:
        wrong = name and not name.startswith("-")
        sys.stderr.write(f"error: there is no benchmark {name!r}.\n" if wrong else str(__doc__))
        sys.stderr.write(f"Benchmarks: {', '.join(BENCHMARKS)}.\n")
        return 2
    options = vars(parser_of(name).parse_args(arguments))
    return exit_code(lambda: run(name, options))


def run(name: str, options: dict[str, Any]) -> int:
    """Run a benchmark, show its table, and return the exit code."""
    import torch

    from ..result_files import read_json
    from . import runner, write_tables

    folder = Path(options.pop("output"))
    compare = options.pop("compare")
    tolerance = options.pop("tolerance")
    before = None if compare is None else read_json(Path(compare).absolute())["rows"]
    torch.set_num_threads(options.pop("threads"))
    resume = options.pop("resume")
    results = runner.run_benchmark(name, benchmark_of(name), options, folder, resume=resume)
    sys.stdout.write(f"{write_tables.table_of_run(results)}\n\nWritten: {folder / runner.RESULTS_FILE}\n")
    if before is None:
        return 0
    changes = runner.compare(before, results["rows"], tolerance)
    sys.stdout.write("\n".join(map(str, changes)) + "\n" if changes else "Nothing changed by more than the noise.\n")
    return 1 if any(change.factor > 1 for change in changes) else 0


if __name__ == "__main__":
    sys.exit(main())

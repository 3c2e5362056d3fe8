"""`hf-linear-attn benchmark`: measures section by section, writes tables and JSON, compares with an earlier run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_linear_attn.study.records import RECORDS_FILE, Records
from hf_linear_attn.utils.environment import environment, json_safe

from .options import SECTIONS, BenchmarkOptions

if TYPE_CHECKING:
    from rich.console import Console

    from .bench import Bench
    from .tables import Table

TOOL = "benchmark"
FORMAT_VERSION = 1
REPORT, TABLES, CSV = "benchmark.json", "benchmark.md", "benchmark.csv"

Section = Callable[["Bench"], list[dict[str, Any]]]


def sections() -> dict[str, Section]:
    """Name -> what measures it. Heavy imports stay in here."""
    from .decode import run_decode
    from .memory import run_memory
    from .model import run_model
    from .ops import run_ops

    return dict(zip(SECTIONS, (run_ops, run_decode, run_model, run_memory), strict=True))


def run_benchmark(
    options: BenchmarkOptions, source: str | None = None, *, console: Console | None = None
) -> tuple[dict[str, Any], int]:
    """Measure, write `options.output`, show the tables; returns what `benchmark.json` holds, and the exit code: 1 where
    `options.compare` is given and something became worse.

    Args:
        source: a checkpoint for the section `model` instead of shapes with random weights.

    Raises:
        ValueError, OSError: settings or a model that cannot be served; nothing has been measured then.
    """
    from rich.console import Console

    from .compare import compare, load_report, ratios_of
    from .show import show, show_comparison
    from .tables import tables_of
    from .workloads import check_backends, mechanism_names

    began = time.perf_counter()
    console = console or Console()
    mechanism_names(options.attention)
    check_backends(options.backend)
    device = checked_device(options.device)
    check_source(source, options)
    before = load_report(options.compare) if options.compare is not None else None
    store = open_store(options)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    with _threads(options.threads):
        report = _measure(options, source, store, device, console)
    report = json_safe({**report, "ratios": ratios_of(report["sections"]), "seconds": time.perf_counter() - began})
    tables = tables_of(report)
    write(folder / REPORT, (json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    write(folder / TABLES, page(report, tables).encode())
    write(folder / CSV, table_of(store).encode())
    show(console, report, tables, folder)
    if before is None:
        return report, 0
    comparison = compare(before, report, options.tolerance)
    show_comparison(console, comparison, before, report, str(options.compare))
    return report, 1 if comparison.worse else 0


def _measure(
    options: BenchmarkOptions, source: str | None, store: Records, device: Any, console: Console
) -> dict[str, Any]:
    """All sections asked for. What was measured before an error or an interruption stays on disk."""
    from recipes.benchmarks.screen import Screen

    from .bench import Bench

    machine = environment(device)
    settings = json_safe({**vars(options), "model": source})
    store.start_run(TOOL, settings, machine)
    header = {"format_version": FORMAT_VERSION, "tool": TOOL, "settings": settings, **machine}
    num_known = len(store)
    rows_by_section: dict[str, list[dict[str, Any]]] = {}
    try:
        with Screen(console) as screen:
            if num_known:
                screen.say(f"resuming after {num_known} measurements of earlier runs")
            parts = {name: machine["hardware"][name] for name in ("device", "cpu", "threads")}
            bench = Bench(options, store, screen, {"device": parts, "versions": machine["versions"]}, device, source)
            for name, run in sections().items():
                if name in options.section:
                    rows_by_section[name] = run(bench)
                    screen.say(f"{name}: {len(rows_by_section[name])} rows")
    except BaseException:
        show_saved_measurements(console, store, Path(options.output))
        raise
    return {**header, "sections": rows_by_section, "notes": bench.all_notes()}


def table_of(store: Records) -> str:
    """CSV with a row for each number: what was measured, and the path of the number in its value (`seconds.median`)."""
    import pandas as pd

    rows = store.to_frame().to_dict("records")
    numbers = [
        {**row, "metric": name, "value": one} for row in rows for name, one in numbers_of(row["value"], row["metric"])
    ]
    return pd.DataFrame(numbers).dropna(axis="columns", how="all").to_csv(index=False)


def numbers_of(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """All numbers in nested data, with their path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers_of(item, f"{name}.{key}")
    elif isinstance(value, list):
        yield from numbers_of(dict(enumerate(value)), name)
    elif isinstance(value, (int, float)):
        yield name, value


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads for a while."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def page(report: dict[str, Any], tables: Sequence[Table]) -> str:
    """benchmark.md: all tables, and what was not measured."""
    from .tables import markdown

    notes = [f"- {text}" for texts in report["notes"].values() for text in texts]
    left_out = ["## Not measured", "\n".join(notes)] if notes else []
    return "\n\n".join(["# Benchmark", where(report), *map(markdown, tables), *left_out]) + "\n"


def where(report: dict[str, Any]) -> str:
    """The machine, in a line."""
    hardware, versions = report["hardware"], report["versions"]
    name = hardware["cpu"] if hardware["device"] == "cpu" else hardware["device"]
    load = hardware["load_average_at_start"]
    load_text = "" if load is None else f", load at the start {load:.1f}"
    return f"{name}, threads: {hardware['threads']}, torch {versions['torch']}{load_text}."


def write(path: Path, content: bytes) -> None:
    """The whole file or the one before."""
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(content)
    partial.replace(path)


def checked_device(name: str) -> Any:
    """Raises a ValueError for a device that PyTorch does not know or this machine does not have."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(f"The device {name!r} cannot be used ({str(error).splitlines()[0]}). Try cpu.") from error
    return device


def check_source(source: str | None, options: BenchmarkOptions) -> None:
    """Raises where a checkpoint is given that the sections asked for cannot take."""
    if source is None:
        return
    from .shapes import is_decoder

    decoder = is_decoder(source)
    if not {"decode", "model"} & set(options.section) or {"ops", "memory"} & set(options.section):
        raise ValueError(
            f"The model {source!r} is for the sections decode and model; the others have no model. Add --section model."
        )
    if "decode" in options.section and not decoder:
        raise ValueError(f"{source!r} is no causal language model, and decodes nothing. Use --section model.")


def open_store(options: BenchmarkOptions) -> Records:
    """The measurements of the output folder.

    Raises:
        ValueError: the folder holds measurements and `append` is not given, or holds other things.
        OSError: it is a file.
    """
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"The output {options.output!r} is a file. Give a folder with --output.")
    in_use = folder.is_dir() and any(folder.iterdir())
    if in_use and not (folder / RECORDS_FILE).is_file():
        raise ValueError(f"The folder {options.output!r} holds other files. Give a new one with --output.")
    if in_use and not options.append:
        raise ValueError(
            f"The folder {options.output!r} holds measurements already. Pass --append to go on or to add to them, or "
            "give another folder with --output."
        )
    return Records(folder / RECORDS_FILE, remeasure=options.again)


def show_saved_measurements(console: Console, store: Records, folder: Path) -> None:
    from recipes.benchmarks.screen import readable

    if not len(store):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        return
    message = (
        f"{len(store)} measurements are kept in {folder / RECORDS_FILE}. To go on: the same command with --append."
    )
    console.print(readable(console, message), highlight=False, markup=False, soft_wrap=True)

"""`hf-linear-attn evaluate`: checks, measures, writes the report; what was measured before is taken from the folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .measurements import NAME, Store, plain
from .options import EvaluateOptions, task_of

if TYPE_CHECKING:
    from rich.console import Console

    from .job import Job

EXTRAS = "pip install 'hf-linear-attn[demo]'"


def run_evaluate(source: str, options: EvaluateOptions, *, console: Console | None = None) -> dict[str, Any]:
    """Measure, write the report to `options.output`, show a table, and return what `report.json` holds.

    Args:
        source: a local folder or a repository on the Hub: a causal language model, an encoder, or (with a task) a
            fine-tuned classifier. Further tasks have fine-tuned models of their own (`--task NAME=FOLDER`): what is
            patched into `source` is patched into each of them, and judged on its task.

    Raises:
        ValueError, OSError: settings, a model or data that cannot be served; nothing has been measured then.
        ImportError: matplotlib, jinja2 or rich is missing; with a task or STS-B, the extra `train`.
    """
    began = time.perf_counter()
    _need_extras()
    from rich.console import Console
    from rich.markup import escape

    from .job import TOOL, prepare_job
    from .report import environment, write_report
    from .screen import readable, show
    from .verdicts import conclude

    console = console or Console()
    _check_names(options)
    store = open_store(options)
    name = options.name or (Path(source).resolve().name if Path(source).is_dir() else source)
    console.print(readable(console, f"Loading [bold]{escape(name)}[/] ..."), highlight=False)
    job = prepare_job(source, name, options, store)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    surroundings = environment(job.subject.model.device)
    store.begin(TOOL, job.settings(), surroundings)
    try:
        found = _measure(job, store, folder, console)
    except BaseException:
        _tell_what_is_kept(console, store, folder)
        raise
    report = plain({**job.facts(surroundings, store), **found, "seconds": time.perf_counter() - began})
    conclude(report)
    written = write_report(report, folder, store)
    show(console, report, folder, written)
    return report


def _measure(job: Job, store: Store, folder: Path, console: Console) -> dict[str, Any]:
    """All that is not known yet, with progress on the screen."""
    from .screen import Screen
    from .several import add_task

    with Screen(console) as screen:
        if len(store):
            screen.say(f"taken up: {len(store)} measurements of earlier runs")
        found = _study(job, store, folder, screen).run()
        for task, other in job.others.items():
            add_task(found, task, _study(other, store, folder, screen, task).judge())
        return found


def _study(job: Job, store: Store, folder: Path, screen: Any, task: str | None = None) -> Any:
    """Of the model, or of that of a further task: there only the task's score is of interest."""
    from .study import Study

    return Study(
        job.subject,
        data=job.data,
        plan=job.plan,
        judges=job.judges,
        progress=screen,
        store=store,
        folder=folder,
        groups=job.groups,
        reference=job.reference,
        task=task,
    )


def _tell_what_is_kept(console: Console, store: Store, folder: Path) -> None:
    from .screen import readable

    if not len(store):
        if not any(folder.iterdir()):
            folder.rmdir()
        return
    told = f"{len(store)} measurements are kept in {folder / NAME}. To go on: the same command with --append."
    console.print(readable(console, told), highlight=False, markup=False, soft_wrap=True)


# --------------------------------------------------------------------------------------------------------------------
# Checks before anything is loaded


def _need_extras() -> None:
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError(f"evaluate needs {error.name}, which is not installed: {EXTRAS}") from error


def _check_names(options: EvaluateOptions) -> None:
    """Unknown mechanisms and tasks, and places that do not exist."""
    from ..registry import ATTENTIONS, list_attentions

    list_attentions()
    for name in options.attention or ():
        ATTENTIONS.get(name)
        if name == "softmax":
            raise ValueError("attention 'softmax' is the exact attention, which is always measured. Leave it out.")
    if options.task is not None:
        from ..data.tasks import get_task

        for task in options.task:
            get_task(task_of(task)[0])
    models = [(folder, "task") for folder in options.other_tasks.values()]
    for given, flag in ((options.data, "data"), (options.sts, "sts"), *models):
        if given is not None and not Path(given).is_dir():
            raise FileNotFoundError(f"There is no folder {given!r}. Give another with --{flag}.")
    if options.text is not None and not Path(options.text).is_file():
        raise FileNotFoundError(f"There is no text file {options.text!r}. Give another with --text.")


def open_store(options: EvaluateOptions) -> Store:
    """The measurements of the output folder.

    Raises:
        ValueError: the folder holds something and `append` is not given, or holds something else than a report; or its
            measurements are damaged.
        OSError: it is a file.
    """
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"The output {options.output!r} is a file. Give a folder with --output.")
    taken = folder.is_dir() and any(folder.iterdir())
    if taken and not (folder / NAME).is_file():
        raise ValueError(f"The folder {options.output!r} holds other files. Give a new one with --output.")
    if taken and not options.append:
        raise ValueError(
            f"The folder {options.output!r} holds measurements already. Pass --append to go on or to add to them, or "
            "give another folder with --output."
        )
    return Store(folder / NAME, again=options.again)

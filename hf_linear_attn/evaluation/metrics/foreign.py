"""Metrics that the Hub or a folder carries, under names of the form `hub:PATH[:CONFIG][#KEY]`.

    hub:accuracy              the Hub's module `accuracy`
    hub:glue:mrpc#f1          its module `glue` in the configuration `mrpc`; of its values the one called f1
    hub:./my_metric           a folder with a metric module of one's own

A module of the Hub is code, and is fetched on first use: name those only that you trust.
"""

from __future__ import annotations

from typing import Any, NamedTuple

PREFIX = "hub:"


class ForeignName(NamedTuple):
    path: str
    config: str | None
    key: str | None


def is_foreign(name: str) -> bool:
    return name.startswith(PREFIX)


def parse(name: str) -> ForeignName:
    """Take a name apart.

    Raises:
        ValueError: no path, or an empty configuration or key.
    """
    rest, mark, key = name.removeprefix(PREFIX).partition("#")
    path, colon, config = rest.partition(":")
    if not path or (mark and not key) or (colon and not config):
        raise ValueError(f"{name!r} is no metric: write hub:PATH, hub:PATH:CONFIG or hub:PATH:CONFIG#KEY.")
    return ForeignName(path, config or None, key or None)


class ForeignMetric:
    """One module, filled as `evaluate.Metric` is; its value comes under the name that was asked for."""

    def __init__(self, name: str) -> None:
        """
        Raises:
            ValueError: the name has another form.
            OSError: the module cannot be loaded.
        """
        import evaluate

        self.name = name
        self.parsed = parse(name)
        try:
            self.module: Any = evaluate.load(self.parsed.path, self.parsed.config)
        except (FileNotFoundError, ConnectionError, ImportError, ValueError) as error:
            raise OSError(
                f"The metric {name!r} cannot be loaded ({error}). Connect to the Hub, check its name, or use one that "
                "needs no network, such as accuracy."
            ) from error

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self.module.add_batch(predictions=predictions, references=references)

    def compute(self) -> dict[str, float]:
        """The value, under the name.

        Raises:
            ValueError: the module gives several values and the name says not which, or one that it does not give.
        """
        values = self.module.compute() or {}
        key = self.parsed.key or (next(iter(values)) if len(values) == 1 else None)
        if key not in values:
            found = ", ".join(values) or "nothing"
            raise ValueError(f"The metric {self.name!r} gives {found}: add #KEY with one of these to its name.")
        return {self.name: float(values[key])}


class Together:
    """Several metrics that are filled alike, of this package and foreign ones."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        for part in self.parts:
            part.add_batch(predictions=predictions, references=references)

    def compute(self) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in (part.compute() or {}).items()}

"""The result of a plan: every measurement that the choice rests on, its tables, sentences, plot and files."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..measure.speed import NOT_MEASURABLE
from ..mechanisms.softmax import EXACT
from ..utils.environment import json_safe
from ..utils.files import atomic_write, write_json
from ..utils.formatting import fixed
from ..utils.timing import crossover
from .budget import DAMAGE_UNITS, Budget, DamageUnit
from .inputs import inputs_text
from .plots import STYLE, new_figure, png
from .report import page_template

if TYPE_CHECKING:
    import pandas as pd

#: Files of a plan.
PLAN, REPORT, PAGE, PLOT = "plan.json", "plan-report.json", "report.html", "curve.png"

#: A smaller divergence of the outputs is that of rounding: the mechanism computed exact attention.
EXACT_DIVERGENCE = 1e-6


@dataclass(frozen=True)
class PlanResult:
    """The layers or heads to convert, and every measurement that the choice rests on.

    Measured models have `divergence`, `score`, `damage`, `chance` (better than exact, though it diverges largely), and
    `speedup` and `cache` (its share of the exact model's) by length.
    """

    budget: Budget  # what the layers were chosen for
    unit: DamageUnit  # of all damages
    score: dict[str, Any]  # `title` and `digits` of the metric's score, and what its `divergence` is
    baseline: str  # the exact model's attention implementation, which speedups are relative to
    attention: str  # the mechanism
    mechanisms: dict[str, dict[str, Any]]  # of each layer that was searched (its index as text), with its options
    part: str  # what is converted: "layers" or "key-value heads"
    total: int  # self-attention layers of the model, or their key-value heads
    met: bool  # whether the budget is met, on the data of the choice and on those of the verification
    within_budget: bool  # whether it is met on the data of the choice
    informative: bool  # whether the exact model is clearly better than without attention (`quality.assess`)
    curve: list[dict[str, Any]]  # measured models: `count` of linear parts, `added`, `layers`, `exact_heads` in these
    single_layers: list[
        dict[str, Any]
    ]  # a model for each layer by itself: `index`, `name`; none where heads are chosen
    chosen: dict[str, Any]  # the chosen row of the curve
    verified: dict[str, Any]  # the chosen model on the data of the verification
    references: dict[str, dict[str, Any]]  # values of the exact model and of that without attention, by data set
    positions_note: str = ""  # about timed lengths beyond the model's positions

    @property
    def layers(self) -> list[int]:
        """The chosen layers, those with some exact heads among them."""
        return self.chosen["layers"]

    @property
    def judged(self) -> bool:
        """Whether the data can judge the budget: one of quality needs data on which attention matters."""
        return self.budget.unit is None or self.informative

    @property
    def plan(self) -> dict[str, Any] | None:
        """The mechanism of each layer, as `patch_model` and `patch --plan` read it; None if there is no judgement."""
        return plan_of(self.chosen, self.mechanisms) if self.judged else None

    @property
    def exit_code(self) -> int:
        """0: the budget is met; 1: it is not; 3: the data cannot judge."""
        return 3 if not self.judged else 0 if self.met else 1

    @property
    def table(self) -> pd.DataFrame:
        """One row for each model, with the speedup at each length."""
        import pandas as pd

        left_out = ("layers", "exact_heads", "chance", "unsure")
        rows = [{name: row[name] for name in row if name not in left_out} for row in self.curve]
        frame = pd.json_normalize(rows, sep="_at_").rename(columns={"count": "converted", "added": "added_layer"})
        frame["chosen"] = self.judged & (frame["converted"] == self.chosen["count"])
        return frame.astype({"added_layer": "Int64"})

    def formatted_table(self) -> pd.DataFrame:
        """Return `table` as text; a star marks the chosen row."""
        import pandas as pd

        rows = {}
        for row in self.curve:
            star = " ★" if self.judged and row["count"] == self.chosen["count"] else ""
            rows[f"{row['count']} of {self.total}{star}"] = {
                **({"adds layer": "–" if row["added"] is None else str(row["added"])} if self.single_layers else {}),
                **self._quality_cells(row),
                **{f"speed at {int(length):,}": self._speed_cell(row, length) for length in row["speedup"]},
                **{f"cache at {int(length):,}": f"{value:.1%}" for length, value in row["cache"].items()},
            }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("linear")

    def formatted_single_layers(self) -> pd.DataFrame:
        """Return `single_layers` as text."""
        import pandas as pd

        rows = {f"{row['index']} {row['name']}": self._quality_cells(row) for row in self.single_layers}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("layer")

    @staticmethod
    def _speed_cell(row: Mapping[str, Any], length: str) -> str:
        return NOT_MEASURABLE if length in row.get("unsure", ()) else f"{row['speedup'][length]:.2f}×"

    def _quality_cells(self, row: Mapping[str, Any]) -> dict[str, str]:
        return {
            self.score["divergence"]: format_divergence(row["divergence"]),
            self.score["title"]: self.format_score(row["score"]),
            "damage": self.unit.format(row["damage"]) if row.get("count") != 0 else "–",
        }

    def format_score(self, score: float | None) -> str:
        """Return a score with the digits of its metric."""
        return "–" if score is None else fixed(score, self.score["digits"])

    def summary(self) -> list[str]:
        """Return the findings as sentences, the most important first."""
        sentences = [f"The budget {self.budget.text!r} {self._verdict()}.", *self._warnings()]
        if not self.judged:
            return sentences
        speedup = {int(length): value for length, value in self.chosen["speedup"].items()}
        if len(speedup) > (self.budget.cost == "speedup"):
            change = crossover(list(speedup), list(speedup.values()))
            sentences.append(f"One pass of the planned model is faster than {self.baseline} from {change} tokens on.")
        return sentences

    def _verdict(self) -> str:
        if self.budget.unit is not None and not self.informative:
            return "cannot be judged on these data, so there is no plan"
        plan = f"{self.chosen['count']} of {self.total} {self.part} as {self.attention}"
        if self.single_layers:
            plan += f" (layers {', '.join(map(str, self.layers))})"
        choice, verification = (self.unit.format(row["damage"]) for row in (self.chosen, self.verified))
        costs = f"{choice} on the data of the choice, {verification} on the data of the verification"
        if self.budget.unit is None:
            values = [self.chosen, self.verified] if self.budget.cost == "speedup" else [self.chosen]
            costs = f"{', timed again '.join(map(self.budget.format_cost, values))}; {costs}"
        if self.within_budget:
            return f"{'is met by' if self.met else 'is not confirmed for'} {plan}: {costs}"
        return f"cannot be reached: the nearest is {plan}, {costs}"

    def _warnings(self) -> list[str]:
        sentences = []
        exact, last = self.references["choice"], self.curve[-1]
        if not self.informative:
            scores = [self.format_score(values["score"]) for values in self.references.values()]
            comparison = "{} against {}, and {} against {} on the data of the verification".format(*scores)
            problem = "the exact model is not clearly better there than the model without attention"
            sentences.append(f"The score says nothing about attention: {problem} ({self.score['title']} {comparison}).")
        counts = ", ".join(str(row["count"]) for row in self.curve if row["chance"])
        if counts:
            change = "the score is better although the outputs differ largely"
            sentences.append(f"With {counts} linear {self.part} {change}: that is chance.")
        longest = int(exact.get("longest_input") or 0)
        inputs = f"inputs of at most {longest:,} tokens"
        if last["divergence"] is not None and abs(last["divergence"]) < EXACT_DIVERGENCE:
            sentences.append(f"The linear layers compute exact attention on these {inputs}.")
        elif longest and 2 * longest < max(map(int, last["speedup"]), default=0):
            sentences.append(f"Quality is that of {inputs}; longer ones were only timed.")
        if exact.get("rows"):
            points = f"{100 / exact['rows']:.2f} points"
            sentences.append(f"The choice rests on {exact['rows']:,} examples of {points} each: a few are chance.")
        return [*sentences, *filter(None, [self.positions_note])]

    def to_dict(self) -> dict[str, Any]:
        """Return everything in a form that JSON can hold."""
        return json_safe({**vars(self), "budget": self.budget.text, "unit": self.unit.name, "plan": self.plan})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PlanResult:
        """Return the result that `to_dict` wrote."""
        parts: dict[str, Any] = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**parts | {"budget": Budget.parse(values["budget"]), "unit": DAMAGE_UNITS[values["unit"]]})


def format_divergence(value: float | None) -> str:
    """Format with four decimals, or with one significant digit where these would show zero; rounding errors as zero."""
    if value is None:
        return "–"
    return format(value, ".0e") if EXACT_DIVERGENCE < abs(value) < 5e-5 else fixed(value, 4)


def plan_of(row: Mapping[str, Any], mechanisms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the plan of a row of the curve; `mechanisms` are those of all layers, by the index of the layer.

    Layers not named are exact, or, where every layer is converted, have the mechanism of the first one.
    """
    every_layer = len(row["layers"]) == len(mechanisms)
    default = next(iter(mechanisms.values())) if every_layer else EXACT
    plan: dict[str, Any] = {"default": default}
    for name in map(str, row["layers"]):
        own = {} if mechanisms[name] == default else mechanisms[name]
        exact = {"exact_heads": row["exact_heads"][name]} if name in row["exact_heads"] else {}
        plan |= {name: {**own, **exact}} if own or exact else {}
    return plan


def write_plan(result: PlanResult, facts: Mapping[str, Any], folder: Path) -> None:
    """Write the report with its plot, and the plan itself, unless the data cannot judge one."""
    plot, plan = draw_curve(result, facts["model"]["name"]), json.dumps(result.plan, indent=1, ensure_ascii=False)
    template, embedded = page_template("plan.html"), base64.b64encode(plot).decode()
    page = template.render(result=result, plot=embedded, plan=plan, inputs_text=inputs_text, **facts)
    write_json(folder / REPORT, {**facts, "result": result.to_dict(), "summary": result.summary()})
    if result.plan is None:
        (folder / PLAN).unlink(missing_ok=True)
    else:
        write_json(folder / PLAN, result.plan)
    atomic_write(folder / PLOT, plot)
    atomic_write(folder / PAGE, page)


def draw_curve(result: PlanResult, model_name: str) -> bytes:
    """Return a PNG of the damage, and of the speed and the cache where measured, by the number of converted parts."""
    import matplotlib

    budget, table = result.budget, result.table.set_index("converted")
    limited = budget.cost or "damage"
    titles = {
        "damage": f"loss of quality, {'% ' if result.unit.relative else ''}{result.unit.name}",
        "speedup": f"times as fast as {result.baseline}",
        "cache": "share of the exact model's cache",
    }
    panels = [name for name in titles if name == "damage" or result.curve[0][name]]
    with matplotlib.rc_context(STYLE):
        figure, grid = new_figure(2.8 * len(panels), len(panels), sharex=True, squeeze=False)
        figure.suptitle(model_name if result.judged else f"{model_name}: these data cannot judge attention, no plan")
        for name, axes in zip(panels, grid[:, 0], strict=True):
            axes.set_ylabel(titles[name])
            if name == "damage":
                axes.plot(table["damage"], marker="o", label="on the data of the choice")
                if result.judged:
                    verified: Any = {"marker": "X", "markersize": 9, "linestyle": "none"}
                    point = [result.chosen["count"]], [result.verified["damage"]]
                    axes.plot(*point, **verified, label="the plan, verified on other data")
            else:
                axes.axhline(1.0, color="#767676", linewidth=1, label=result.baseline)
                for length in result.curve[0][name]:
                    axes.plot(table[f"{name}_at_{length}"], marker="s", label=f"{int(length):,} tokens")
            if name == limited and result.judged:
                limit = budget.limit / (100 if name == "cache" else 1)
                axes.axhline(limit, color="black", linestyle="--", label=f"budget: {budget.text}")
            axes.legend()
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel(f"{result.part} converted to {result.attention} (of {result.total})")
        return png(figure)

"""The result of a search under a budget: every measurement, its tables, sentences, plot and files."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd

from ..measure.speed import NOT_MEASURABLE
from ..mechanisms.softmax import EXACT
from ..utils.environment import json_safe
from ..utils.files import atomic_write, write_json
from ..utils.formatting import fixed
from ..utils.timing import crossover
from .budgets import DAMAGE_UNITS, Budget, DamageUnit
from .prepare import HALVES, inputs_text
from .report import STYLE, new_figure, page_template, png

#: Files of a plan.
PLAN, REPORT, PAGE, PLOT = "plan.json", "plan-report.json", "report.html", "curve.png"

#: A smaller divergence of the outputs is that of rounding: the mechanism computed exact attention.
EXACT_DIVERGENCE = 1e-6


@dataclass(frozen=True)
class Candidate:
    """A choice of linear layers and exact heads, with the quality and the costs of its model.

    Costs are by length (as text, as in JSON): `speedup` over the exact model in the same rounds, and `cache`, the share
    of the exact model's. A speedup at one of the lengths `unsure` varies more than it differs.
    """

    count: int = 0  # linear layers, or linear key-value heads
    layers: list[int] = field(default_factory=list)  # with linear heads
    exact_heads: dict[str, list[int]] = field(default_factory=dict)  # in these layers
    added: int | None = None  # the layer that it adds to the candidate before
    divergence: float | None = None  # of the outputs from the exact model's
    score: float | None = None
    damage: float | None = None  # what is lost of the score, in the budget's unit
    chance: bool = False  # better than exact, though it diverges largely
    speedup: dict[str, float] = field(default_factory=dict)
    cache: dict[str, float] = field(default_factory=dict)
    unsure: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What identifies the choice in the records."""
        heads = "; ".join(f"{layer} exact in {heads}" for layer, heads in self.exact_heads.items())
        return ",".join(map(str, self.layers)) + (f" ({heads})" if heads else "")

    def plan(self, mechanisms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the plan, from the mechanisms of all layers by their index.

        Layers not named are exact, or, where every layer is converted, have the mechanism of the first one.
        """
        every_layer = len(self.layers) == len(mechanisms)
        default = next(iter(mechanisms.values())) if every_layer else EXACT
        plan: dict[str, Any] = {"default": default}
        for name in map(str, self.layers):
            own = {} if mechanisms[name] == default else mechanisms[name]
            exact = {"exact_heads": self.exact_heads[name]} if name in self.exact_heads else {}
            plan |= {name: {**own, **exact}} if own or exact else {}
        return plan

    def format_speedup(self, length: str) -> str:
        """Return the speedup at a length as text."""
        return NOT_MEASURABLE if length in self.unsure else f"{self.speedup[length]:.2f}×"

    def cost(self, budget: Budget) -> float:
        """Return the speedup at the budget's length, or the share of the exact model's cache."""
        costs: dict[str, float] = getattr(self, budget.cost)
        return costs[str(budget.length)]

    def is_within(self, budget: Budget, *, informative: bool) -> bool:
        """Return whether a budget is met; one of quality is only where the data are `informative`."""
        if budget.unit is None:
            return budget.is_met(self.cost(budget))
        return informative and not self.chance and budget.is_met(self.damage)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Candidate:
        """Return the candidate that JSON holds."""
        return cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})


@dataclass(frozen=True)
class PlanResult:
    """The layers or heads to convert, and every measurement that the choice rests on."""

    budget: Budget  # what the layers were chosen for
    unit: DamageUnit  # of all damages
    score: dict[str, Any]  # `title` and `digits` of the metric's score, and what its `divergence` is
    baseline: str  # the exact model's attention implementation, which speedups are relative to
    attention: str  # the mechanism
    mechanisms: dict[str, dict[str, Any]]  # of each layer that was searched (its index as text), with its options
    part: str  # what is converted: "layers" or "key-value heads"
    total: int  # self-attention layers of the model, or their key-value heads
    within_budget: bool  # whether the budget is met on the data of the choice
    met: bool  # whether it is met on those of the verification, too
    informative: bool  # whether the exact model is clearly better than the floors (`quality.assess`)
    curve: list[Candidate]  # from the exact model to the one with the most linear parts
    single_layers: list[Candidate]  # each layer by itself; none where heads are chosen
    chosen: Candidate
    verified: Candidate  # the chosen one on the data of the verification
    references: dict[str, dict[str, Any]]  # values of the exact model and of that without attention, by data set
    positions_note: str = ""  # about timed lengths beyond the model's positions
    floors: list[dict[str, Any]] = field(default_factory=list)  # `score` and `name`, on the data of both references

    @property
    def layers(self) -> list[int]:
        """The chosen layers, those with some exact heads among them."""
        return self.chosen.layers

    @property
    def conclusive(self) -> bool:
        """Whether the data say if the budget is met: one of quality needs data on which attention matters."""
        return self.budget.unit is None or self.informative

    @property
    def plan(self) -> dict[str, Any] | None:
        """The mechanism of each layer, as `patch_model` and `patch --plan` read it; None without a conclusion."""
        return self.chosen.plan(self.mechanisms) if self.conclusive else None

    @property
    def exit_code(self) -> int:
        """0: the budget is met; 1: it is not; 3: the data do not tell."""
        return 3 if not self.conclusive else 0 if self.met else 1

    def _is_plan(self, one: Candidate) -> bool:
        return self.conclusive and one.count == self.chosen.count

    @property
    def table(self) -> pd.DataFrame:
        """One row for each model, with the speedup at each length."""
        left_out = ("layers", "exact_heads", "chance", "unsure")
        rows = [{name: item for name, item in asdict(one).items() if name not in left_out} for one in self.curve]
        frame = pd.json_normalize(rows, sep="_at_").rename(columns={"count": "converted", "added": "added_layer"})
        return frame.assign(chosen=[*map(self._is_plan, self.curve)]).astype({"added_layer": "Int64"})

    def formatted_table(self) -> pd.DataFrame:
        """Return `table` as text; a star marks the chosen row."""
        rows = {}
        for one in self.curve:
            rows[f"{one.count} of {self.total}{' ★' if self._is_plan(one) else ''}"] = {
                **({"adds layer": "–" if one.added is None else str(one.added)} if self.single_layers else {}),
                **self._quality_cells(one),
                **{f"speed at {int(length):,}": one.format_speedup(length) for length in one.speedup},
                **{f"cache at {int(length):,}": f"{share:.1%}" for length, share in one.cache.items()},
            }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("linear")

    def formatted_single_layers(self) -> pd.DataFrame:
        """Return `single_layers` as text."""
        rows = {one.added: self._quality_cells(one) for one in self.single_layers}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("layer")

    def _quality_cells(self, one: Candidate) -> dict[str, str]:
        return {
            self.score["divergence"]: format_divergence(one.divergence),
            self.score["title"]: self._format_score(one.score),
            "damage": self.unit.format(one.damage) if one.count else "–",
        }

    def _format_score(self, score: float | None) -> str:
        return "–" if score is None else fixed(score, self.score["digits"])

    def summary(self) -> list[str]:
        """Return the findings as sentences, the most important first."""
        sentences = [f"The budget {self.budget.text!r} {self._outcome()}.", *self._warnings()]
        chosen = self.chosen
        speedup = {int(length): value for length, value in chosen.speedup.items() if length not in chosen.unsure}
        if self.conclusive and len(speedup) > (self.budget.cost == "speedup"):
            change = crossover(list(speedup), list(speedup.values()))
            sentences.append(f"One pass of the planned model is faster than {self.baseline} from {change} tokens on.")
        return sentences

    def _outcome(self) -> str:
        if not self.conclusive:
            return "cannot be measured on these data, so there is no plan"
        budget, plan = self.budget, f"{self.chosen.count} of {self.total} {self.part} as {self.attention}"
        if self.single_layers:
            plan += f" (layers {', '.join(map(str, self.layers))})"
        choice, verification = (self.unit.format(one.damage) for one in (self.chosen, self.verified))
        costs = f"{choice} on the data of the choice, {verification} on the data of the verification"
        if budget.cost == "speedup":
            first, again = (one.format_speedup(str(budget.length)) for one in (self.chosen, self.verified))
            costs = f"{first}, timed again {again}; {costs}"
        elif budget.cost == "cache":
            costs = f"{self.chosen.cost(budget):.1%} of the cache; {costs}"
        if self.within_budget:
            return f"{'is met by' if self.met else 'is not confirmed for'} {plan}: {costs}"
        return f"cannot be reached: the nearest is {plan}, {costs}"

    def _warnings(self) -> list[str]:
        sentences = []
        exact, last = self.references["choice"], self.curve[-1]
        if not self.informative:
            parts = [
                f"{self._format_score(self.references[part]['score'])}, {floor['name']} "
                f"{self._format_score(floor['score'])} on the data of the {part}"
                for part, floor in zip(HALVES, self.floors, strict=False)
            ]
            problem = f"the exact model is not clearly better there ({self.score['title']} {'; '.join(parts)})"
            sentences.append(f"The score says nothing about attention: {problem}.")
        if counts := ", ".join(str(one.count) for one in self.curve if one.chance):
            change = "the score is better although the outputs differ largely"
            sentences.append(f"With {counts} linear {self.part} {change}: that is chance.")
        longest = int(exact.get("longest_input") or 0)
        inputs = f"inputs of at most {longest:,} tokens"
        if last.divergence is not None and abs(last.divergence) < EXACT_DIVERGENCE:
            sentences.append(f"The linear layers compute exact attention on these {inputs}.")
        elif longest and 2 * longest < max(map(int, last.speedup), default=0):
            sentences.append(f"Quality is that of {inputs}; longer ones were only timed.")
        if exact.get("rows"):
            points = f"{100 / exact['rows']:.2f} points"
            sentences.append(f"The choice rests on {exact['rows']:,} examples of {points} each: a few are chance.")
        return [*sentences, *filter(None, [self.positions_note])]

    def to_dict(self) -> dict[str, Any]:
        """Return everything in a form that JSON can hold."""
        return json_safe({**asdict(self), "budget": self.budget.text, "unit": self.unit.name, "plan": self.plan})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PlanResult:
        """Return the result that `to_dict` wrote."""
        parts: dict[str, Any] = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        parts |= {"budget": Budget.parse(values["budget"]), "unit": DAMAGE_UNITS[values["unit"]]}
        for name in ("curve", "single_layers"):
            parts[name] = [*map(Candidate.from_dict, values[name])]
        return cls(**parts | {name: Candidate.from_dict(values[name]) for name in ("chosen", "verified")})


def format_divergence(value: float | None) -> str:
    """Format with four decimals, or with one significant digit where these would show zero; rounding errors as zero."""
    if value is None:
        return "–"
    return format(value, ".0e") if EXACT_DIVERGENCE < abs(value) < 5e-5 else fixed(value, 4)


def write_plan(result: PlanResult, facts: Mapping[str, Any], folder: Path) -> None:
    """Write the report with its plot, and the plan itself, unless the data cannot measure the budget."""
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
    panels = [name for name in titles if name == "damage" or getattr(result.curve[0], name)]
    with matplotlib.rc_context(STYLE):
        figure, grid = new_figure(2.8 * len(panels), len(panels), sharex=True, squeeze=False)
        figure.suptitle(
            model_name if result.conclusive else f"{model_name}: these data cannot measure attention, no plan"
        )
        for name, axes in zip(panels, grid[:, 0], strict=True):
            axes.set_ylabel(titles[name])
            if name == "damage":
                axes.plot(table["damage"], marker="o", label="on the data of the choice")
                if result.conclusive:
                    verified: Any = {"marker": "X", "markersize": 9, "linestyle": "none"}
                    point = [result.chosen.count], [result.verified.damage]
                    axes.plot(*point, **verified, label="the plan, verified on other data")
            else:
                axes.axhline(1.0, color="#767676", linewidth=1, label=result.baseline)
                for length in getattr(result.curve[0], name):
                    known = [name == "cache" or length not in one.unsure for one in result.curve]
                    axes.plot(table[f"{name}_at_{length}"].where(known), marker="s", label=f"{int(length):,} tokens")
            if name == limited and result.conclusive:
                limit = budget.limit / (100 if name == "cache" else 1)
                axes.axhline(limit, color="black", linestyle="--", label=f"budget: {budget.text}")
            axes.legend()
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel(f"{result.part} converted to {result.attention} (of {result.total})")
        return png(figure)

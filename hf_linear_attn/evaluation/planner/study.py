"""The measurements of a plan: transfer, single layers, the walk from exact to linear, times, the check at the end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import load_file, save
from transformers import PreTrainedModel

from ...integration.attention import SUBMODULE, exact_attention
from ...integration.discovery import self_attention
from ...patching import CONFIG_FIELD
from ...training.transfer import transfer_attention
from ..report import write_aside
from ..speed import LONGEST_WAIT, model_speed
from ..study import Progress
from .amounts import Amounts
from .budget import Budget, Kind, damage
from .material import Material
from .record import Record
from .search import SEARCHES, effort

#: The learned parts of all layers, beside the report: a run that is taken up again does not train them anew.
LEARNED = "learned.safetensors"

#: Name of the patched model in a table of times.
LINEAR = "linear"


class PlanStudy:
    """Finds the layers to convert. What was measured lies in `record`; `run` returns what follows from it.

    exact: the model as it was. patched: a copy with the mechanism in every layer that can have it. timed: the copy that
    is timed (another one where a mechanism must be built for longer inputs).
    """

    def __init__(
        self,
        exact: PreTrainedModel,
        patched: PreTrainedModel,
        timed: PreTrainedModel,
        *,
        kind: Kind,
        budget: Budget,
        material: Material,
        amounts: Amounts,
        search: str,
        record: Record,
        progress: Progress,
    ) -> None:
        self.exact, self.patched, self.timed = exact.eval(), patched.eval(), timed.eval()
        self.kind, self.budget, self.unit = kind, budget, budget.damage_unit(kind)
        self.material, self.amounts, self.search = material, amounts, search
        self.record, self.progress = record, progress
        self.baseline = str(exact.config._attn_implementation)
        self.candidates = sorted(int(index) for index in getattr(patched.config, CONFIG_FIELD)["layers"])
        self.names = [layer.name for layer in self_attention(patched)]
        self.notes: list[str] = []
        self._done = 0

    def run(self) -> dict[str, Any]:
        """Everything, as the parts of the report that follow from the measurements."""
        self.transfer()
        layers = self.single_layers()
        path = self.path()
        curve = [self.point(path, count) for count in range(len(path) + 1)]
        self.speed(curve)
        chosen = self.choose(curve)
        chosen.update(self.verify(chosen))
        return {"layers": layers, "path": path, "curve": curve, "choice": chosen, "notes": self.notes}

    def only(self, model: PreTrainedModel, layers: Sequence[int]) -> AbstractContextManager[None]:
        """Context manager: of a patched model, only these layers are linear."""
        return exact_attention(model, [index for index in range(len(self.names)) if index not in layers])

    # ---------------------------------------------------------------------------------------------- learning

    def transfer(self) -> None:
        """Train the learned parts of all layers, once: each sees the exact model's hidden states, whatever the others
        are, so that one run serves every choice of layers."""
        path = self.record.path.parent / LEARNED
        modules = {name: held for name, held in self.patched.state_dict().items() if f".{SUBMODULE}." in f".{name}"}
        learned = any(f".{SUBMODULE}." in f".{name}" for name, _ in self.patched.named_parameters())
        if not learned or not self.amounts.steps:
            return
        if self.record.data["transfer"] is not None and path.is_file():
            self.patched.load_state_dict(load_file(path), strict=False)
            return
        self.record.forget()  # measured on parts that are lost
        steps = self.amounts.steps
        self.progress.start("attention transfer of all layers", steps)
        torch.manual_seed(self.amounts.seed)
        done = transfer_attention(
            self.patched,
            self.material.train,
            steps=steps,
            held_out=self.material.validation,
            evaluate_every=max(steps // self.amounts.evaluations, 1),
            progress=lambda step, steps, loss: self.progress.update(step, f"loss {loss:.3f}"),
        )
        held = self.patched.state_dict()
        write_aside(path, save({name: held[name].contiguous().cpu() for name in modules}))
        self.record.transferred(asdict(done))
        self.progress.say(f"transfer: {steps} steps in {done.seconds:.0f} s, kept step {done.best_step}")

    # ---------------------------------------------------------------------------------------------- quality

    def measure(self, layers: Sequence[int]) -> dict[str, Any]:
        """The model with these layers linear, on the data of the choice."""

        def measure() -> dict[str, Any]:
            with self.only(self.patched, layers):
                return self.material.choice(self.patched)

        found = self.record.measured("measured", key_of(layers), measure)
        self._done = max(self._done, len(self.record.data["measured"]))
        self.progress.update(self._done, f"layers {key_of(layers)}")
        return found

    def single_layers(self) -> list[dict[str, Any]]:
        """Every layer by itself: one is linear, the others are exact."""
        self.progress.start("single layers, and the walk", effort(self.search, len(self.candidates)))
        exact = self.reference("choice")
        rows = []
        for layer in self.candidates:
            own = self.measure([layer])
            rows.append({"index": layer, "name": self.names[layer], **self._quality(exact, own)})
        return rows

    def reference(self, part: str) -> dict[str, Any]:
        """The exact model on the data of the choice or of the verification."""
        return self.record.measured("exact", part, lambda: getattr(self.material, part)(self.exact))

    def path(self) -> list[int]:
        """The layers in the order in which they are converted."""
        return SEARCHES[self.search](self.candidates, lambda layers: self.measure(layers)["divergence"])

    def point(self, path: Sequence[int], count: int) -> dict[str, Any]:
        """The curve where `count` layers are linear: measured together, not summed up from single ones."""
        exact, layers = self.reference("choice"), sorted(path[:count])
        own = self.measure(layers) if count else {**exact, "divergence": 0.0}
        return {
            "count": count,
            "share": count / len(self.names),
            "added": path[count - 1] if count else None,
            "layers": layers,
            **self._quality(exact, own),
            "speedup": {},
        }

    def _quality(self, exact: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        return {
            "divergence": own["divergence"],
            "score": own[self.kind.score],
            "damage": damage(self.unit, exact, own),
        }

    # ---------------------------------------------------------------------------------------------- speed

    def speed(self, curve: list[dict[str, Any]]) -> None:
        """Time every point beside the exact model, at every length."""
        last: tuple[int, float] | None = None
        for length in self.amounts.lengths:
            expected = 0.0 if last is None else 8 * last[1] * (length / last[0]) ** 2
            if expected > LONGEST_WAIT and length != self.budget.length:
                self.notes.append(f"Not timed, for want of time: {length:,} tokens (~{expected:.0f} s for each point).")
                continue
            self.progress.start(f"time of a forward pass of {length:,} tokens", len(curve) - 1)
            for point in curve[1:]:
                timed = self.time(point["layers"], length, "timed", self.amounts.seconds)
                point["speedup"][str(length)] = timed[LINEAR]["speedup"]
                last = (length, timed[self.baseline]["median"])
                self.progress.update(point["count"], f"{point['count']} layers: {timed[LINEAR]['speedup']:.2f}×")
            curve[0]["speedup"][str(length)] = 1.0

    def time(self, layers: Sequence[int], length: int, section: str, seconds: float) -> dict[str, Any]:
        """One forward pass (batch 1) with these layers linear and of the exact model, in turns."""

        def measure() -> dict[str, Any]:
            with self.only(self.timed, layers):
                table = model_speed(
                    {self.baseline: self.exact, LINEAR: self.timed},
                    self.material.tokens,
                    [length],
                    baseline=self.baseline,
                    budget=seconds,
                    announce=lambda step, note: None,
                )
            return {name: asdict(rows[0]) for name, rows in table.rows.items()}

        return self.record.measured(section, f"{length} tokens, {key_of(layers)}", measure)

    # ---------------------------------------------------------------------------------------------- choice

    def choose(self, curve: list[dict[str, Any]]) -> dict[str, Any]:
        """The most layers within a budget of quality, the fewest that reach one of speed; where there are none, the
        point that comes nearest, with `found` false."""
        rows = curve[1:]
        if self.budget.unit is not None:
            known = [row for row in rows if row["damage"] is not None]
            within = [row for row in known if row["damage"] <= self.budget.amount]
            chosen = within[-1] if within else min(known or rows[:1], key=lambda row: row["damage"] or 0.0)
        else:
            length = str(self.budget.length)
            within = [row for row in rows if row["speedup"][length] >= self.budget.amount]
            chosen = within[0] if within else max(rows, key=lambda row: row["speedup"][length])
        return {
            "budget": self.budget.text,
            "unit": self.unit.name,
            "found": bool(within),
            "count": chosen["count"],
            "layers": chosen["layers"],
            "damage": chosen["damage"],
            "speedup": chosen["speedup"],
        }

    def verify(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """The plan as a whole, on data (and in times) that the choice has not seen."""
        layers = chosen["layers"]
        self.progress.start("verification")

        def measure() -> dict[str, Any]:
            with self.only(self.patched, layers):
                return self.material.verification(self.patched)

        exact = self.reference("verification")
        own = self.record.measured("verified", key_of(layers), measure)
        found: dict[str, Any] = {"verified": self._quality(exact, own), "verified_exact": exact[self.kind.score]}
        lost = found["verified"]["damage"]
        if self.budget.unit is not None:
            holds = lost is not None and lost <= self.budget.amount
        else:
            assert self.budget.length is not None
            timed = self.time(layers, self.budget.length, "verified", 3 * self.amounts.seconds)[LINEAR]
            found["verified"]["speedup"] = {str(self.budget.length): timed["speedup"]}
            holds = timed["speedup"] >= self.budget.amount
        return {**found, "met": chosen["found"] and holds}


def key_of(layers: Sequence[int]) -> str:
    """The layers of a choice as text: `0,2,3`."""
    return ",".join(map(str, sorted(layers))) or "none"

"""Error of random features as estimators of the softmax kernel, measured and published.

    python -m recipes.benchmarks.random_feature_statistics

Needs the `demo` extra (for the plot); under a minute on one core. Writes recipes/results/random-features.json and
random-features.png. Features of `favor` and `favor+` in all forms estimate exp(q·k) for q and k of length 1, many times
with new draws. Expect: measured errors of independent features lie on the published curves (Choromanski et al. 2020,
arXiv:2009.14794); orthogonal features lie below them; positive features are best where ‖q + k‖ is small, which is where
softmax weights are small, trigonometric ones where it is large; more features help by 1/√m.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hf_linear_attn.utils.environment import environment

from .random_features import FORMS, kernel_estimates, kernel_variance, pairs_at

#: Okabe and Ito's palette, which stays distinct to colour-blind readers, and a marker for each.
LOOKS = {
    "sin and cos": ("#0072B2", "o"),
    "cos with phase": ("#56B4E9", "D"),
    "positive": ("#D55E00", "s"),
    "hyperbolic": ("#009E73", "^"),
}
RADIUS = 1.0
#: Measured up to here: beyond, squared errors of positive features have tails too heavy for a sample mean.
MEASURED = [0.1, 0.4, 0.7, 1.0, 1.3]
FEATURES = [8, 16, 32, 64, 128]


def relative_errors(
    form: str, lengths: list[float], features: int, orthogonal: bool, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for each `‖q + k‖`: root mean square of `estimate / exp(q·k) - 1`, and the published value."""
    query, key = pairs_at(torch.tensor(lengths), RADIUS, arguments.dim)
    truth = (query * key).sum(dim=-1).exp()
    drawn = kernel_estimates(
        form, query, key, features, draws=arguments.draws, seed=arguments.seed, orthogonal=orthogonal
    )
    errors = drawn / truth - 1
    published = kernel_variance(form, query, key, features).sqrt() / truth
    return [
        {
            "form": form,
            "orthogonal": orthogonal,
            "num_features": features,
            "norm_of_sum": length,
            "mean_error": float(errors[:, index].mean()),
            "standard_error_of_mean": float(errors[:, index].std() / len(errors) ** 0.5),
            "rms_error": float(errors[:, index].square().mean().sqrt()),
            "published_rms_error_of_independent_rows": float(published[index]),
        }
        for index, length in enumerate(lengths)
    ]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    choices = [(form, orthogonal) for form in FORMS for orthogonal in (False, True)]
    by_length = [row for choice in choices for row in relative_errors(choice[0], MEASURED, 64, choice[1], arguments)]
    by_size = [
        row
        for form, orthogonal in choices
        for features in FEATURES
        for row in relative_errors(form, [1.0], features, orthogonal, arguments)
    ]
    settings = {"draws": arguments.draws, "dim": arguments.dim, "seed": arguments.seed, "radius": RADIUS}
    return {
        "format_version": 1,
        "settings": settings,
        "by_length": by_length,
        "by_size": by_size,
        "environment": environment(torch.device("cpu")),
    }


def draw(report: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    lengths = torch.linspace(0.02, 1.98, 99)
    pairs = pairs_at(lengths, RADIUS, report["settings"]["dim"])
    truth = (pairs[0] * pairs[1]).sum(dim=-1).exp()
    for form, (color, marker) in LOOKS.items():
        left.plot(lengths, kernel_variance(form, *pairs, 64).sqrt() / truth, color=color, label=form)
        for axes, rows, key in ((left, report["by_length"], "norm_of_sum"), (right, report["by_size"], "num_features")):
            for orthogonal in (False, True):
                chosen = [row for row in rows if row["form"] == form and row["orthogonal"] is orthogonal]
                axes.plot(
                    [row[key] for row in chosen],
                    [row["rms_error"] for row in chosen],
                    color=color,
                    marker=marker,
                    markersize=6,
                    linestyle="none" if axes is left else ":" if orthogonal else "-",
                    markerfacecolor="white" if orthogonal else color,
                )
    left.set(
        title="64 features (lines: published, marks: measured)", xlabel="‖q + k‖, for q and k of length 1 (0: opposite)"
    )
    dim = report["settings"]["dim"]
    right.set(
        title="By number of features, ‖q + k‖ = 1 (all measured)", xlabel=f"features m (head size {dim})", xscale="log"
    )
    right.set_xticks(FEATURES, [str(count) for count in FEATURES])
    right.minorticks_off()
    for axes in (left, right):
        axes.set(yscale="log", ylabel="relative error of one weight (rms)")
        axes.grid(color="#E3E3E3", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylim(1e-3, 2e0)
    for filled, label in ((True, "measured, independent rows"), (False, "measured, orthogonal rows")):
        face = "#555555" if filled else "white"
        left.plot([], [], "o", color="#555555", markerfacecolor=face, label=label)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000, help="draws of the features for each point (default: 2000)")
    parser.add_argument("--dim", type=int, default=16, help="head size (default: 16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("recipes/results"), help="folder for the results")
    arguments = parser.parse_args(argv)
    report = measure(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    (arguments.out / "random-features.json").write_text(text + "\n", encoding="utf-8")
    draw(report, arguments.out / "random-features.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

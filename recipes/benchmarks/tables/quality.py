"""Tables of quality after conversion: GLUE, fidelity, encoders, long inputs."""

import re
from collections.abc import Sequence

import pandas as pd

from hf_linear_attn.study.tables import EMPTY, to_markdown
from hf_linear_attn.utils.formatting import fixed

from ... import sentence_encoder
from ...result_files import ROOT, read_json
from .text import CODE, Results, mean

#: Stages of a conversion on GLUE, and what the table calls them; the last one has the name of the row's variant.
STAGES = {"teacher": "as given", "patched": "untrained", "transferred": "after transfer", "distilled": None}
#: The columns of the table.
TASK_TITLES = {
    "stsb": "STS-B, Pearson",
    "mrpc": "MRPC, accuracy",
    "rte": "RTE, accuracy",
    "cola": "CoLA, Matthews",
    "sst2": "SST-2, accuracy",
}


def glue_scores(path: str) -> pd.DataFrame:
    """Return tidy scores: a row for each mechanism, stage, task and seed, with the main metric of the task."""
    tidy = []
    for row in read_json(path)["rows"]:
        for stage, title in STAGES.items():
            if stage in row and (stage != "teacher" or row["mechanism"] == "softmax"):
                facts = {name: row[name] for name in ("mechanism", "task", "seed", "variant")}
                tidy.append({**facts, "stage": title or row["variant"], "score": row[stage][row["metric"]]})
    scores = pd.DataFrame(tidy).drop_duplicates(["mechanism", "stage", "task", "seed"], keep="last")
    for name, order in (("mechanism", ()), ("stage", filter(None, STAGES.values()))):
        scores[name] = pd.Categorical(scores[name], [*dict.fromkeys([*order, *scores[name]])])
    return scores.sort_values(["mechanism", "stage"], kind="stable")


def recovered(scores: pd.DataFrame, control: pd.DataFrame) -> str:
    """Return the mean over tasks of the score over the control's, of the seeds that both have."""
    both = scores.merge(control, on=["task", "seed"], suffixes=("", "_control"))
    means = both.groupby("task")[["score", "score_control"]].mean()
    return EMPTY if means.empty else f"{100 * (means['score'] / means['score_control']).mean():.1f} %"


def glue_table(path: str = "glue.json", stages: Sequence[str] = ()) -> str:
    """Mechanisms (at some stages, or at all) by tasks: the metric, and the share of the control's that is recovered.

    Stages before the last training are compared with the control after its distillation.
    """
    scores, lines = glue_scores(path), []
    tasks, variants = scores["task"].unique(), set(scores["variant"])
    for (mechanism, stage), group in scores.groupby(["mechanism", "stage"], observed=True):
        if stages and stage not in stages:
            continue
        line = {"mechanism": CODE(mechanism)} | ({} if len(stages) == 1 else {"": stage})
        for task in tasks:
            line[TASK_TITLES[task]] = mean(group[group["task"] == task]["score"], 1, 100)
        control = stage if stage in variants else "distilled"
        control_scores = scores[(scores["mechanism"] == "softmax") & (scores["stage"] == control)]
        lines.append({**line, "recovered": recovered(group, control_scores)})
    return to_markdown(pd.DataFrame(lines), text_columns=1 if len(stages) == 1 else 2)


def fidelity_tables() -> str:
    """One table for each checkpoint: every mechanism before and after attention transfer."""
    columns = {
        "kl": ("KL, nats", 2),
        "output_error": ("output error", 2),
        "final_cosine": ("final cosine", 3),
        "perplexity": ("perplexity", 2),
        "sentence_cosine": ("sentence cosine", 3),
    }
    parts = []
    for model, rows in Results.read("fidelity.json").rows.groupby("model", sort=False):
        lines = []
        for attention, group in rows.groupby("attention", sort=False):
            line = {model: CODE(attention)}
            for name, (title, digits) in columns.items():
                if rows[name].notna().any():
                    line[title] = "→".join(fixed(one, digits) for one in group[name].dropna()) or EMPTY
            lines.append(line)
        parts.append(to_markdown(pd.DataFrame(lines), text_columns=None))
    return "\n\n".join(parts)


def terms_quality_table() -> str:
    """Tiny models with terms in their logits: what each stage of the conversion makes of their metric."""
    names = {
        "deberta": "DeBERTa on SST-2",
        "t5": "T5, words that come again",
        "t5-window-alone": "the same, nothing outside of windows",
    }
    titles = {
        "teacher": "exact",
        "without_attention": "without attention",
        "patched": "calibrated only",
        "transferred": "after attention transfer",
        "converted": "as saved",
        "control": "exact, trained as long",
    }
    lines = []
    for row in read_json("terms.json")["rows"]:
        cells = {title: f"{row[stage][row['metric']]:.3f}" for stage, title in titles.items() if stage in row}
        lines.append({"model and task": names[row["name"]], "metric": row["metric"], **cells})
    return to_markdown(pd.DataFrame(lines), text_columns=2)


def encoder_start_table(lengths: Sequence[int] = (), outside: Sequence[str] = (), metric: str = "cosine") -> str:
    """How near encoders come to exact ones by what is outside of their windows: the mean over seeds."""
    rows = Results.read("encoder-start.json").rows
    rows = rows[rows["length"].isin(lengths or rows["length"]) & rows["outside"].isin(outside or rows["outside"])]
    rows = rows.assign(tokens=rows["length"].map("{:,}".format), text=rows["text"].str.partition(".")[0])
    table = rows.pivot_table(values=metric, index=["tokens", "text"], columns="outside", sort=False)
    table = table.map(lambda number: fixed(number, 4), na_action="ignore").reset_index()
    return to_markdown(table, text_columns=2)


def sentence_encoder_tables() -> str:
    """How near the converted sentence encoder is to the exact one, and its search in long documents."""
    return "\n\n".join(map(to_markdown, sentence_encoder.tables(read_json("sentence-encoder/results.json"))))


def evaluation_summary(folder: str = "recipes/results/evaluate-minilm") -> str:
    """The table of a committed report of `evaluate`, and its plot of quality against speed."""
    report = (ROOT / folder / "report.md").read_text(encoding="utf-8")
    head, table = report.split("\n\n")[1], report.partition("## All mechanisms\n\n")[2].partition("\n\n")[0]
    table = re.sub("-{3,}", "---", re.sub(" {2,}", " ", table))
    links = f"[The whole report]({folder}/report.md).", f"![Quality against speed]({folder}/quality_vs_speed.png)"
    return "\n\n".join([head, table, *links])


def proteins_table(strata: Sequence[str] = ("> 1,024", "> 2,048")) -> str:
    """Quality beside costs, one row for each variant and length; exact attention first."""
    rows = Results.read("proteins.json").rows
    costs = Results.read("proteins-costs.json").rows
    known, lines = costs.set_index(["variant", "length"]), []
    order = sorted(rows["variant"].unique(), key=lambda name: (name != "softmax", "softmax" not in name))
    rows["variant"] = pd.Categorical(rows["variant"], order)
    for (variant, pieces, length), group in rows.groupby(["variant", "pieces", "length"], observed=True):
        line = {"attention": CODE(variant), "residues seen": f"{'in pieces of ' * pieces}{length:,}"}
        for name in strata:
            count = int(rows[f"strata.{name}.rows"].iloc[0])
            line[f"MCC, {name} ({count:,})"] = _score(group, f"strata.{name}.mcc")
        if (variant, length) in known.index and not pieces:
            cost = known.loc[(variant, length)]
            line |= {f"{kind}, s": f"{cost[f'{kind}.seconds_per_1000']:.0f}" for kind in ("training", "inference")}
            line["memory added"] = f"{cost['peak_bytes'] / 1e6:.0f} MB"
        lines.append(line)
    return to_markdown(pd.DataFrame(lines), text_columns=2)


def _score(group: pd.DataFrame, name: str) -> str:
    """Mean and deviation over seeds; of one seed the error of its bootstrap."""
    values, errors = group[name], group[f"{name}_error"]
    return mean(values, 3) if len(values) > 1 else f"{values.iloc[0]:.3f} ± {errors.iloc[0]:.3f}"

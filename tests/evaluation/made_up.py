"""A report on made-up numbers: what the summary, the verdicts, the plots and the page read."""

from __future__ import annotations

from typing import Any

from hf_linear_attn.evaluation.averages import mean_of, spread_of
from hf_linear_attn.evaluation.speed import FREE
from hf_linear_attn.evaluation.speed_study import speed_dict
from hf_linear_attn.evaluation.timing import SpeedTable, Timing
from hf_linear_attn.evaluation.verdicts import conclude, verdicts

LENGTHS = [128, 512, 2048]


def timing(seconds: float, speedup: float) -> Timing:
    return Timing(seconds, 0.9 * seconds, 1.2 * seconds, 5, speedup, 0.9 * speedup, 1.1 * speedup)


def speed_table(speedups: dict[str, list[float]], free: bool) -> SpeedTable:
    """The baseline takes 1 ms at 128 tokens and grows with the square."""
    table = SpeedTable("sdpa")
    for place, length in enumerate(LENGTHS):
        base = 1e-3 * (length / 128) ** 2
        rows = {"sdpa": timing(base, 1.0)}
        rows |= {name: timing(base / held[place], held[place]) for name, held in speedups.items()}
        if free:
            rows[FREE] = timing(base / (2.0 * (place + 1)), 2.0 * (place + 1))
        table.add(length, rows)
    return table


def quality(decoder: bool, score: float, *, kl: float | None = 0.5, cosine: float = 0.9) -> dict[str, Any]:
    """score: loss of a decoder in nats, cosine of sentences of an encoder."""
    layers = [
        {"index": index, "name": f"layer.{index}", "attention": "x", "kl": None if kl is None else [kl, kl / 2]}
        | {"output_error": [0.3, 0.4]}
        for index in range(3)
    ]
    found = {"kl": kl, "output_error": 0.35, "final_cosine": cosine, "tokens": 100, "layers": layers}
    return found | task(decoder, score)


def task(decoder: bool, score: float) -> dict[str, Any]:
    if decoder:
        held = {"perplexity": 2.0**score, "loss": score, "tokens": 99, "context": 64, "stride": 32}
        return {"perplexity": {**held, "by_position": [score] * 8}}
    return {"sentences": {"cosine": score, "cosine_p20": score - 0.1, "same_neighbour": 0.5, "passages": 12}}


def mechanism(name: str, before: dict[str, Any], after: dict[str, Any] | None) -> dict[str, Any]:
    transfer = {
        "steps": 4,
        "tokens": 4000,
        "seconds": 1.5,
        "losses": [1.0, 0.8, 0.7, 0.6],
        "held_out": [[0, 1.1], [4, 0.6]],
        "best_step": 4,
    }
    return {
        "name": name,
        "description": f"what {name} does",
        "paper": "Someone 2020",
        "options": {"size": 3},
        "learned": after is not None,
        "learned_parameters": 0 if after is None else 1234,
        "untrained": before,
        "transfer": None if after is None else transfer,
        "trained": after,
    }


def made_up_report(decoder: bool = False, **model: Any) -> dict[str, Any]:
    """elu is worse than no attention, hedgehog learns, linformer has no distribution and is hurt by transfer."""
    exact, off, bad, start, good = (3.0, 5.0, 6.0, 4.0, 3.2) if decoder else (1.0, 0.4, 0.3, 0.7, 0.95)
    worse = start + 0.1 if decoder else start - 0.1
    speedups = {"elu": [1.2, 2.0, 5.0], "hedgehog": [0.5, 0.8, 3.2], "linformer": [0.2, 0.3, 0.6]}
    decode = None
    if decoder:
        rows = {name: [{**vars(timing(1e-3, 1.0)), "cache_bytes": 640}] * 3 for name in speedups}
        rows["sdpa"] = [{**vars(timing(1e-3 * n, 1.0)), "cache_bytes": 64000 * n} for n in (1, 4, 16)]
        states = dict.fromkeys(speedups, "constant")
        decode = {"baseline": "sdpa", "contexts": LENGTHS, "states": states, "rows": rows}
    report: dict[str, Any] = {
        "format_version": 1,
        "tool": "hf-linear-attn demo",
        "created": "2030-01-02T03:04:05Z",
        "settings": {"quick": True, "steps": 4, "batch_size": 2, "seed": 0},
        "versions": {"hf_linear_attn": "0.1", "torch": "2.0", "transformers": "5.0", "python": "3.11.0"},
        "hardware": {
            "device": "cpu",
            "cpu": "made-up CPU",
            "logical_cpus": 2,
            "threads": 2,
            "load_average_at_start": None,
            "platform": "test",
        },
        "model": {
            "name": "made-up",
            "source": "made-up",
            "repr": "'made-up'",
            "class": "GPT2LMHeadModel" if decoder else "BertModel",
            "auto_class": "AutoModelForCausalLM" if decoder else "AutoModel",
            "kind": "decoder" if decoder else "encoder",
            "layers": 3,
            "heads": 2,
            "key_value_heads": 2,
            "head_dim": 8,
            "parameters": 12345,
            "positions": 512,
            "position_table": True,
            "dtype": "float32",
            **model,
        },
        "text": {
            "source": "made-up text",
            "sha256": "00",
            "characters": 1000,
            "train_documents": 8,
            "held_out_documents": 2,
            "sequence_length": 64,
            "train_sequences": 20,
            "train_tokens": 1000,
            "validation_sequences": 2,
            "held_out_sequences": 12,
            "held_out_tokens": 600,
            "fidelity_sequences": 4,
            "fidelity_tokens": 200,
        },
        "exact": {**task(decoder, exact), "unrelated_cosine": 0.25},
        "control": task(decoder, off),
        "mechanisms": [
            mechanism("elu", quality(decoder, bad), None),
            mechanism("hedgehog", quality(decoder, start), quality(decoder, good, kl=0.1, cosine=0.98)),
            mechanism("linformer", quality(decoder, start, kl=None), quality(decoder, worse, kl=None)),
        ],
        "speed": {
            "baseline": "sdpa",
            "model": speed_dict(speed_table(speedups, True)),
            "layer": speed_dict(speed_table(speedups, False)),
        },
        "decode": decode,
        "seconds": 61.0,
    }
    report["verdicts"] = verdicts(report)
    return report


def made_up_evaluation(kind: str = "classifier") -> dict[str, Any]:
    """As `evaluate` writes it: memory and operations, a converted checkpoint with three seeds, a tuned exact model,
    advice; of a classifier, decoder or encoder."""
    decoder = kind == "decoder"
    report = made_up_report(decoder)
    report["model"]["kind"] = kind
    report["settings"].update(length=500, seeds=[0, 1, 2])
    report["backend"] = "native"
    report["store"] = {"file": "measurements.jsonl", "measurements": 40, "elsewhere": 2, "runs": [{"run": "a"}] * 2}
    score = {"classifier": 0.7, "decoder": 3.3, "encoder": 0.9}[kind]
    trained = [_judged(quality(decoder, score + 0.01 * seed), kind) for seed in range(3)]
    group = {**mechanism("hedgehog (converted)", trained[0], None), "attention": "hedgehog", "origin": "converted"}
    group.update(untrained=None, trained=mean_of(trained), trained_spread=spread_of(trained), seeds=[0, 1, 2])
    group["runs"] = [{"folder": f"run{seed}", "trained": held} for seed, held in enumerate(trained)]
    for held in report["mechanisms"]:
        for state in ("untrained", "trained"):
            if held[state]:
                held[state] = _judged(held[state], kind)
    report["mechanisms"].append(group)
    whole = report["speed"]["model"]
    whole["rows"][group["name"]] = [dict(row) for row in whole["rows"]["hedgehog"]]
    whole["crossover"][group["name"]] = whole["crossover"]["hedgehog"]
    report["speed"]["training"] = speed_dict(speed_table({"elu": [0.9, 1.5, 3.0]}, True))
    for place, rows in enumerate(whole["rows"].values()):
        for row, length in zip(rows, LENGTHS, strict=True):
            row.update(
                memory=1000 * length * (place + 1), flops=10**6 * length, tokens_per_second=length / row["median"]
            )
    report["speed"]["throughput"] = {"batch": 8, **speed_dict(speed_table({"elu": [1.1, 2.5, 6.0]}, True))}
    report["speed"]["throughput"]["notes"] = ["Not timed, for want of memory: 8,192 tokens (made up)."]
    for rows in report["speed"]["throughput"]["rows"].values():
        for row, length in zip(rows, LENGTHS, strict=True):
            row.update(memory=8000 * length, tokens_per_second=8 * length / row["median"])
    for name in [held["name"] for held in report["mechanisms"]][1:]:
        for part in ("rows", "crossover"):
            report["speed"]["throughput"][part][name] = report["speed"]["throughput"][part]["elu"]
    if decoder:
        report["speed"]["prefill"] = {**whole, "notes": ["Not timed, for want of time: 8,192 tokens (made up)."]}
        report["decode"]["rows"][group["name"]] = report["decode"]["rows"]["hedgehog"]
        for rows in report["decode"]["rows"].values():
            rows[:] = [{**row, "tokens_per_second": 1 / row["median"]} for row in rows]
        report["decode"]["throughput"] = {**report["decode"], "batch": 8, "notes": ["Not timed: made up."]}
    for name in ("exact", "control"):
        report[name] = _judged(report[name], kind)
    tuned = _judged(quality(decoder, {"classifier": 0.8, "decoder": 3.1, "encoder": 1.0}[kind]), kind)
    report["reference"] = {"name": "softmax (tuned)", "quality": tuned}
    if kind == "classifier":
        report["text"] = {**report["text"], "task": "sst2", "metrics": ["accuracy"], "rows": {"": 50}}
    conclude(report)
    return report


def made_up_tasks() -> dict[str, Any]:
    """A classifier's report with a further task, whose model keeps a tenth less."""
    report = made_up_evaluation("classifier")
    report["settings"]["dtype"] = "bfloat16"
    facts = {name: report["text"][name] for name in ("sequence_length", "train_sequences")}
    facts |= {"task": "rte", "metrics": ["accuracy"], "rows": {"": 20}, "sha256": "01", "model": "a model for rte"}
    report["tasks"] = [facts]

    def add(held: Any, part: float) -> None:
        if held and "task" in held:
            held["task:rte"] = {**held["task"], "score": part * held["task"]["score"]}

    add(report["exact"], 1.0)
    add(report["control"], 1.0)
    add(report["reference"]["quality"], 1.0)
    for held in report["mechanisms"]:
        for state in ("untrained", "trained"):
            add(held[state], 0.9)
            add(held.get(f"{state}_spread"), 0.9)
            for run in held.get("runs", ()):
                add(run.get(state), 0.9)
    conclude(report)
    return report


def _judged(held: dict[str, Any], kind: str) -> dict[str, Any]:
    """With the measures of a kind: the sentence cosine becomes the score of a task, or a correlation beside it."""
    if kind == "decoder":
        return held
    score = held["sentences"]["cosine"]
    if kind == "encoder":
        return {**held, "sts": {"spearmanr": score - 0.1, "pearson": score - 0.2, "pairs": 20}}
    rest = {name: value for name, value in held.items() if name not in ("sentences", "unrelated_cosine")}
    return {**rest, "task": {"score": score, "accuracy": score, "divergence": 0.1, "examples": 50}}

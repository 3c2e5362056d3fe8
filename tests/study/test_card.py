"""The model card: the student beside its teacher, tables, a header that the Hub can read, nothing of this disk."""

from __future__ import annotations

import ast
import copy
import re
from dataclasses import asdict, replace

import pytest
import yaml

from hf_linear_attn.data.config import DataConfig
from hf_linear_attn.measure.metric import Score
from hf_linear_attn.patching import patch_report
from hf_linear_attn.study import card as cards
from hf_linear_attn.study.card import with_error
from hf_linear_attn.study.conversion_result import (
    ConversionResult,
    HeadChoice,
    ModelFacts,
    RecallPair,
    Scores,
    SpeedPair,
)
from hf_linear_attn.training.options import ConvertConfig, FinetuneConfig
from tests.small import patched
from tests.tiny_models import BERT


def result(
    state=None, metric="accuracy", higher=True, layers=(), constant=None, budget=None, agreement=False, parts=None
) -> ConversionResult:
    """A result with these scores by name; `recall`, `choice` and `speed` are parts of it."""
    state = dict(state or {})
    more = {name: state.pop(name, None) for name in ("recall", "choice", "speed")}
    score = Score("", metric, metric, higher, constant_answer=constant, is_agreement=agreement)
    return ConversionResult(
        config={"budget": budget},
        model=ModelFacts("BertForSequenceClassification", layers=list(layers)),
        score=score,
        data={"train_rows": 12345, "validation_rows": 67},
        environment={
            "versions": {"torch": "2.1", "transformers": "5.0"},
            "hardware": {"device": "cpu", "cpu": "a chip"},
        },
        scores=Scores(**state),
        linear_parts=parts,
        processes=2,
        **more,
    )


def error(value: float, rows: int = 67) -> float:
    """That of an accuracy."""
    share = (value * rows + 2) / (rows + 4)
    return (share * (1 - share) / (rows + 4)) ** 0.5


def accuracy(value: float, f1: float | None = None) -> dict[str, float]:
    return {"accuracy": value, "accuracy_stderr": error(value), **({} if f1 is None else {"f1": f1}), "rows": 67}


def layers():
    return [asdict(layer) for layer in patch_report(patched("hedgehog", BERT)).layers]


def test_layers_say_what_their_linear_part_is_worth():
    parts = [{"layer": 0, "worth": 0.01234, "kept": True}, {"layer": 1, "worth": -0.5, "kept": False}]
    card = cards.model_card(ConvertConfig(model="m", task_type="classification"), result(layers=layers(), parts=parts))
    assert "| worth of the linear part |" in card
    assert re.search(r"^\| 0 \| hedgehog \|.*\| \+0.0123 \|$", card, re.MULTILINE)
    assert re.search(r"^\| 1 \| hedgehog \|.*\| -0.5000, closed \|$", card, re.MULTILINE)


def test_the_exact_heads_of_each_layer_are_named():
    mixed, exact = ({**layer, "exact_heads": heads} for layer, heads in zip(layers(), ((1,), ()), strict=True))
    card = cards.model_card(
        ConvertConfig(model="m", task_type="classification"), result(layers=[mixed, {**exact, "attention": "softmax"}])
    )
    assert re.search(r"^\| 0 \| hedgehog \| 1 \|", card, re.MULTILINE)
    assert re.search(r"^\| 1 \| softmax \| all \|", card, re.MULTILINE)


@pytest.mark.parametrize(
    ("budget", "measured"),
    [
        ("25% cache at 8192", None),  # counted, not measured
        ("5% perplexity", "+10.00% perplexity, which is beyond"),
        ("20% perplexity", "+10.00% perplexity, which is within"),
        ("80% recall at 2048", "-25% recall, which is beyond"),
        ("2x at 2048", "3.01x, which is within"),
        ("2x at 4096", None),  # this length was not timed
    ],
)
def test_a_budget_is_compared_with_the_model_as_saved(budget, measured):
    recall = {"low": 0.5, "high": 0.9, "rows": 48}
    state = {
        "choice": HeadChoice({}, [], "windows of 256 tokens"),
        "teacher": {"perplexity": 20.0},
        "distilled": {"perplexity": 30.0},
        "converted": {"perplexity": 22.0},
        "recall": RecallPair("niah_multikey_1", 2048, {"recall": 0.8, **recall}, {"recall": 0.6, **recall}),
        "speed": SPEED,
    }
    card = cards.model_card(
        ConvertConfig(model="m", task_type="causal-lm", budget=budget),
        result(state, "perplexity", False, budget=budget),
    )
    assert f"For {budget}: windows of 256 tokens." in card
    assert (f"As saved: {measured} the budget." in card) if measured else ("As saved" not in card)


def test_a_speedup_that_is_lost_in_noise_is_not_said_to_be_within_a_budget():
    noisy = copy.deepcopy(SPEED)
    noisy.student[1] |= {"speedup": 2.5, "speedup_p20": 0.8, "speedup_p80": 2.9}
    state = {"choice": HeadChoice({}, [], "windows of 256 tokens"), "speed": noisy}
    card = cards.model_card(
        ConvertConfig(model="m", task_type="causal-lm", budget="2x at 2048"), result(state, budget="2x at 2048")
    )
    assert "For 2x at 2048: " in card
    assert "As saved" not in card
    assert "speed of the saved model at 2,048 tokens is not measurable: nothing says whether it is within" in card


def timing(median, ratio, low, high):
    return {"seconds": median, "speedup": ratio, "speedup_p20": low, "speedup_p80": high}


SPEED = SpeedPair(
    [512, 2048],
    [timing(0.1, 1.0, 1.0, 1.0), timing(0.9, 1.0, 1.0, 1.0)],
    [timing(0.2, 0.5, 0.45, 0.55), timing(0.3, 3.01, 2.9, 3.2)],
)
STATE = {
    "teacher": accuracy(0.8, 0.7),
    "patched": accuracy(0.5, 0.1),
    "transferred": accuracy(0.6, 0.3),
    "distilled": accuracy(0.72, 0.6),
    "converted": accuracy(0.72, 0.6),
    "speed": SPEED,
}


@pytest.mark.parametrize(
    ("metric", "higher", "teacher", "student", "expected"),
    [
        ("accuracy", True, 0.8, 0.72, "This is 90.0 % of the teacher's accuracy."),
        ("accuracy", True, 0.8, 0.88, "The accuracy is better than the teacher's, 0.88 ± 0.04 against 0.80 ± 0.05."),
        ("matthews_correlation", True, 0.5, -0.1, "This is -20.0 % of the teacher's matthews_correlation."),
        ("perplexity", False, 20.0, 25.0, "The perplexity is 25.0 % above the teacher's."),
        ("perplexity", False, 20.0, 16.0, "The perplexity is better than the teacher's, 16.00 against 20.00."),
        # A share of nothing, or of less than nothing, says nothing.
        ("matthews_correlation", True, 0.0, 0.3, ""),
        ("matthews_correlation", True, -0.1, 0.3, ""),
        ("pearson", True, float("nan"), 0.3, ""),
        ("pearson", True, 0.3, float("nan"), ""),
        ("perplexity", False, 20.0, float("inf"), ""),
    ],
)
def test_the_student_beside_its_teacher(metric, higher, teacher, student, expected):
    values = [accuracy(value) if metric == "accuracy" else {metric: value} for value in (teacher, student)]
    state = {"teacher": values[0], "converted": values[1]}
    assert cards.comparison(result(state, metric, higher)) == expected
    state["distilled"] = state["converted"]
    control = "The teacher was not trained in the last stage; `--control` trains it as long."
    assert cards.comparison(result(state, metric, higher)) == (expected and f"{expected} {control}")


def test_no_control_of_embeddings_is_advised():
    """An exact model that learns its own embeddings stays what it is."""
    state = {"teacher": {"cosine": 1.0}, "distilled": {"cosine": 0.9}, "converted": {"cosine": 0.9}}
    assert cards.comparison(result(state, "cosine", agreement=True)) == "This is 90.0 % of the teacher's cosine."


@pytest.mark.parametrize(("teacher", "valid"), [(0.55, False), (0.72, False), (0.76, True)])
def test_a_teacher_at_the_level_of_the_most_frequent_answer(teacher, valid):
    """Of 67 rows, three standard errors of a difference are 0.23 at 0.72 and 0.22 at 0.76."""
    state = {"teacher": accuracy(teacher), "distilled": accuracy(0.80), "converted": accuracy(0.80)}
    sentence = cards.comparison(result(state, constant=0.5))
    assert ("has not learned the task" in sentence) is not valid
    assert ("better than the teacher's" in sentence) is valid


def test_table_of_results():
    assert cards.results_table(result(STATE)) == [
        "| | accuracy | f1 |",
        "|:---|---:|---:|",
        "| exact attention (the teacher) | 0.80 ± 0.05 | 0.70 |",
        "| patched, nothing trained | 0.50 ± 0.06 | 0.10 |",
        "| after attention transfer | 0.60 ± 0.06 | 0.30 |",
        "| after distillation | 0.72 ± 0.05 | 0.60 |",
        "",
        "This is 90.0 % of the teacher's accuracy. The teacher was not trained in the last stage; `--control` trains "
        "it as long.",
    ]


def test_table_with_missing_metrics():
    state = {"teacher": accuracy(0.5), "patched": {}, "distilled": accuracy(1.0, 0.25)}
    assert cards.results_table(result(state))[:4] == [
        "| | accuracy | f1 |",
        "|:---|---:|---:|",
        "| exact attention (the teacher) | 0.50 ± 0.06 | – |",
        "| after distillation | 1.00 ± 0.02 | 0.25 |",
    ]
    assert cards.results_table(result()) == []
    assert cards.results_table(result({"trained": {"loss": 1.0}}, "loss", False)) == [
        "| | loss |",
        "|:---|---:|",
        "| after fine-tuning | 1.00 |",
    ]


def test_table_of_speed():
    assert cards.speed_table(result(STATE))[2:] == [
        "| 512 | 100.0 ms | 200.0 ms | 0.50 (0.45 to 0.55) |",
        "| 2,048 | 900.0 ms | 300.0 ms | 3.01 (2.90 to 3.20) |",
    ]
    noisy = copy.deepcopy(SPEED)
    noisy.student[1] |= {"speedup": 1.1, "speedup_p20": 0.8, "speedup_p80": 1.4}
    assert cards.speed_table(result({"speed": noisy}))[3].endswith("| not measurable (0.80 to 1.40) |")
    for limit, is_said in ((2048, False), (1024, True)):
        lines = cards.speed_table(result({"speed": replace(SPEED, longest_input=limit)}))
        assert ("made for inputs of up to 1,024 tokens" in lines[-1]) is is_said
    for state in ({}, {"speed": SpeedPair()}):
        assert cards.speed_table(result(state)) == []


def config(model="owner/name", **data):
    return ConvertConfig(
        model=model,
        options={"num_features": 8},
        data=DataConfig(**(data or {"task": "sst2"})),
        output="/home/somebody/secret/out",
    ).completed("classification")


def header(card):
    start, text, body = card.split("---\n", 2)
    assert start == ""
    assert body.startswith("\n# ")
    return yaml.safe_load(text)


def test_card_of_a_conversion():
    card = cards.model_card(config(), result(STATE, layers=layers()))
    assert header(card) == {
        "library_name": "transformers",
        "tags": ["hf-linear-attn", "linear-attention"],
        "base_model": "owner/name",
        "datasets": ["nyu-mll/glue"],
        "pipeline_tag": "text-classification",
        "metrics": ["accuracy"],
        "model-index": [
            {
                "name": "name",
                "results": [
                    {
                        "task": {"type": "text-classification"},
                        "dataset": {"name": "sst2", "type": "nyu-mll/glue"},
                        "metrics": [{"type": "accuracy", "value": 0.72}, {"type": "f1", "value": 0.6}],
                    }
                ],
            }
        ],
    }
    assert "# name with hedgehog attention\n" in card
    for title in ("Use", "Quality", "Speed", "Settings", "Layers", "Data and versions"):
        assert card.count(f"\n## {title}\n\n") == 1
    assert "on cpu (a chip)" in card
    assert "| 1 | hedgehog |" in card
    assert "load_pretrained(" in card
    assert "```yaml\nmodel: owner/name\noptions:\n  num_features: 8\ndata:\n  task: sst2\n```" in card
    assert "train rows: 12,345, validation rows: 67. torch 2.1, transformers 5.0. 2 process(es)." in card
    assert card.endswith("\n")
    assert not card.endswith("\n\n\n")


def test_card_of_a_model_from_scratch():
    config = FinetuneConfig(model_type="gpt2", train_tokenizer=300, data=DataConfig(dataset="text.txt")).completed(
        "classification"
    )
    card = cards.model_card(config, result({"trained": accuracy(0.9)}))
    assert header(card)["model-index"][0]["name"] == "gpt2"
    assert "# gpt2 with exact attention" in card
    assert " from random weights of `gpt2` on `text.txt`." in card


def test_card_of_a_fine_tuned_exact_model():
    tuned = FinetuneConfig(model="owner/name", data=DataConfig(task="sst2")).completed("classification")
    card = cards.model_card(tuned, result({"trained": accuracy(0.9)}))
    assert header(card)["tags"] == ["hf-linear-attn"]
    assert "# name with exact attention" in card
    assert "| after fine-tuning | 0.90 ± 0.04 |" in card
    for absent in ("## Speed", "## Layers", "load_pretrained", "the teacher's"):
        assert absent not in card


@pytest.mark.parametrize("state", [{}, {"teacher": {}, "distilled": {}}])
def test_card_without_numbers(state):
    card = cards.model_card(config(), result(state, layers=layers()))
    assert "## Quality" not in card
    assert "## Speed" not in card


def test_nothing_of_this_disk(tmp_path):
    source, data = tmp_path / "tuned bert", tmp_path / "rows.csv"
    for name in (str(source), f"{source}/"):
        card = cards.model_card(config(name, dataset=str(data), text_columns=("a",)), result(STATE, layers=layers()))
        assert str(tmp_path) not in card
        assert "somebody" not in card
        assert not {"base_model", "datasets", "license"} & header(card).keys()
        assert "# tuned bert with hedgehog attention" in card
        assert "from `tuned bert` on `rows.csv`" in card


@pytest.mark.parametrize(
    "source", ["./here", "../there", "~/models/bert", "~nobody/bert", "a/b/c", "", "räder", "a: b"]
)
def test_the_header_names_repositories_only(source):
    card = cards.model_card(config(source, dataset=source or "x/y z"), result())
    assert not {"base_model", "datasets"} & set(header(card))


def test_a_folder_here_is_no_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert").mkdir()
    assert "base_model" not in header(cards.model_card(config("bert"), result()))
    fields = header(cards.model_card(config("bert-base-uncased", dataset="owner/rows"), result()))
    assert fields["base_model"] == "bert-base-uncased"
    assert fields["datasets"] == ["owner/rows"]


LM_STATE = {
    "teacher": {"loss": 4.0, "loss_stderr": 0.02, "perplexity": 54.6},
    "distilled": {"loss": 3.9, "loss_stderr": 0.02, "perplexity": 49.4},
    "converted": {"loss": 3.9, "loss_stderr": 0.02, "perplexity": 49.4},
}


@pytest.mark.parametrize(
    ("without", "stderr", "valid"),
    [(4.05, 0.001, False), (4.2, 0.02, True), (4.2, 0.1, False)],
    ids=["within-two-percent", "clear", "within-three-errors"],
)
def test_a_language_model_must_be_clearly_better_than_without_attention(without, stderr, valid):
    """By 2 % of its loss and three standard errors of the difference."""
    state = {**LM_STATE, "without_attention": {"loss": without, "loss_stderr": stderr}}
    sentence = cards.comparison(result(state, "loss", False))
    assert ("These data cannot measure attention" in sentence) is not valid
    assert ("better than the teacher's, 3.90 ± 0.02 against 4.00 ± 0.02" in sentence) is valid


def test_the_control_is_what_the_student_is_compared_with():
    state = {**STATE, "control": accuracy(0.9, 0.8)}
    assert cards.comparison(result(state)) == "This is 80.0 % of the control's accuracy."
    table = cards.results_table(result(state))
    assert "| exact attention, trained as long (the control) | 0.90 ± 0.04 | 0.80 |" in table
    state = {**LM_STATE, "control": {"loss": 3.75}}
    assert cards.comparison(result(state, "loss", False)) == "The loss is 4.0 % above the control's."


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("accuracy", {"accuracy": 0.9, "accuracy_stderr": 0.00095}, "0.900 ± 0.001"),
        ("perplexity", {"perplexity": 20.0, "perplexity_stderr": 0.2}, "20.00 ± 0.20"),
        ("f1", {"f1": 0.5}, "0.50"),
        ("pearson", {"pearson": 0.995, "pearson_stderr": 0.00026}, "0.9950 ± 0.0003"),  # 0.000 would be none
        ("loss", {"loss": 2.34567, "loss_stderr": 0.00004}, "2.34567 ± 0.00004"),
        ("mse", {"mse": 0.0034}, "0.0034"),  # 0.00 would be perfect
        ("mse", {"mse": 0.0}, "0.00"),
        ("mse", {"mse": 1e-12}, "0.000000"),
        ("mse", {"mse": float("nan")}, "nan"),
        ("cosine", {"cosine": 0.995}, "0.9950"),
    ],
)
def test_metrics_with_their_errors(metric, values, expected):
    assert with_error(metric, values) == expected


def test_a_folder_is_not_a_name(tmp_path):
    """Which one a card has, by what a person put into the folder, from the most to the least telling."""
    folder = tmp_path / "models--owner--cached" / "snapshots" / "teacher"
    folder.mkdir(parents=True)

    def names(source=folder):
        card = cards.model_card(config(str(source)), result(STATE, layers=layers()))
        fields = header(card)
        return (
            fields.get("base_model"),
            fields["model-index"][0]["name"],
            re.search("^# (.*) with", card, re.M).group(1),
        )

    assert names() == (None, "cached", "cached")
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    assert names(teacher) == (None, "teacher", "teacher")
    (teacher / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}', encoding="utf-8")
    assert names(teacher) == (None, "BertForMaskedLM", "BertForMaskedLM")
    (folder / "README.md").write_text("---\nbase_model: owner/base\n---\n", encoding="utf-8")
    assert names() == ("owner/base", "base", "base")
    tuned = cards.model_card(
        FinetuneConfig(model="owner/base", task_type="classification", data=DataConfig(task="sst2")), result(STATE)
    )
    (folder / "README.md").write_text(tuned.replace("name: base", "name: tuned"), encoding="utf-8")
    assert names() == ("owner/base", "tuned", "tuned")


@pytest.mark.parametrize(
    ("data", "is_pair"),
    [
        ({"task": "rte"}, True),
        ({"task": "sst2"}, False),
        ({"dataset": "owner/rows", "text_columns": ("question", "answer")}, True),
        ({"dataset": "owner/rows"}, False),
    ],
)
def test_the_example_of_a_pair_task_is_a_pair(data, is_pair):
    card = cards.model_card(config(**data), result(layers=layers()))
    example = re.search(r"tokenizer=tokenizer\)\((.*)\)\)$", card, re.M).group(1)
    value = ast.literal_eval(example)
    assert set(value) == {"text", "text_pair"} if is_pair else isinstance(value, str)


def test_the_license_is_that_of_the_base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    assert "license" not in header(cards.model_card(config(str(folder)), result()))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n", encoding="utf-8")
    assert header(cards.model_card(config(str(folder)), result()))["license"] == "apache-2.0"

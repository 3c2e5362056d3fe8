"""The model card: the student beside its teacher, tables, a header that the Hub can read, nothing of this disk."""

from __future__ import annotations

import ast
import copy
import re
from dataclasses import asdict

import pytest
import yaml

from hf_linear_attn.data.config import DataConfig
from hf_linear_attn.patching import patch_report
from hf_linear_attn.study.card import comparison, model_card, results_table, speed_table, with_error
from hf_linear_attn.training.options import ConvertConfig, FinetuneConfig
from tests.small import patched
from tests.tiny_models import BERT


def facts(metric="accuracy", higher=True, layers=()):
    return {
        "class": "BertForSequenceClassification",
        "layers": list(layers),
        "data": {"train_rows": 12345, "validation_rows": 67},
        "goal": {"metric": metric, "greater_is_better": higher},
        "processes": 2,
        "environment": {
            "versions": {"torch": "2.1", "transformers": "5.0"},
            "hardware": {"device": "cpu", "cpu": "a chip"},
        },
    }


def layers():
    return [asdict(layer) for layer in patch_report(patched("hedgehog", BERT)).layers]


def test_layers_say_what_their_linear_part_is_worth():
    parts = [{"layer": 0, "worth": 0.01234, "kept": True}, {"layer": 1, "worth": -0.5, "kept": False}]
    card = model_card(ConvertConfig(model="m"), facts(layers=layers()), {"linear parts": {"layers": parts}})
    assert "| worth of the linear part |" in card
    assert re.search(r"^\| 0 \| hedgehog \|.*\| \+0.0123 \|$", card, re.MULTILINE)
    assert re.search(r"^\| 1 \| hedgehog \|.*\| -0.5000, closed \|$", card, re.MULTILINE)


def test_the_exact_heads_of_each_layer_are_named():
    mixed, exact = ({**layer, "exact_heads": heads} for layer, heads in zip(layers(), ((1,), ()), strict=True))
    card = model_card(ConvertConfig(model="m"), facts(layers=[mixed, {**exact, "attention": "softmax"}]), {})
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
    state = {
        "exact_heads": {"reason": "windows of 256 tokens"},
        "teacher": {"perplexity": 20.0},
        "distilled": {"perplexity": 30.0},
        "converted": {"perplexity": 22.0},
        "recall, teacher": {"recall": 0.8, "low": 0.7, "high": 0.9, "prompts": 48, "length": 2048},
        "recall, this model": {"recall": 0.6, "low": 0.5, "high": 0.7, "prompts": 48, "length": 2048},
        "speed": SPEED,
    }
    card = model_card(ConvertConfig(model="m", budget=budget), facts("perplexity", higher=False), state)
    assert f"For {budget}: windows of 256 tokens." in card
    assert (f"As saved: {measured} the budget." in card) if measured else ("As saved" not in card)


def test_a_speedup_that_is_lost_in_noise_is_not_said_to_be_within_a_budget():
    noisy = copy.deepcopy(SPEED)
    noisy["rows"]["student"][1] |= {"speedup": 2.5, "speedup_p20": 0.8, "speedup_p80": 2.9}
    state = {"exact_heads": {"reason": "windows of 256 tokens"}, "speed": noisy}
    card = model_card(ConvertConfig(model="m", budget="2x at 2048"), facts(), state)
    assert "For 2x at 2048: " in card
    assert "As saved" not in card
    assert "speed of the saved model at 2,048 tokens is not measurable: nothing says whether it is within" in card


def timing(median, ratio, low, high):
    return {"value": median, "speedup": ratio, "speedup_p20": low, "speedup_p80": high}


SPEED = {
    "lengths": [512, 2048],
    "rows": {
        "teacher": [timing(0.1, 1.0, 1.0, 1.0), timing(0.9, 1.0, 1.0, 1.0)],
        "student": [timing(0.2, 0.5, 0.45, 0.55), timing(0.3, 3.01, 2.9, 3.2)],
    },
}
STATE = {
    "distilled": {"accuracy": 0.72, "f1": 0.6},
    "teacher": {"accuracy": 0.8, "f1": 0.7},
    "patched": {"accuracy": 0.5, "f1": 0.1},
    "transferred": {"accuracy": 0.6, "f1": 0.3},
    "train": {"steps": 4},
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
    state = {"teacher": {metric: teacher}, "transferred": {metric: student}}
    assert comparison(facts(metric, higher), state) == expected
    state["distilled"] = state.pop("transferred")
    control = "The teacher was not trained in the last stage; `--control` trains it as long."
    assert comparison(facts(metric, higher), state) == (expected and f"{expected} {control}")


def test_no_control_of_embeddings_is_advised():
    """An exact model that learns its own embeddings stays what it is."""
    state = {"teacher": {"cosine": 1.0}, "distilled": {"cosine": 0.9}}
    assert comparison(facts("cosine", True), state) == "This is 90.0 % of the teacher's cosine."


@pytest.mark.parametrize(("teacher", "valid"), [(0.55, False), (0.72, False), (0.76, True)])
def test_a_teacher_at_the_level_of_the_most_frequent_answer(teacher, valid):
    """Of 67 rows, three standard errors of a difference are 0.23 at 0.72 and 0.22 at 0.76."""
    state = {"teacher": {"accuracy": teacher}, "distilled": {"accuracy": 0.80}}
    sentence = comparison({**facts(), "most_frequent_answer": 0.5}, state)
    assert ("has not learned the task" in sentence) is not valid
    assert ("better than the teacher's" in sentence) is valid


def test_the_last_stage_with_metrics_is_compared():
    teacher, stage = {"accuracy": 0.8}, {"accuracy": 0.6}
    assert "75.0 %" in comparison(facts(), {"teacher": teacher, "transferred": stage})
    assert "90.0 %" in comparison(facts(), {**STATE})
    assert "75.0 %" in comparison(facts(), {"teacher": teacher, "patched": stage})  # nothing was trained
    for state in ({}, {"teacher": teacher}, {"distilled": stage}):
        assert comparison(facts(), state) == ""
    assert comparison(facts(), {"teacher": teacher, "distilled": {"f1": 0.5}}) == ""
    assert comparison(facts(), {"teacher": {"f1": 0.5}, "distilled": stage}) == ""


def test_table_of_results():
    assert results_table(facts(), STATE) == [
        "| | accuracy | f1 |",
        "| --- | ---: | ---: |",
        "| exact attention (the teacher) | 0.80 ± 0.05 | 0.70 |",
        "| patched, nothing trained | 0.50 ± 0.06 | 0.10 |",
        "| after attention transfer | 0.60 ± 0.06 | 0.30 |",
        "| after distillation | 0.72 ± 0.05 | 0.60 |",
        "",
        "This is 90.0 % of the teacher's accuracy. The teacher was not trained in the last stage; `--control` trains "
        "it as long.",
    ]


def test_table_with_missing_metrics():
    state = {"teacher": {"accuracy": 0.5}, "patched": {}, "distilled": {"f1": 0.25, "accuracy": 1.0}}
    assert results_table(facts(), state)[:4] == [
        "| | accuracy | f1 |",
        "| --- | ---: | ---: |",
        "| exact attention (the teacher) | 0.50 ± 0.06 | – |",
        "| after distillation | 1.00 ± 0.02 | 0.25 |",
    ]
    assert results_table(facts(), {}) == []
    assert results_table(facts(), {"trained": {"loss": 1.0}}) == [
        "| | loss |",
        "| --- | ---: |",
        "| after fine-tuning | 1.00 |",
    ]


def test_table_of_speed():
    assert speed_table(STATE)[2:] == [
        "| 512 | 100.0 ms | 200.0 ms | 0.50 (0.45 to 0.55) |",
        "| 2,048 | 900.0 ms | 300.0 ms | 3.01 (2.90 to 3.20) |",
    ]
    noisy = copy.deepcopy(SPEED)
    noisy["rows"]["student"][1] |= {"speedup": 1.1, "speedup_p20": 0.8, "speedup_p80": 1.4}
    assert speed_table({"speed": noisy})[3].endswith("| not measurable (0.80 to 1.40) |")
    assert "made for inputs of up to" not in "".join(speed_table({"speed": {**SPEED, "longest_input": 2048}}))
    assert "made for inputs of up to 1,024 tokens" in speed_table({"speed": {**SPEED, "longest_input": 1024}})[-1]
    for state in ({}, {"speed": {"skipped": "too long"}}, {"speed": {"lengths": [], "rows": {}}}):
        assert speed_table(state) == []


def config(model="owner/name", **data):
    return ConvertConfig(
        model=model,
        options={"num_features": 8},
        data=DataConfig(**(data or {"task": "sst2"})),
        output="/home/somebody/secret/out",
    ).completed()


def header(card):
    start, text, body = card.split("---\n", 2)
    assert start == ""
    assert body.startswith("\n# ")
    return yaml.safe_load(text)


def test_card_of_a_conversion():
    card = model_card(config(), facts(layers=layers()), STATE)
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
    config = FinetuneConfig(model_type="gpt2", train_tokenizer=300, data=DataConfig(dataset="text.txt"))
    card = model_card(config, facts(), {"trained": {"accuracy": 0.9}})
    assert header(card)["model-index"][0]["name"] == "gpt2"
    assert "# gpt2 with exact attention" in card
    assert " from random weights of `gpt2` on `text.txt`." in card


def test_card_of_a_fine_tuned_exact_model():
    tuned = FinetuneConfig(model="owner/name", data=DataConfig(task="sst2"))
    card = model_card(tuned, facts(), {"trained": {"accuracy": 0.9}})
    assert header(card)["tags"] == ["hf-linear-attn"]
    assert "# name with exact attention" in card
    assert "| after fine-tuning | 0.90 ± 0.04 |" in card
    for absent in ("## Speed", "## Layers", "load_pretrained", "the teacher's"):
        assert absent not in card


@pytest.mark.parametrize("state", [{}, {"teacher": {}, "distilled": {}}, {"speed": {"skipped": "too long"}}])
def test_card_without_numbers(state):
    card = model_card(config(), facts(layers=layers()), state)
    assert "## Quality" not in card
    assert "## Speed" not in card


def test_nothing_of_this_disk(tmp_path):
    source, data = tmp_path / "tuned bert", tmp_path / "rows.csv"
    for name in (str(source), f"{source}/"):
        card = model_card(config(name, dataset=str(data), text_columns=("a",)), facts(layers=layers()), STATE)
        assert str(tmp_path) not in card
        assert "somebody" not in card
        assert not {"base_model", "datasets", "license"} & header(card).keys()
        assert "# tuned bert with hedgehog attention" in card
        assert "from `tuned bert` on `rows.csv`" in card


@pytest.mark.parametrize(
    "source", ["./here", "../there", "~/models/bert", "~nobody/bert", "a/b/c", "", "räder", "a: b"]
)
def test_the_header_names_repositories_only(source):
    card = model_card(config(source, dataset=source or "x/y z"), facts(), {})
    assert not {"base_model", "datasets"} & set(header(card))


def test_a_folder_here_is_no_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert").mkdir()
    assert "base_model" not in header(model_card(config("bert"), facts(), {}))
    fields = header(model_card(config("bert-base-uncased", dataset="owner/rows"), facts(), {}))
    assert fields["base_model"] == "bert-base-uncased"
    assert fields["datasets"] == ["owner/rows"]


LM_STATE = {
    "teacher": {"loss": 4.0, "loss_stderr": 0.02, "perplexity": 54.6},
    "distilled": {"loss": 3.9, "loss_stderr": 0.02, "perplexity": 49.4},
}


@pytest.mark.parametrize(
    ("without", "stderr", "valid"),
    [(4.05, 0.001, False), (4.2, 0.02, True), (4.2, 0.1, False)],
    ids=["within-two-percent", "clear", "within-three-errors"],
)
def test_a_language_model_must_be_clearly_better_than_without_attention(without, stderr, valid):
    """By 2 % of its loss and three standard errors of the difference."""
    state = {**LM_STATE, "no attention": {"loss": without, "loss_stderr": stderr}}
    sentence = comparison(facts("loss", higher=False), state)
    assert ("These data cannot measure attention" in sentence) is not valid
    assert ("better than the teacher's, 3.90 ± 0.02 against 4.00 ± 0.02" in sentence) is valid


def test_the_control_is_what_the_student_is_compared_with():
    state = {**STATE, "control": {"accuracy": 0.9, "f1": 0.8}}
    assert comparison(facts(), state) == "This is 80.0 % of the control's accuracy."
    assert "| exact attention, trained as long (the control) | 0.90 ± 0.04 | 0.80 |" in results_table(facts(), state)
    state = {**LM_STATE, "control": {"loss": 3.75}}
    assert comparison(facts("loss", higher=False), state) == "The loss is 4.0 % above the control's."


@pytest.mark.parametrize(
    ("metric", "values", "rows", "expected"),
    [
        ("accuracy", {"accuracy": 0.9}, 100_000, "0.900 ± 0.001"),
        ("pearson", {"pearson": 0.5}, 101, "0.50 ± 0.07"),  # (1 - 0.25) / 10
        ("perplexity", {"perplexity": 20.0, "loss": 3.0, "loss_stderr": 0.01}, 9, "20.00 ± 0.20"),
        ("f1", {"f1": 0.5}, 50, "0.50"),
        ("pearson", {"pearson": 0.995}, 1501, "0.9950 ± 0.0003"),  # an error of 0.000 would be none
        ("loss", {"loss": 2.34567, "loss_stderr": 0.00004}, 50, "2.34567 ± 0.00004"),
        ("mse", {"mse": 0.0034}, 50, "0.0034"),  # 0.00 would be perfect
        ("mse", {"mse": 0.0}, 50, "0.00"),
        ("mse", {"mse": 1e-12}, 50, "0.000000"),
        ("loss", {"loss": -1e-9, "cosine": 1.0}, 50, "0.000000"),
        ("mse", {"mse": float("nan")}, 50, "nan"),
        ("cosine", {"cosine": 0.995, "loss": 0.005}, 50, "0.9950"),
        ("loss", {"cosine": 0.995, "loss": 0.005}, 50, "0.0050"),
    ],
)
def test_metrics_with_their_errors(metric, values, rows, expected):
    assert with_error(metric, values, rows) == expected


def test_the_error_of_a_metric_is_over_the_rows_of_its_own_set():
    two = {**facts("matched_accuracy"), "data": {"validation_matched_rows": 96, "validation_mismatched_rows": 10_000}}
    table = results_table(two, {"teacher": {"matched_accuracy": 0.5, "mismatched_accuracy": 0.5}})
    assert "0.50 ± 0.05 | 0.500 ± 0.005 |" in table[-1]


def test_a_folder_is_not_a_name(tmp_path):
    """Which one a card has, by what a person put into the folder, from the most to the least telling."""
    folder = tmp_path / "models--owner--cached" / "snapshots" / "teacher"
    folder.mkdir(parents=True)

    def names(source=folder):
        card = model_card(config(str(source)), facts(layers=layers()), STATE)
        fields = header(card)
        return (
            fields.get("base_model"),
            fields["model-index"][0]["name"],
            re.search("^# (.*) with", card, re.M).group(1),
        )

    assert names() == (None, "cached", "cached")
    alone = tmp_path / "teacher"
    alone.mkdir()
    assert names(alone) == (None, "teacher", "teacher")
    (alone / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}', encoding="utf-8")
    assert names(alone) == (None, "BertForMaskedLM", "BertForMaskedLM")
    (folder / "README.md").write_text("---\nbase_model: owner/base\n---\n", encoding="utf-8")
    assert names() == ("owner/base", "base", "base")
    tuned = model_card(FinetuneConfig(model="owner/base", data=DataConfig(task="sst2")), facts(), STATE)
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
    card = model_card(config(**data), facts(layers=layers()), {})
    example = re.search(r"tokenizer=tokenizer\)\((.*)\)\)$", card, re.M).group(1)
    value = ast.literal_eval(example)
    assert set(value) == {"text", "text_pair"} if is_pair else isinstance(value, str)


def test_the_license_is_that_of_the_base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    assert "license" not in header(model_card(config(str(folder)), facts(), {}))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n", encoding="utf-8")
    assert header(model_card(config(str(folder)), facts(), {}))["license"] == "apache-2.0"

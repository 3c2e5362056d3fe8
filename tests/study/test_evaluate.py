"""Complete evaluations of tiny models: their numbers, resumption, checkpoints, tasks, and error messages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import hf_linear_attn as hla
from hf_linear_attn import Evaluation, evaluate
from hf_linear_attn.data.config import DataConfig
from hf_linear_attn.measure.fidelity import measure_fidelity
from hf_linear_attn.measure.metric import Metric, Score
from hf_linear_attn.study.checkpoint_groups import CheckpointGroup
from hf_linear_attn.study.evaluate import measure_quality
from hf_linear_attn.study.evaluated_model import load_evaluated_model
from hf_linear_attn.study.kinds import held_out_batches
from hf_linear_attn.study.models import weights_fingerprint
from hf_linear_attn.study.options import EvaluateConfig, SpeedConfig, with_options
from hf_linear_attn.study.study import RECORDS_FILE, Records, open_study
from hf_linear_attn.study.variants import MechanismStages, timed_variants
from hf_linear_attn.utils.progress import Progress
from tests.tiny_models import GPT2, tiny_model
from tests.tiny_text import TOKENS, sample_text, tiny_tokenizer

from .runs import SMALL, run, save_folder

#: A metric of evaluate, as anybody may write one.
MODULE = """
import datasets
import evaluate


class Share(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="right rows", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"right": sum(p == r for p, r in zip(predictions, references)) / len(predictions)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("evaluate"))


DECODER: dict[str, Any] = {
    "attention": ("elu", "hedgehog"),
    "backward": True,
    "batch_size": 3,
    "recall_lengths": (160,),
}


@pytest.fixture(scope="module")
def decoder(folder: Path) -> tuple[Evaluation, str, Path]:
    output = folder / "out-decoder"
    return *run(folder / "gpt2", dataset=str(folder / "text.txt"), output=str(output), **DECODER), output


# --------------------------------------------------------------------------------------------------------------------
# A complete run


def test_files_and_screen(decoder: tuple[Evaluation, str, Path]) -> None:
    evaluation, screen, output = decoder
    names = {path.name for path in output.iterdir()}
    pictures = {"quality_vs_speed.png", "time.png", "decoding.png"}
    assert {"records.jsonl", "evaluation.json", "report.html", "report.md", "learned", *pictures} <= names
    page, text = ((output / name).read_text(encoding="utf-8") for name in ("report.html", "report.md"))
    for conclusion in evaluation.conclusions():
        assert f"{conclusion.label}: {conclusion.sentence}" in screen.replace("\n", "")
        assert conclusion.sentence in page
        assert conclusion.sentence in text
    for picture in pictures:
        assert f'src="{picture}"' in page
        assert f"]({picture})" in text
    assert "Is it worth it at 32 tokens?" in page
    assert page.index("<table") < page.index("<figure") < page.index("How it was measured")
    assert not [mark for mark in ("http://", "https://", "<script") if mark in page]
    loaded = Evaluation.load(output)
    assert loaded.summary().equals(evaluation.summary())
    assert loaded.conclusions() == evaluation.conclusions()


def test_the_result_has_everything_that_was_measured(decoder: tuple[Evaluation, str, Path]) -> None:
    evaluation = decoder[0]
    assert evaluation.labels == ["exact", "elu", "hedgehog", "without attention"]
    for measurement, batch_size in (("forward", 1), ("forward", 3), ("forward+backward", 1), ("decoding", 3)):
        assert evaluation.lengths(measurement, batch_size) == [16, 32]
        for label in ("exact", "hedgehog"):
            times = evaluation.times(measurement, label, batch_size)[32]
            assert times["p20"] <= times["seconds"] <= times["p80"]
            assert times["speedup"] == 1.0 or label != "exact"
    assert "flops" not in evaluation.times("forward", "exact")[16]  # not where a quick evaluation was asked for
    caches = [evaluation.times("decoding", "exact", size)[32]["cache_bytes"] for size in (1, 3)]
    assert caches[1] == 3 * caches[0]
    assert evaluation.states["elu"] == "untrained"  # nothing to learn
    assert evaluation.states["hedgehog"] == "transferred"
    assert len(evaluation.select("language_model", "hedgehog", before=True)) == 1
    (recall,) = evaluation.select("recall", "hedgehog")
    parts = [recall[f"{task} at 160"] for task in ("niah_single_1", "niah_multikey_1", "mqar")]
    assert recall["recall"] == pytest.approx(sum(parts) / 3)
    assert len(evaluation.table) == len(evaluation.measured)


def test_fidelity_is_that_of_a_fresh_measurement(folder: Path, decoder: tuple[Evaluation, str, Path]) -> None:
    data = DataConfig(dataset=str(folder / "text.txt"), max_length=32)
    evaluated = load_evaluated_model(str(folder / "gpt2"), EvaluateConfig(data=data, quick=True))
    fidelity = measure_fidelity(hla.patch_model(evaluated.model, "elu"), held_out_batches(evaluated.data)[:4])
    (measured,) = decoder[0].select("fidelity", "elu")
    assert measured["output_error"] == pytest.approx(fidelity.output_error, rel=1e-4)


def test_fidelity_is_measured_on_rows_of_all_lengths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out rows are sorted: the first batches are of the shortest ones, which a window attends to exactly."""
    monkeypatch.setattr("hf_linear_attn.measure.metric.BATCH_TOKENS", 48)
    documents = [" ".join(TOKENS[:count]) for count in range(2, 30)]
    config = EvaluateConfig(data=DataConfig(max_length=32, validation_size=0.5))
    evaluated = load_evaluated_model(str(folder / "bert"), config, documents=documents)
    with open_study(None, "test", {}) as study:
        stages = MechanismStages(evaluated, study, "elu", 0, 0)
        (measured,), _ = measure_quality(study, evaluated, [stages.variants(is_first=True)])
    (fidelity,) = [one.values["tokens"] for one in measured if one.measurement == "fidelity"]
    tokens = [int(batch["attention_mask"].sum()) for batch in held_out_batches(evaluated.data)]
    assert fidelity == sum(tokens[index * len(tokens) // 4] for index in range(4)) != sum(tokens[:4])


class Undefined(Metric):
    """A score that no model has."""

    score = Score("undefined", "undefined", "undefined score")

    def __call__(self, model: Any) -> Mapping[str, Any]:
        return {"undefined": None}


class Lines(Progress):
    """What is logged."""

    def __init__(self) -> None:
        self.logged: list[str] = []

    def log(self, message: str) -> None:
        self.logged.append(message)


def test_a_score_that_is_not_defined_has_a_place_in_its_line(folder: Path) -> None:
    data = DataConfig(dataset=str(folder / "text.txt"), max_length=32)
    evaluated = load_evaluated_model(str(folder / "bert"), EvaluateConfig(data=data, quick=True))
    evaluated, lines = replace(evaluated, metrics={"undefined": Undefined()}), Lines()
    with open_study(None, "test", {}, progress=lines) as study:
        stages = MechanismStages(evaluated, study, "hedgehog", 0, 1)
        measure_quality(study, evaluated, [stages.variants(is_first=True)])
    assert lines.logged[-1] == "hedgehog: undefined score – → –"


def test_a_loaded_model_without_a_head_is_told_so(folder: Path) -> None:
    options = {**SMALL, "task": "sst2", "folder": str(folder / "glue"), "timing": False}
    with pytest.raises(ValueError, match=r"no head for this task \(it is a BertModel\)"):
        evaluate(tiny_model("bert"), tokenizer=tiny_tokenizer(), **options)


@pytest.mark.slow
def test_in_memory_with_a_loaded_model_which_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = tiny_model("bert").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    documents = sample_text().splitlines()
    evaluation = evaluate(model, documents, tokenizer=tiny_tokenizer(), **{**SMALL, "attention": ["hedgehog"]})
    assert not hla.is_patched(model)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    (exact,) = evaluation.select("sentence_embeddings", "exact")
    assert exact["cosine"] == pytest.approx(1.0)
    assert "hedgehog" in evaluation._repr_html_()
    assert evaluation.data["source"] == "the given documents"
    assert evaluation.longest_quality_input() == 32
    with pytest.raises(TypeError, match="no option 'lenght'"):
        evaluate(model, documents, tokenizer=tiny_tokenizer(), lenght=16)
    with pytest.raises(TypeError, match=r"no option 'speed.lenghts'. Did you mean 'lengths'"):
        evaluate(model, documents, tokenizer=tiny_tokenizer(), speed={"lenghts": [16]})
    with pytest.raises(ValueError, match=r"device.*'meta', but the loaded model is on cpu.*model\.to\('meta'\)"):
        evaluate(model, documents, tokenizer=tiny_tokenizer(), device="meta")


# --------------------------------------------------------------------------------------------------------------------
# Several runs of one folder


@pytest.mark.slow
def test_an_appended_run_measures_only_what_is_missing(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = {"attention": ("elu",), "dataset": str(folder / "text.txt"), "output": str(output)}
    first, _ = run(folder / "gpt2", **options)
    before = len(Records(output / RECORDS_FILE))
    options["resume"] = True
    same, _ = run(folder / "gpt2", **options)
    assert len(Records(output / RECORDS_FILE)) == before
    assert same.summary().equals(first.summary())
    more, _ = run(folder / "gpt2", **{**options, "attention": ("elu", "efficient")})
    assert more.labels == ["exact", "elu", "efficient", "without attention"]
    assert more.quality_table().loc["elu"].equals(first.quality_table().loc["elu"])
    single, _ = run(folder / "gpt2", **{**options, "attention": ("efficient",)})
    assert single.labels == ["exact", "efficient", "without attention"]  # the report shows what the run was asked for


@pytest.mark.slow
def test_an_interrupted_run_continues(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in the timing: what was trained is not trained again, and the values are the same."""
    output = tmp_path / "out"
    options: dict[str, Any] = {"dataset": str(folder / "text.txt"), "attention": ("hedgehog",), "output": str(output)}

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_linear_attn.study.timing.measure_passes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(folder / "gpt2", **options)
    saved = {record.id: record.values for record in Records(output / RECORDS_FILE)}
    assert saved
    with pytest.raises(ValueError, match=r"earlier result: continue it \(--resume\), replace it \(--overwrite\)"):
        run(folder / "gpt2", **options)
    monkeypatch.setattr("hf_linear_attn.study.variants.transfer_attention", interrupt)
    run(folder / "gpt2", **options, resume=True)
    again = {record.id: record.values for record in Records(output / RECORDS_FILE)}
    assert {name: again[name] for name in saved} == saved
    assert len(again) > len(saved)


def test_a_transfer_leaves_the_random_generators_alone(folder: Path) -> None:
    data = DataConfig(dataset=str(folder / "text.txt"), max_length=32)
    evaluated = load_evaluated_model(str(folder / "bert"), EvaluateConfig(data=data, quick=True))
    with open_study(None, "test", {}) as study:
        _, transferred = MechanismStages(evaluated, study, "hedgehog", 1, 1).variants(is_first=True)
        state = torch.get_rng_state()
        transferred.load()
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_value_depends_on_is_in_its_conditions(folder: Path) -> None:
    """Rows, and the order in which a calibration reads them; another tokenizer makes other tokens of a text."""

    def conditions(tokenizer: Any = None, length: int = 32, seed: int = 0, steps: int = 1) -> tuple[str, str]:
        data = DataConfig(dataset=str(folder / "text.txt"), max_length=length)
        config = EvaluateConfig(data=data, recall_lengths=(64,), quick=True)
        evaluated = load_evaluated_model(str(folder / "bert"), config, tokenizer)
        with open_study(None, "test", {}) as study:
            untrained, _ = MechanismStages(evaluated, study, "window", seed, steps).variants(is_first=True)
        ids = [
            untrained.of(evaluated.conditions(name, settings=evaluated.metric_settings(name))).id
            for name in evaluated.metrics
        ]
        return ids[0], ids[1]

    first = conditions()
    assert conditions() == conditions(tiny_tokenizer()) == conditions(steps=2) == first
    for changed in (conditions(length=16), conditions(seed=1), conditions(tiny_tokenizer(mask=True))):
        assert not set(changed) & set(first)


# --------------------------------------------------------------------------------------------------------------------
# Tasks and checkpoints


@pytest.mark.slow
def test_checkpoints_of_several_seeds(folder: Path, tmp_path: Path) -> None:
    options = {"task": "sst2", "folder": str(folder / "glue"), "output": str(tmp_path / "out")}
    checkpoints = {"converted": (str(folder / "run0"), str(folder / "run1")), "baseline": (str(folder / "tuned"),)}
    evaluation, screen = run(folder / "classifier", **options, **checkpoints)
    assert evaluation.labels == ["exact", "softmax (tuned)", "elu (converted)", "without attention"]
    (score,) = evaluation.scores
    quality = evaluation.quality(score, "elu (converted)")
    assert quality is not None
    assert len(quality.values) == 2
    assert quality.mean == pytest.approx(sum(quality.values) / 2)
    assert quality.std == pytest.approx(abs(quality.values[0] - quality.values[1]) / 2**0.5)
    assert evaluation.select("task", "exact")[0]["rows"] == 20
    assert "elu (converted)" in screen
    more, _ = run(folder / "classifier", **options, **checkpoints, attention=("hedgehog",), seeds=(0, 1), resume=True)
    assert more.labels == ["exact", "softmax (tuned)", "hedgehog", "elu (converted)", "without attention"]
    assert [len(more.select("task", label)) for label in ("hedgehog", "elu (converted)")] == [2, 2]


@pytest.mark.slow
def test_own_labelled_data_are_measured_as_a_task_is(folder: Path) -> None:
    """The files of a task, given as data of one's own, give the values of the task."""
    common: dict[str, Any] = {**SMALL, "attention": ("elu",), "steps": 0, "timing": False}
    model = str(folder / "classifier")
    task = evaluate(model, task="sst2", folder=str(folder / "glue"), **common)
    own = evaluate(model, str(folder / "glue" / "SST-2"), text_columns=("sentence",), **common)
    assert task.select("task", "exact") == own.select("task", "exact")


@pytest.mark.slow
def test_a_metric_of_ones_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "share.py").write_text(MODULE)
    name = f"hub:{tmp_path / 'share'}"
    options = {"task": "sst2", "folder": str(folder / "glue"), "metrics": (name, "accuracy"), "attention": ("elu",)}
    evaluation = evaluate(str(folder / "classifier"), **{**SMALL, "timing": False, **options})
    (values,) = evaluation.select("task", "exact")
    assert evaluation.scores[0].metric == name
    assert values[name] == pytest.approx(values["accuracy"])


@pytest.mark.slow
def test_an_encoder_with_sentence_pairs_timed_in_half_precision(folder: Path, tmp_path: Path) -> None:
    evaluation, _ = run(
        folder / "bert",
        dataset=str(folder / "text.txt"),
        sts=str(folder / "glue"),
        attention=("elu",),
        dtype="bfloat16",
        output=str(tmp_path / "out"),
    )
    assert [score.title for score in evaluation.scores] == ["STS-B Spearman", "cosine to exact embeddings"]
    assert "Times are those of bfloat16; quality was measured in float32." in evaluation.warnings()
    (values,) = evaluation.select("sts", "exact")
    assert values["rows"] == 20
    assert -1 <= values["spearmanr"] <= 1


# --------------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gpt2", {}, "There is no data"),
        ("gpt2", {"dataset": "nowhere.txt"}, "nowhere.txt"),
        ("gpt2", {"dataset": "TEXT", "attention": ("nystrom",)}, "cannot be measured on this model"),
        ("gpt2", {"dataset": "TEXT", "attention": ("hedgehogs",)}, r"'hedgehogs'.*Did you mean 'hedgehog'"),
        ("gpt2", {"dataset": "TEXT", "attention": ("softmax",)}, "always measured"),
        ("gpt2", {"dataset": "TEXT", "sts": "GLUE"}, "^sts: .* this is a causal language model"),
        ("gpt2", {"dataset": "TEXT", "metrics": ("f1",)}, "data.metrics: is for classification"),
        (
            "gpt2",
            {"dataset": "TEXT", "max_length": 200, "validation_size": 0.4},
            "and GPT2LMHeadModel has positions for",
        ),
        ("gpt2", {"dataset": "TEXT", "device": "toaster"}, "toaster"),
        ("gpt2", {"dataset": "TEXT", "recall_lengths": (160, 4096)}, "beyond the model's"),
        ("gpt2", {"dataset": "TEXT", "recall_lengths": (16,)}, "^recall_lengths: .* of at least 32"),
        ("nowhere", {"dataset": "TEXT"}, "cannot be loaded"),
        ("run0", {"task": "sst2", "folder": "GLUE"}, "is patched already"),
        ("bert", {"converted": ("nowhere",)}, "checkpoint 'nowhere' cannot be loaded"),
        ("bert", {"converted": ("CLASSIFIER",)}, "exact attention: nothing was converted"),
        ("bert", {"baseline": ("RUN",)}, "is patched; a baseline has exact attention"),
        ("bert", {"converted": ("HERE",)}, "cannot be loaded.*config.json"),
        ("gpt2", {"dataset": "TEXT", "converted": ("RUN",)}, "not made from this model: its model_type is 'bert'"),
        ("bert", {"task": "sst3"}, r"'sst3'.*Did you mean 'sst2'"),
        ("classifier", {"task": "sst2", "folder": "nowhere"}, "no folder 'nowhere'"),
        ("bert", {"task": "sst2", "folder": "GLUE"}, "no head for this task"),
        ("bert", {"dataset": "COLORS", "task_type": "classification"}, r"no head for this task \(it is a BertModel\)"),
        ("classifier", {"task": "rte", "folder": "GLUE"}, "trained with the labels negative"),
        ("classifier", {"task": "sst2", "folder": "GLUE", "metrics": ("acuracy",)}, "Did you mean 'accuracy'"),
        ("classifier", {"task": "sst2", "folder": "GLUE", "recall_lengths": (64,)}, "^recall_lengths: are for"),
    ],
)
def test_wrong_input_is_an_error_before_anything_is_written(
    folder: Path, tmp_path: Path, kind: str, options: dict[str, Any], message: str
) -> None:
    paths = {
        "TEXT": folder / "text.txt",
        "GLUE": folder / "glue",
        "RUN": folder / "run0",
        "CLASSIFIER": folder / "classifier",
        "HERE": folder,
        "COLORS": folder / "colors.csv",
    }
    rows = [f"{text},{label}" for text in sample_text().splitlines()[:10] for label in ("red", "green", "blue")]
    paths["COLORS"].write_text("\n".join(["text,label", *rows]), encoding="utf-8")

    def resolved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(resolved, value))
        return str(paths[value]) if value in paths else value

    resolved_options = {name: resolved(value) for name, value in options.items()}
    with pytest.raises((ValueError, OSError), match=message):
        run(folder / kind, **{"output": str(tmp_path / "out"), **resolved_options})
    assert list(tmp_path.iterdir()) == []


def test_output_folders_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    text = str(folder / "text.txt")
    for resume in (False, True):
        with pytest.raises(ValueError, match="not a result of this command"):
            run(folder / "gpt2", dataset=text, output=str(tmp_path / "mine"), resume=resume)
    with pytest.raises(NotADirectoryError, match="is a file"):
        run(folder / "gpt2", dataset=text, output=str(tmp_path / "file"))
    (tmp_path / "mine" / RECORDS_FILE).write_text("{broken\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"jsonl', line 1 is not a JSON object"):
        run(folder / "gpt2", dataset=text, output=str(tmp_path / "mine"), resume=True, attention=("elu",))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": -1},
        {"lengths": (8,)},
        {"lengths": (16, 16)},
        {"lengths": ()},
        {"seeds": (-1,)},
        {"seconds": 0.0},
        {"max_eval_samples": 0},
        {"batch_size": 0},
        {"folder": "glue"},
        {"task": "sst2", "dataset": "a.txt"},
        {"dtype": "int8"},
        {"attention": ("elu", "elu")},
        {"attention": ()},
    ],
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        with_options(EvaluateConfig(), options)


def test_every_option_has_a_help_text() -> None:
    for config in (EvaluateConfig, SpeedConfig):
        for field in fields(config):
            assert len(field.metadata["help"]) > 10 or field.name == "data", field.name


def test_an_untrained_mechanism_is_calibrated_with_or_without_a_transfer() -> None:
    model, documents = tiny_model("gpt2"), sample_text().splitlines()
    options: dict[str, Any] = {**SMALL, "attention": ["vq"], "tokenizer": tiny_tokenizer(), "timing": False}
    without, with_transfer = (evaluate(model, documents, **{**options, "steps": steps}) for steps in (0, 1))
    (first,) = without.select("language_model", "vq")
    (second,) = with_transfer.select("language_model", "vq", before=True)
    assert first == second


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib.*pip install 'hf-linear-attn\[demo\]'"):
        run("gpt2")


def test_checkpoints_are_timed_with_their_exact_heads(folder: Path) -> None:
    data = DataConfig(dataset=str(folder / "text.txt"), max_length=32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "gpt2")
    evaluated = load_evaluated_model(GPT2.build(), EvaluateConfig(data=data, quick=True), tokenizer)
    plan = {"default": {"attention": "window", "window_size": 4}, "1": {"exact_heads": [2]}}
    layers = hla.patch_model(GPT2.build(), plan).config.linear_attention["layers"]
    groups = [CheckpointGroup("window", layers, {}, "window (converted)")]
    timed = timed_variants(evaluated, (), 0, groups, 16)[1].load()
    assert [layer.exact_heads for layer in hla.patch_report(timed).layers] == [(), (2,)]


def test_checkpoints_of_several_seeds_are_one_group() -> None:
    def identity(mechanism: dict[str, Any]) -> str:
        return CheckpointGroup(
            "", hla.patch_model(GPT2.build(), {"default": mechanism}).config.linear_attention["layers"], {}
        ).identity

    favor, window = {"attention": "favor+"}, {"attention": "window", "feature_map": "favor+"}
    for first, other in (
        ({**favor, "seed": 0}, {**favor, "seed": 1}),
        ({**window, "feature_map_options": {"seed": 0}}, {**window, "feature_map_options": {"seed": 1}}),
    ):
        assert identity(first) == identity(other)
    assert identity(favor) != identity({**favor, "num_features": 8})


def test_a_fingerprint_depends_on_every_value() -> None:
    model = GPT2.build()
    before = weights_fingerprint(model)
    assert weights_fingerprint(model) == before
    model.transformer.wte.weight.data[-1, -1] += 1
    assert weights_fingerprint(model) != before

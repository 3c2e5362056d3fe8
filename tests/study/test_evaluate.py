"""Complete evaluations of tiny models: their numbers, resumption, joined runs, several tasks, and error messages."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModel, GPT2LMHeadModel

import hf_linear_attn as hla
from hf_linear_attn import evaluate
from hf_linear_attn.data.text import load_text, packed_rows, padded_batches, text_rows
from hf_linear_attn.measure.fidelity import measure_fidelity
from hf_linear_attn.measure.quality import SENTENCE_EMBEDDINGS, measure_perplexity, sentence_embeddings
from hf_linear_attn.study.checkpoint_groups import CheckpointGroup
from hf_linear_attn.study.options import (
    DECODER_ATTENTIONS,
    QUICK_ATTENTIONS,
    EvaluateConfig,
    EvaluationData,
    ResolvedOptions,
    SpeedConfig,
    with_options,
)
from hf_linear_attn.study.prepare import ExactModel, prepare, recall_measurement, text_inputs
from hf_linear_attn.study.results import Evaluation
from hf_linear_attn.study.study import RECORDS_FILE, Records, Study, open_study
from hf_linear_attn.study.variants import mechanism_stages, timed_variants
from tests.tiny_models import GPT2, tiny_model
from tests.tiny_text import sample_text, tiny_tokenizer

from .runs import DECODER_POSITIONS, SMALL, run, save_folder

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
    "lengths": (16,),
    "length": 32,
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
    assert {"records.jsonl", "records.csv", "evaluation.json", "report.html", "report.md", "learned"} <= names
    assert {"quality_vs_speed.png", "time.png", "fidelity.png", "decoding.png", "recall.png"} <= names
    page, text = ((output / name).read_text(encoding="utf-8") for name in ("report.html", "report.md"))
    for conclusion in evaluation.conclusions():
        assert f"{conclusion.label}: {conclusion.sentence}" in screen.replace("\n", "")
        assert conclusion.sentence in page
        assert conclusion.sentence in text
    assert "Is it worth it at 32 tokens?" in page
    assert page.index("<table") < page.index("<figure") < page.index("How it was measured")
    assert not [mark for mark in ("http://", "https://", "<script") if mark in page]
    loaded = Evaluation.load(output)
    assert loaded.info == evaluation.info
    assert loaded.summary().equals(evaluation.summary())


def test_an_evaluation_is_saved_to_another_folder(decoder: tuple[Evaluation, str, Path], tmp_path: Path) -> None:
    evaluation, _, output = decoder
    before = (output / "records.jsonl").read_bytes()
    for saved in (evaluation, Evaluation.load(output)):
        saved.save(tmp_path / "copy")
        saved.save(output)
        assert Evaluation.load(tmp_path / "copy").summary().equals(evaluation.summary())
        assert (output / "records.jsonl").read_bytes() == before
    (tmp_path / "copy" / "records.jsonl").unlink()
    count = len(evaluation.info["records"])
    with pytest.raises(ValueError, match=rf"lacks {count} of the {count} records.*Copy records\.jsonl, too"):
        Evaluation.load(tmp_path / "copy")


def test_the_table_has_everything_that_was_measured(decoder: tuple[Evaluation, str, Path]) -> None:
    evaluation = decoder[0]
    assert evaluation.labels == ["exact", "elu", "hedgehog", "without attention"]
    for measurement in ("forward", "prefill", "decoding"):
        assert evaluation.lengths(measurement) == [16, 32]
    assert evaluation.lengths("forward+backward", 3) == [16, 32]
    assert evaluation.length == 32
    for measurement, batch_size in (("forward", 1), ("forward", 3), ("forward+backward", 1), ("decoding", 3)):
        rows = evaluation.select(measurement, "seconds", batch_size=batch_size)
        assert (rows["p20"] <= rows["value"]).all()
        assert (rows["value"] <= rows["p80"]).all()
        assert set(rows[rows["label"] == "exact"]["speedup"]) == {1.0}
    assert (evaluation.select("forward", "seconds")["value"] > 0).all()
    assert not len(evaluation.select("forward", "flops"))  # not where a quick evaluation was asked for
    caches = [evaluation.value("decoding", "cache_bytes", label="exact", length=32, batch_size=size) for size in (1, 3)]
    assert caches[1] == 3 * caches[0]
    states = evaluation.select("perplexity", "perplexity").groupby("label")["state"].agg(set).to_dict()
    assert states["elu"] == {"untrained"}  # nothing to learn
    assert states["hedgehog"] == {"untrained", "transferred"}
    assert len(evaluation.select("attention_transfer", "loss", label="hedgehog")) == 1  # one step
    cells = evaluation.select("recall", "recall_at", label="hedgehog", before=False)
    assert sorted(cells["depth"].unique()) == [0.1, 0.5, 0.9]
    assert cells["value"].mean() == evaluation.value("recall", "recall", label="hedgehog", before=False)


def test_values_are_those_of_a_fresh_measurement(folder: Path, decoder: tuple[Evaluation, str, Path]) -> None:
    evaluation = decoder[0]
    resolved = ResolvedOptions(**evaluation.info["settings"])
    text, tokenizer = load_text(str(folder / "text.txt")), tiny_tokenizer()
    documents = packed_rows(tokenizer, text.validation, resolved.perplexity_tokens)[:1]
    model = GPT2LMHeadModel.from_pretrained(folder / "gpt2").eval()
    inputs = text_inputs(ExactModel.load(model, "decoder", "gpt2", tokenizer), text, resolved)
    exact = measure_perplexity(model, documents, context=32, stride=16)
    assert evaluation.value("perplexity", "loss", label="exact") == pytest.approx(exact.loss, rel=1e-5)
    assert evaluation.value("perplexity", "tokens", label="exact") == sum(len(one) - 1 for one in documents)
    hla.patch_model(model, "elu")
    linear = measure_perplexity(model, documents, context=32, stride=16)
    assert evaluation.value("perplexity", "loss", label="elu") == pytest.approx(linear.loss, rel=1e-5)
    fidelity = measure_fidelity(model, inputs.fidelity)
    rows = evaluation.select("fidelity", "output_error", label="elu")
    assert rows[rows["layer"].isna()]["value"].tolist() == pytest.approx([fidelity.output_error], rel=1e-4)
    layer = rows[rows["layer"] == 1].sort_values("head")["value"].tolist()
    assert layer == pytest.approx(fidelity.layers[1].output_error, rel=1e-4)


@pytest.mark.slow
def test_in_memory_with_a_loaded_model_which_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = tiny_model("bert").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    documents = sample_text().splitlines()
    options = {
        **SMALL,
        "attention": ["hedgehog"],
    }
    evaluation = evaluate(model, documents, tokenizer=tiny_tokenizer(), **options)
    assert not hla.is_patched(model)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert evaluation.quality(SENTENCE_EMBEDDINGS, "exact").mean == pytest.approx(1.0)
    assert evaluation.table["label"].nunique() == 3
    assert "hedgehog" in evaluation._repr_html_()
    assert evaluation.info["data"]["source"] == "the given documents"
    # What the inputs were, not what they were cut to: a line has 30 words and two special tokens.
    assert evaluation.info["data"]["held_out"]["longest"] == 32
    assert evaluation.longest_quality_input() == 32
    with pytest.raises(TypeError, match="no option 'lenght'"):
        evaluate(model, documents, tokenizer=tiny_tokenizer(), lenght=16)
    with pytest.raises(TypeError, match=r"no option 'speed.lenghts'. Did you mean 'lengths'"):
        evaluate(model, documents, tokenizer=tiny_tokenizer(), speed={"lenghts": [16]})
    with pytest.raises(ValueError, match=r"device.*'meta', but the loaded model is on cpu.*model\.to\('meta'\)"):
        evaluate(model, documents, tokenizer=tiny_tokenizer(), device="meta")


@pytest.mark.slow
def test_cosine_of_embeddings_is_what_a_fresh_measurement_gives(folder: Path) -> None:
    text = str(folder / "text.txt")
    options = {"attention": ["elu"]}
    evaluation = evaluate(str(folder / "bert"), text, **{**SMALL, **options})
    resolved, tokenizer = ResolvedOptions(**evaluation.info["settings"]), tiny_tokenizer()
    rows = text_rows(
        tokenizer, load_text(text).validation, resolved.sequence_length, resolved.test_sequences, causal=False
    )
    batches = padded_batches(rows, 8, tokenizer.pad_token_id)
    model = AutoModel.from_pretrained(folder / "bert").eval()
    exact = sentence_embeddings(model, batches)
    linear = sentence_embeddings(hla.patch_model(model, "elu"), batches)
    cosine = torch.nn.functional.cosine_similarity(exact, linear).mean()
    assert evaluation.quality(SENTENCE_EMBEDDINGS, "elu").mean == pytest.approx(float(cosine), rel=1e-4)


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
    records = Records(output / RECORDS_FILE)
    assert len({one.id for one in records}) == len(records)
    timed = [one for one in records if one.conditions["measurement"] == "forward"]
    rows = [{row["label"] for row in one.values} for one in timed]
    assert rows == [{"exact", *names, "without attention"} for names in (["elu"], ["elu", "efficient"])]
    single, _ = run(folder / "gpt2", **{**options, "attention": ("efficient",)})
    assert single.labels == ["exact", "efficient", "without attention"]  # the report shows what the run was asked for


@pytest.mark.slow
def test_what_a_value_depends_on_is_in_its_conditions(folder: Path, tmp_path: Path) -> None:
    """The pairs of STS-B are cut to the sequence length, and a calibration reads rows in the order of the seed.

    Another tokenizer makes other tokens of a text, as many as before.
    """
    for name in ("sts-train.csv", "sts-dev.csv"):
        rows = [f"g\tf\t2030\t0\t{score}.0\t{'one ' * 20}\t{'two ' * 20}\n" for score in range(3)]
        (tmp_path / name).write_text("".join(rows), encoding="utf-8")
    data = EvaluationData(dataset=str(folder / "text.txt"), sts=str(tmp_path))

    def conditions(tokenizer: Any = None, **options: Any) -> tuple[str, str]:
        changed = {**SMALL, "attention": ["window"], "seeds": (0,), **options}
        (one,) = prepare(str(folder / "bert"), with_options(EvaluateConfig(), changed, data), tokenizer)
        untrained, _ = mechanism_stages(one, Study(), "window", 0)
        pairs, embeddings = (one_of for one_of, _ in one.inputs.measurements)
        return pairs.id, untrained.of(embeddings).id

    first = conditions()
    assert conditions() == first
    assert conditions(seed=1)[0] == first[0]
    assert conditions(seed=1)[1] != first[1]
    assert conditions(steps=2) == first
    assert conditions(sequence_length=16)[0] != first[0]
    assert conditions(tiny_tokenizer()) == first
    assert conditions(tiny_tokenizer(mask=True))[1] != first[1]


def test_recall_is_measured_anew_with_another_tokenizer() -> None:
    exact = ExactModel.load(tiny_model("bert"), "encoder", "bert", tiny_tokenizer())
    models = (exact, replace(exact), replace(exact, tokenizer=tiny_tokenizer(mask=True)))
    first, again, other = (recall_measurement(one, [60], seed=0)[0].id for one in models)
    assert first == again != other


def test_a_transfer_leaves_the_random_generators_alone(folder: Path) -> None:
    data = EvaluationData(dataset=str(folder / "text.txt"))
    options = {**SMALL, "attention": ["hedgehog"], "seeds": (1,)}
    (one,) = prepare(str(folder / "bert"), with_options(EvaluateConfig(), options, data))
    with open_study(None, "test", {}) as study:
        _, transferred = mechanism_stages(one, study, "hedgehog", 1)
        state = torch.get_rng_state()
        transferred.load()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_an_interrupted_run_continues(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted in the timing: what was trained is not trained again, and the values are the same."""
    output = tmp_path / "out"
    options: dict[str, Any] = {"dataset": str(folder / "text.txt"), "attention": ("hedgehog",), "lengths": (16,)}
    options.update(length=16, sequence_length=32, batch_size=1, output=str(output))

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_linear_attn.study.timing.measure_passes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(folder / "gpt2", **options)
    saved = {one.id: one.values for one in Records(output / RECORDS_FILE)}
    assert saved
    with pytest.raises(ValueError, match=r"earlier result: continue it \(--resume\), replace it \(--overwrite\)"):
        run(folder / "gpt2", **options)
    monkeypatch.setattr("hf_linear_attn.study.variants.transfer_attention", interrupt)
    run(folder / "gpt2", **options, resume=True)
    after = {one.id: one.values for one in Records(output / RECORDS_FILE)}
    assert saved.items() <= after.items()
    assert (output / "report.html").is_file()


@pytest.mark.slow
def test_what_was_not_timed_has_no_note(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions beyond the model's are explained only where a length has them."""
    options = {"dataset": str(folder / "text.txt"), "attention": ("elu",), "lengths": (16, 2048), "batch_size": 1}
    monkeypatch.setattr("hf_linear_attn.study.timing.LONGEST_WAIT", 0.0)
    evaluation, _ = run(folder / "gpt2", output=str(tmp_path / "out"), **options)
    assert [note for note in evaluation.info["notes"] if "was not timed at 2,048 tokens" in note]
    assert evaluation.positions_note() == ""


@pytest.mark.slow
def test_throughput_takes_no_more_memory_than_there_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where several sequences do not fit, the report says so and the rest is measured."""
    monkeypatch.setattr("hf_linear_attn.study.timing.free_memory", lambda device: 1000)
    options = {"attention": ("elu",), "batch_size": 8}
    evaluation, _ = run(folder / "gpt2", dataset=str(folder / "text.txt"), output=str(tmp_path / "out"), **options)
    notes = " ".join(evaluation.info["notes"])
    assert "decoding with 8 sequences was not timed at 16 tokens: it would need about" in notes
    if evaluation.value("forward", "peak_memory", label="exact"):  # a pass this small may need no page at all
        assert "forward with 8 sequences was not timed at 16 tokens: it would need about" in notes
    assert "decoding with 8 sequences was not timed" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------------
# Tasks, checkpoints, sentence pairs


@pytest.mark.slow
def test_a_classifier_with_checkpoints_and_a_baseline(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"task": ("sst2",), "folder": str(folder / "glue"), "output": str(tmp_path / "out")}
    checkpoints = {"converted": (str(folder / "run0"), str(folder / "run1")), "baseline": (str(folder / "tuned"),)}
    evaluation, screen = run(folder / "classifier", **options, **checkpoints)
    assert evaluation.labels == ["exact", "softmax (tuned)", "elu (converted)", "without attention"]
    (score,) = evaluation.scores
    quality = evaluation.quality(score, "elu (converted)")
    assert len(quality.values) == 2
    assert quality.mean == pytest.approx(sum(quality.values) / 2)
    assert quality.std == pytest.approx(abs(quality.values[0] - quality.values[1]) / 2**0.5)
    assert evaluation.value("task", "rows", label="exact") == 20
    assert evaluation.quality(score, "softmax (tuned)").std is None
    assert "elu (converted)" in screen
    more, _ = run(folder / "classifier", **options, **checkpoints, attention=("hedgehog",), seeds=(0, 1), resume=True)
    assert more.labels == ["exact", "softmax (tuned)", "hedgehog", "elu (converted)", "without attention"]
    assert len(more.quality(score, "hedgehog").values) == 2
    assert len(more.quality(score, "elu (converted)").values) == 2


@pytest.mark.slow
def test_own_labelled_data_are_measured_as_a_task_is(folder: Path, tmp_path: Path) -> None:
    """The files of a task, given as data of one's own, give the values of the task."""
    common: dict[str, Any] = {"attention": ("elu",), "steps": 0}
    task, _ = run(
        folder / "classifier", task=("sst2",), folder=str(folder / "glue"), output=str(tmp_path / "task"), **common
    )
    labelled, _ = run(
        folder / "classifier",
        dataset=str(folder / "glue" / "SST-2"),
        text_columns=("sentence",),
        output=str(tmp_path / "own"),
        **common,
    )
    for evaluation, name in ((task, "sst2"), (labelled, "SST-2")):
        assert evaluation.scores[0].task == name
    values = [evaluation.quality(evaluation.scores[0], "exact").values for evaluation in (task, labelled)]
    assert values[0] == values[1]
    sst2 = {"task": ("sst2",), "folder": str(folder / "glue")}
    with pytest.raises(ValueError, match="is measured on the data of its task, not on documents"):
        evaluate(str(folder / "classifier"), ["a word " * 500], **sst2)
    with pytest.raises(ValueError, match=r"no column 'text'.*Columns: sentence, label"):
        run(folder / "classifier", dataset=str(folder / "glue" / "SST-2"), output=str(tmp_path / "none"), **common)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_metric_of_ones_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "share.py").write_text(MODULE)
    name = f"hub:{tmp_path / 'share'}"
    options = {"task": ("sst2",), "folder": str(folder / "glue"), "metrics": (name, "accuracy"), "attention": ("elu",)}
    evaluation, _ = run(folder / "classifier", output=str(tmp_path / "out"), **options)
    score = evaluation.value("task", "score", label="exact")
    assert score == evaluation.value("task", name, label="exact")
    assert score == pytest.approx(evaluation.value("task", "accuracy", label="exact"))


@pytest.mark.slow
def test_several_tasks_have_a_model_each(folder: Path, tmp_path: Path) -> None:
    """The scores of the further task are those of its own model, exact and converted."""
    common: dict[str, Any] = {"folder": str(folder / "glue"), "batch_size": 1}
    checkpoints = (("", "run0"), ("", "run1"), ("rte=", "rte-run0"), ("rte=", "rte-run1"))
    evaluation, _ = run(
        folder / "classifier",
        task=("sst2", f"rte={folder / 'rte-classifier'}"),
        converted=tuple(f"{task}{folder / name}" for task, name in checkpoints),
        baseline=(f"rte={folder / 'rte-tuned'}",),
        output=str(tmp_path / "out"),
        **common,
    )
    assert [score.title for score in evaluation.scores] == ["sst2 accuracy", "rte accuracy"]
    single, _ = run(
        folder / "rte-classifier",
        task=("rte",),
        converted=tuple(str(folder / f"rte-run{seed}") for seed in (0, 1)),
        baseline=(str(folder / "rte-tuned"),),
        output=str(tmp_path / "single"),
        **common,
    )
    for label in ("exact", "softmax (tuned)", "elu (converted)", "without attention"):
        assert evaluation.quality(evaluation.scores[1], label) == single.quality(single.scores[0], label)


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
    timed = evaluation.table["measurement"] == "forward"
    assert set(evaluation.table[timed]["dtype"]) == {"bfloat16"}
    assert set(evaluation.table[~timed]["dtype"]) == {"float32"}
    assert "Times are those of bfloat16; quality was measured in float32." in evaluation.warnings()
    assert evaluation.value("sts", "pairs", label="exact") == 20
    assert -1 <= evaluation.value("sts", "spearmanr", label="exact") <= 1
    assert evaluation.info["data"]["sentence_pairs"] == "STS-B validation, glue"


# --------------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gpt2", {}, "give a text to measure it on with --data.dataset"),
        ("gpt2", {"dataset": "nowhere.txt"}, "nowhere.txt"),
        ("gpt2", {"dataset": "TEXT", "attention": ("nystrom",)}, "cannot be measured on this model"),
        ("gpt2", {"dataset": "TEXT", "attention": ("hedgehogs",)}, r"'hedgehogs'.*Did you mean 'hedgehog'"),
        ("gpt2", {"dataset": "TEXT", "attention": ("softmax",)}, "always measured"),
        ("gpt2", {"dataset": "TEXT", "sts": "GLUE"}, "is a decoder"),
        ("gpt2", {"dataset": "TEXT", "metrics": ("f1",)}, "^data.metrics: is for labelled data"),
        ("gpt2", {"dataset": "TEXT", "max_eval_samples": 5}, "^data.max_eval_samples: is for labelled data"),
        ("gpt2", {"dataset": "TEXT", "context": 4096}, f"beyond the model's {DECODER_POSITIONS} positions"),
        ("gpt2", {"dataset": "TEXT", "sequence_length": 4096}, f"beyond the model's {DECODER_POSITIONS} positions"),
        ("gpt2", {"dataset": "TEXT", "device": "toaster"}, "toaster"),
        ("gpt2", {"dataset": "TEXT", "recall_lengths": (160, 4096)}, "beyond the model's"),
        ("gpt2", {"dataset": "TEXT", "recall_lengths": (16,)}, "^recall_lengths: .* of at least 32"),
        ("nowhere", {"dataset": "TEXT"}, "cannot be loaded"),
        ("run0", {"dataset": "TEXT"}, "is patched already"),
        ("bert", {"context": 16}, "no causal language model"),
        ("bert", {"converted": ("nowhere",)}, "checkpoint 'nowhere' cannot be loaded"),
        ("bert", {"converted": ("CLASSIFIER",)}, "exact attention: nothing was converted"),
        ("bert", {"baseline": ("RUN",)}, "is patched; a baseline has exact attention"),
        ("bert", {"converted": ("HERE",)}, "cannot be loaded.*config.json"),
        ("gpt2", {"dataset": "TEXT", "converted": ("RUN",)}, "not made from this model: its model_type is 'bert'"),
        ("bert", {"task": ("sst3",)}, r"'sst3'.*Did you mean 'sst2'"),
        ("classifier", {"task": ("sst2",), "folder": "nowhere"}, "no folder 'nowhere'"),
        ("bert", {"task": ("sst2",), "folder": "GLUE"}, "no head for the task"),
        ("bert", {"task": ("rte=nowhere",), "folder": "GLUE"}, "'nowhere' cannot be loaded"),
        ("gpt2", {"dataset": "TEXT", "task": ("sst2=CLASSIFIER",), "folder": "GLUE"}, "'bert', not 'gpt2'"),
        ("classifier", {"task": ("sst2", "rte=CLASSIFIER"), "folder": "GLUE"}, "trained with the labels negative"),
        (
            "bert",
            {"task": ("sst2=CLASSIFIER",), "folder": "GLUE", "converted": ("sst2=RUN",)},
            "no converted checkpoint",
        ),
        ("classifier", {"task": ("sst2",), "folder": "GLUE", "metrics": ("acuracy",)}, "Did you mean 'accuracy'"),
        ("classifier", {"task": ("sst2",), "folder": "GLUE", "metrics": ("hub:HERE/none",)}, "cannot be loaded"),
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
    }

    def resolved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(resolved, value))
        head, sign, end = value.rpartition("=") if isinstance(value, str) else ("", "", value)
        return f"{head}{sign}{paths[end]}" if end in paths else value

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
        run(folder / "gpt2", dataset=text, output=str(tmp_path / "mine"), resume=True)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": -1},
        {"length": 8},
        {"lengths": (8,)},
        {"lengths": (16, 16)},
        {"lengths": ()},
        {"seeds": (-1,)},
        {"seconds": 0.0},
        {"max_eval_samples": 1},
        {"batch_size": 0},
        {"stride": 8, "context": 8},
        {"folder": "glue"},
        {"metrics": ("accuracy",)},
        {"task": ("sst2",), "dataset": "a.txt"},
        {"task": ("sst2", "sst2=other")},
        {"task": ("sst2", "rte")},
        {"metrics": ("accuracy",), "task": ("sst2", "rte=folder")},
        {"dtype": "int8"},
        {"sts": "glue", "task": ("stsb",)},
        {"attention": ("elu", "elu")},
        {"attention": ()},
    ],
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        with_options(EvaluateConfig(), options)


def test_every_option_has_a_help_text() -> None:
    for config in (EvaluateConfig, EvaluationData, SpeedConfig):
        for field in fields(config):
            assert len(field.metadata["help"]) > 10, field.name


def test_options_of_each_task() -> None:
    data = EvaluationData(task=("rte=a", "mrpc=b"))
    config = EvaluateConfig(data=data, converted=("c", "rte=d", "x=y"))
    assert (data.own_task, data.other_tasks) == (None, {"rte": "a", "mrpc": "b"})
    configs = config.for_model(), config.for_other_task("rte"), config.for_other_task("mrpc")
    assert [one.converted for one in configs] == [("c", "x=y"), ("d",), None]


def test_an_untrained_mechanism_is_calibrated_with_or_without_a_transfer() -> None:
    model, documents = tiny_model("gpt2"), sample_text().splitlines()
    options: dict[str, Any] = {**SMALL, "attention": ["vq"], "tokenizer": tiny_tokenizer(), "timing": False}
    without, with_transfer = (evaluate(model, documents, **{**options, "steps": steps}) for steps in (0, 1))
    scores = [one.select("perplexity", "loss", label="vq", state="untrained") for one in (without, with_transfer)]
    assert [len(rows) for rows in scores] == [1, 1]
    assert scores[0]["value"].item() == scores[1]["value"].item()


def test_options_fit_the_model() -> None:
    """A decoder with 74 positions: sequences within them, lengths that begin there."""
    from hf_linear_attn.study.options import resolve_options

    quick, full = (
        resolve_options(EvaluateConfig(quick=quick), "decoder", 74, "float32", table=True) for quick in (True, False)
    )
    assert quick.sequence_length == full.sequence_length == quick.context == 74
    assert quick.lengths[0] == full.lengths[0] == quick.length == 74
    assert quick.steps < full.steps
    assert (quick.attentions, full.attentions) == (QUICK_ATTENTIONS, DECODER_ATTENTIONS)
    own = EvaluateConfig(speed=SpeedConfig(lengths=(16, 32)))
    assert resolve_options(own, "decoder", 74, "float32", table=True).lengths == (16, 32)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib.*pip install 'hf-linear-attn\[demo\]'"):
        run("gpt2")


def test_checkpoints_are_timed_with_their_exact_heads() -> None:
    exact = ExactModel.load(GPT2.build(), "decoder", "gpt2", object())
    plan = {"default": {"attention": "window", "window_size": 4}, "1": {"exact_heads": [2]}}
    layers = hla.patch_model(GPT2.build(), plan).config.linear_attention["layers"]
    resolved: Any = SimpleNamespace(lengths=(16,), attentions=(), seed=0)
    groups = [CheckpointGroup("window", layers, {}, "window (converted)")]
    timed = timed_variants(exact, resolved, groups)[1].load()
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
    before = ExactModel.load(model, "decoder", "gpt2", object()).fingerprint
    assert ExactModel.load(model, "decoder", "gpt2", object()).fingerprint == before
    model.transformer.wte.weight.data[-1, -1] += 1
    assert ExactModel.load(model, "decoder", "gpt2", object()).fingerprint != before

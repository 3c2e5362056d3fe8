"""Conversion under a budget, which chooses the heads or layers that stay exact."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

import hf_linear_attn as hla
from hf_linear_attn.data.config import DataConfig, TimingConfig
from hf_linear_attn.data.recall_prompts import PromptMaker
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.integration.context import attention_modules
from hf_linear_attn.study.budgets import Budget
from hf_linear_attn.study.choose import SHARES
from hf_linear_attn.study.convert import convert
from hf_linear_attn.training.calibration import calibrate
from hf_linear_attn.training.head_search import find_exact_heads
from hf_linear_attn.training.options import ConvertConfig, DistillConfig
from tests.slow_cases import long
from tests.tiny_models import VOCABULARY, save_checkpoint
from tests.tiny_text import sample_text
from tests.training.tiny_runs import quiet, save_encoder, stored


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["30% cache at 2000", *long("100000% perplexity", "1.0000001x at 4000")])
def test_a_budget_needs_no_other_option(
    budget: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked = Mock(wraps=find_exact_heads)
    monkeypatch.setattr("hf_linear_attn.study.choose.find_exact_heads", ranked)
    config = ConvertConfig(
        model=str(folder / "decoder"),
        output=str(tmp_path / "out"),
        budget=budget,
        data=DataConfig(dataset=str(folder / "text" / "text.txt")),
        distill=DistillConfig(max_steps=2, per_device_train_batch_size=1),
        speed=TimingConfig(()),
    )
    results = convert(config, console=quiet())
    stages = results
    assert results.config["task_type"] == "causal-lm"
    assert stages.scores.distilled is not None
    assert stages.training.transfer is None
    plan = stages.choice.plan
    ranked.assert_called_once()  # beside the windows that the other heads get
    assert ranked.call_args.kwargs["window_size"] == plan["default"]["window_size"]
    model = hla.load_pretrained(str(tmp_path / "out" / "model"))
    layers_bytes = [layer.state_bytes for layer in hla.patch_report(model).layers]
    assert layers_bytes
    if "cache" in budget:
        # Counted in the cache itself, after as many tokens as the budget says.
        layers, width = model.config.n_layer, model.config.n_embd
        exact = layers * 2000 * 2 * width * 4
        mechanisms = [module.linear_attention for module in attention_modules(model)]
        state = sum(mechanism.state_bytes(2000) for mechanism in mechanisms)
        state += (layers - len(mechanisms)) * exact // layers
        assert state <= 0.3 * exact
    elif "perplexity" in budget:
        assert stored(tmp_path / "out", "0% exact heads")  # the first choice is within so wide a budget
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert f"For {budget}: " in card
    assert ("As saved: " in card) == ("cache" not in budget)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "model", "text", "options"),
    [
        ("1.9 cosine", "encoder", "text/text.txt", {"task_type": "embedding", "transfer": {"max_steps": 1}}),
        ("100 points", "tuned", "task", {"task_type": "classification", "transfer": {"max_steps": 1}}),
    ],
)
def test_a_budget_of_quality_serves_encoders(
    budget: str, model: str, text: str, options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    results = convert(
        model=str(folder / model),
        output=str(tmp_path / "out"),
        budget=budget,
        data={"dataset": str(folder / text), "text_columns": ["sentence" if text == "task" else "text"]},
        distill={"max_steps": 1},
        speed={"lengths": []},
        console=quiet(),
        **options,
    )
    stages, metric = results, results.score.metric
    assert stored(tmp_path / "out", "0% exact heads")[metric] == pytest.approx(stages.scores.patched[metric], abs=0.02)
    lost = stages.scores.teacher[metric] - stages.scores.distilled[metric]
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert f"For {budget}: untrained, the first choice within {budget}: " in card
    text = f"{lost:.4f} from cosine 1" if "cosine" in budget else f"{0.0 - round(100 * lost, 6):+.2f} points"
    assert f"As saved: {text}, which is within the budget." in card
    assert ("recall: the document of a sentence" in card) == ("cosine" in budget)


def test_a_choice_is_measured_as_it_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is calibrated once, on the rows that the student is calibrated on, though short ones come first."""
    monkeypatch.setattr("hf_linear_attn.study.stages.CALIBRATION_TOKENS", 100)
    monkeypatch.setattr("hf_linear_attn.training.head_search.CALIBRATION_TOKENS", 100)
    short, long = (sample_text(12).split()[start:stop] for start, stop in ((0, 4), (4, 64)))
    for name, rows in (("train", [short] * 20 + [long] * 6), ("validation", [long] * 3)):
        lines = [f"{' '.join(row[index:] + row[:index])},{index / 2}" for index, row in enumerate(rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["sentence,label", *lines]))
    save_encoder(tmp_path / "model", head=True, num_labels=1)
    monkeypatch.setattr(Budget, "is_met", lambda self, value: False)
    calibrated = Mock(wraps=calibrate)
    monkeypatch.setattr("hf_linear_attn.study.stages.calibrate", calibrated)
    stages = convert(
        model=str(tmp_path / "model"),
        output=str(tmp_path / "out"),
        task_type="classification",
        budget="0.001 points",
        data={"dataset": str(tmp_path), "text_columns": ["sentence"], "max_length": 64, "metrics": ["pearson", "mse"]},
        transfer={"max_steps": 0},
        distill={"num_train_epochs": 0},
        speed={"lengths": []},
        console=quiet(),
    )
    choices = [stored(tmp_path / "out", f"{share:.0%} exact heads")["mse"] for share in SHARES]
    assert len(set(choices)) > 1
    assert pytest.approx(stages.scores.patched["mse"], rel=1e-6) in choices
    assert calibrated.call_count == 2  # for all choices, and for the student


#: Architecture and config: heads of 32 to 256, one key-value head, normalised queries and keys, windows of their own.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "heads of 32": ("llama", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}),
    "qk-norm": ("qwen3", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}),
    "one head of 256": (
        "gemma3_text",
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 16}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    ),
    "windows in some layers": (
        "ministral",
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "sliding_window": 16}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["windows in some layers", *long("heads of 32", "qk-norm", "one head of 256")])
def test_a_budget_serves_every_shape_of_heads(shape: str, folder: Path, tmp_path: Path) -> None:
    architecture, config = SHAPES[shape]
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "max_position_embeddings": 512}
    save_checkpoint(tmp_path / "exact", architecture, AutoModelForCausalLM, **tokens, **config)
    results = convert(
        model=str(tmp_path / "exact"),
        output=str(tmp_path / "out"),
        budget="40% cache at 2000",
        data={"dataset": str(folder / "text" / "text.txt"), "max_length": 128},
        distill={"max_steps": 1, "per_device_train_batch_size": 1},
        speed={"lengths": []},
        console=quiet(),
    )
    assert results.training.calibration["within_factor_2"] > 0.5
    model: Any = hla.load_pretrained(str(tmp_path / "out" / "model"), AutoModelForCausalLM)
    own_windows = [index for index, kind in enumerate(config.get("layer_types", ())) if kind == "sliding_attention"]
    assert all(hla.patch_report(model).layers[index].attention == "softmax" for index in own_windows)
    # With the cache and without it the model says the same.
    ids = torch.randint(1, VOCABULARY, (1, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = output_cache(model(ids[:, :140], use_cache=True))
        steps = [model(ids[:, token : token + 1], **cache_argument(model, cache)).logits for token in range(140, 150)]
    rounded = results.choice.plan["default"].get("cache_dtype") == "int8"
    assert rounded == (shape == "one head of 256")
    tolerance = (2e-2 if rounded else 2e-3) * float(whole.abs().max())
    assert torch.allclose(torch.cat(steps, dim=1), whole[:, 140:], atol=tolerance)


def test_a_model_of_windows_alone_has_nothing_to_convert(folder: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "exact", "mistral", sliding_window=16)
    data = {"dataset": str(folder / "text" / "text.txt")}
    with pytest.raises((ValueError, NotImplementedError), match="sliding"):
        convert(model=str(tmp_path / "exact"), output=str(tmp_path / "out"), budget="40% cache at 2000", data=data)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("row_length", [160, *long(256)])
def test_a_budget_of_recall_is_measured_and_verified(row_length: int, folder: Path, tmp_path: Path) -> None:
    """A model of random weights that is taken for one that answers, by a score that is replaced."""
    paragraphs = [" ".join(["alpha", "beta", "gamma"] * 60)] * 40
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs))
    save_checkpoint(tmp_path / "decoder", "llama", max_position_embeddings=512)
    data = DataConfig(dataset=str(tmp_path / "text.txt"), max_length=row_length)
    options: dict[str, Any] = {"model": str(tmp_path / "decoder"), "data": data, "speed": TimingConfig(())}
    training = {"distill": DistillConfig(max_steps=1, per_device_train_batch_size=1)}
    with pytest.raises(ValueError, match="'90% recall at 200' cannot be measured: the exact model recalls nothing"):
        convert(ConvertConfig(output=str(tmp_path / "none"), budget="90% recall at 200", **options, **training))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptMaker, "score", lambda maker, prompt, output: float(prompt.depth < 0.6))
        config = ConvertConfig(output=str(tmp_path / "out"), budget="90% recall at 200", **options, **training)
        results = convert(config, console=quiet())
    stages = results
    assert stages.recall.length == 200
    assert stages.recall.teacher == stages.recall.student == stored(tmp_path / "out", "recall, 0% exact heads")
    assert (stages.recall.student["rows"], stages.recall.student["recall"]) == (48, pytest.approx(2 / 3))
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "| this model | 200 | 48 | 0.67 | 0.53 to 0.78 |" in card


@pytest.mark.parametrize("task_type", ["embedding", None])
def test_an_encoder_has_no_cache_to_make_smaller(task_type: Any, folder: Path, tmp_path: Path) -> None:
    """Told before any data is read; without a task type the checkpoint says what it is."""
    options: dict[str, Any] = {"task_type": task_type, "data": {"dataset": str(folder / "none.txt")}}
    with pytest.raises(
        ValueError, match=r"'25% cache at 2048' is for a causal .*: an encoder of sentences has no cache"
    ):
        convert(model=str(folder / "encoder"), output=str(tmp_path / "out"), budget="25% cache at 2048", **options)


def test_a_budget_beyond_the_rows_is_told_before_anything_is_measured(folder: Path, tmp_path: Path) -> None:
    screen = Console(file=io.StringIO(), width=200)
    data = {"dataset": str(folder / "text" / "text.txt"), "max_length": 32}
    model, output = str(folder / "decoder"), str(tmp_path / "out")
    with pytest.raises(ValueError, match="cannot be met"):
        convert(model=model, output=output, budget="1% cache at 96", data=data, console=screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    notice = shown.index("The budget is for 96 tokens, and no row has more than 32: what the model recalls is measured")
    assert notice < shown.index("teacher: ")


@pytest.mark.slow
def test_a_budget_that_cannot_be_used_is_an_error_before_any_work(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": str(folder / "decoder"), "output": str(tmp_path / "out")}
    options["data"] = {"dataset": str(folder / "text" / "text.txt")}
    with pytest.raises(ValueError, match="cannot be read"):
        convert(**options, budget="much")
    for budget in ("150% recall at 2048", "90% recall at 4", "0% cache at 2048"):
        with pytest.raises(ValueError, match=r"is not a share of the .* at 16 tokens or more"):
            convert(**options, budget=budget)
    with pytest.raises(ValueError, match=r"'0.5 points' is for a classifier; this is a causal language model"):
        convert(**options, budget="0.5 points")
    with pytest.raises(ValueError, match="or the --task_type of your model"):
        convert(**options, budget="0.5 points")
    with pytest.raises(ValueError, match="exact_share: is chosen by the budget"):
        convert(**options, budget="1% perplexity", exact_share=0.1)
    with pytest.raises(ValueError, match=r"options.window_size: is chosen by the budget"):
        convert(**options, budget="1% perplexity", options={"window_size": 32})
    with pytest.raises(ValueError, match=r"'1% perplexity' is for a causal language model; this is an encoder"):
        convert(**options, budget="1% perplexity", task_type="embedding")
    with pytest.raises(ValueError, match="budget: is for causal-lm, embedding, classification"):
        convert(**options, budget="1% perplexity", task_type="masked-lm")
    with pytest.raises(
        ValueError, match=r"'1% perplexity' is for a causal language model; this is an encoder of sentences"
    ):
        convert(**{**options, "model": str(folder / "encoder")}, budget="1% perplexity")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="windows of 64 tokens, stored in int8, take"):
        convert(**options, budget="1% cache at 100", speed={"lengths": []})


@pytest.mark.slow
def test_a_speedup_that_is_lost_in_noise_meets_no_budget(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = {"student": {"speedup": 1.5, "speedup_p20": 0.7, "speedup_p80": 2.0}}
    monkeypatch.setattr("hf_linear_attn.study.stages.measure_passes", lambda *args, **options: noisy)
    data = DataConfig(dataset=str(folder / "text" / "text.txt"))
    config = ConvertConfig(model=str(folder / "decoder"), data=data, output=str(tmp_path / "out"), budget="1.2x at 100")
    with pytest.raises(ValueError, match=r"budget .1\.2x at 100.: 1\.00x with 50% exact heads"):
        convert(config, console=quiet())

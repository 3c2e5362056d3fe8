"""The recipe of rivals on a tiny decoder: keys that are dropped, a cache that is rounded, the report, a second call."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import hf_linear_attn as hla
from hf_linear_attn.cli.running import exit_code
from hf_linear_attn.study.convert import convert
from hf_linear_attn.study.study import Study
from recipes import rivals
from tests.tiny_models import save_checkpoint, tiny_model
from tests.training.tiny_runs import convert_config, quiet, save_text

COUNT = 96


@pytest.fixture
def context_ids() -> list[int]:
    return torch.randint(3, 60, (COUNT,), generator=torch.Generator().manual_seed(0)).tolist()


def main(arguments: list[str]) -> int:
    return exit_code(lambda: rivals.main(arguments))


def llama() -> Any:
    torch.manual_seed(0)
    return tiny_model("llama", num_hidden_layers=2, vocab_size=64, max_position_embeddings=1024).eval()


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_dropped_keys_are_a_mask_on_exact_attention(context_ids: list[int], share: float) -> None:
    model = llama()
    context = rivals.read_context(model, context_ids, rivals.PRESSES)
    pressed = context.pressed("streaming-llm", share)
    more = [5, 9, 11, 20]
    logits = rivals.Reader(model, pressed).read(more)
    # The same by a mask: the later queries see the sinks and the last keys of the context, and themselves causally.
    count = int(share * COUNT)
    mask = torch.ones(COUNT + len(more), COUNT + len(more), dtype=torch.bool).tril()
    mask[COUNT:, rivals.SINKS : COUNT - (count - rivals.SINKS)] = False
    with torch.inference_mode():
        ids = torch.tensor([[*context_ids, *more]])
        expected = model(input_ids=ids, attention_mask=mask[None, None]).logits[0, COUNT:]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    assert pressed.bytes == count * context.bytes // COUNT
    assert context.cache.get_seq_length() == COUNT  # the context itself is unchanged


def test_scores_are_those_of_the_papers(context_ids: list[int]) -> None:
    model = llama()
    context = rivals.read_context(model, context_ids, rivals.PRESSES)
    layer: Any = context.cache.layers[1]
    head, group = 1, model.config.num_attention_heads // model.config.num_key_value_heads
    keys, values = layer.keys[0, head].clone(), layer.values[0, head].clone()
    # SnapKV: the attention weights of the last queries, by the model itself.
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([context_ids]), output_attentions=True, output_hidden_states=True)
    weights = output.attentions[1][0, head * group : (head + 1) * group, -rivals.VOTERS :, : -rivals.VOTERS]
    votes = functional.avg_pool1d(weights.mean(1), rivals.SPREAD, padding=2, stride=1).mean(0)
    torch.testing.assert_close(context.scores["snapkv"][1][0, head, : -rivals.VOTERS], votes)
    # KeyDiff: the cosine with the mean of the directions.
    directions = keys / keys.norm(dim=-1, keepdim=True)
    mean = directions.mean(0)
    torch.testing.assert_close(context.scores["keydiff"][1][0, head], -(directions @ mean) / mean.norm())
    # Expected attention: E exp(s q·k) of normal queries, each rotated to the mean of the next positions.
    attention = model.model.layers[1].self_attn
    hidden = model.model.layers[1].input_layernorm(output.hidden_states[1].clone())[0, rivals.SINKS :]
    expected = torch.zeros(COUNT - rivals.SINKS)
    size = attention.head_dim
    angles = torch.arange(COUNT, COUNT + rivals.FUTURE)[:, None] * model.model.rotary_emb.inv_freq
    cosine, sine = angles.cos().mean(0), angles.sin().mean(0)
    for index in range(head * group, (head + 1) * group):
        rotated = hidden @ attention.q_proj.weight[index * size : (index + 1) * size].T
        first, second = rotated.split(size // 2, dim=-1)
        rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        mean, covariance = rotated.mean(0), torch.cov(rotated.T, correction=0)
        rest = keys[rivals.SINKS :]
        logits = rest @ mean / size**0.5 + torch.einsum("ni,ij,nj->n", rest, covariance, rest) / size / 2
        expected += logits.softmax(0).detach() / group
    expected = expected * values[rivals.SINKS :].norm(dim=-1)
    actual = context.scores["expected-attention"][1][0, head]
    torch.testing.assert_close(actual[rivals.SINKS :], expected, atol=1e-6, rtol=1e-3)
    assert actual[: rivals.SINKS].isinf().all()


def test_rounded_caches_are_near_and_counted(context_ids: list[int]) -> None:
    context = rivals.read_context(llama(), context_ids)
    layer: Any = context.cache.layers[0]
    exact, size = layer.keys, layer.keys.shape[-1]
    for bits in (8, 4):
        rounded = context.quantized(bits)
        stored: Any = rounded.cache.layers[0]
        error = (stored.keys - exact).abs().amax(-1)
        assert (error <= exact.abs().amax(-1) / (2**bits - 2) * 1.001).all()
        assert rounded.bytes == context.bytes * (size * bits // 8 + 4) // (4 * size)


def recipe_arguments(folder: Path) -> list[str]:
    """Save a tiny model and text, and return the arguments of a short run on them, whose output is `folder / "out"`."""
    sizes = {"num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 1024}
    model, text = save_checkpoint(folder / "model", "llama", eos=True, **sizes), str(save_text(folder / "text"))
    small = "--lengths 192 --texts=1 --trials=1 --tasks niah_multikey_1 --continuation=8 --greedy=3 --window_size=12"
    files = ["--model", str(model), "--test_text", text, "--train_text", text, "--output", str(folder / "out")]
    return [*files, *small.split(), "--exact_share=0.3", "--search_length=128"]


def test_files_of_other_content_are_measured_anew(tmp_path: Path) -> None:
    names = iter(recipe_arguments(tmp_path)[:8])
    options = {name.removeprefix("--"): value for name, value in zip(names, names, strict=True)}

    def conditions(variant: str) -> Any:
        rival = rivals.Rivals(rivals.RecipeConfig(**options, lengths=(192,)), Study())
        return rival.conditions(variant, "text", length=192, seed=0).id

    before = {variant: conditions(variant) for variant in ("exact", "mixture")}
    assert conditions("exact") == before["exact"]
    Path(options["test_text"]).write_text("another text", encoding="utf-8")
    assert all(conditions(variant) != known for variant, known in before.items())


@pytest.mark.slow
def test_all_variants_are_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, out = recipe_arguments(tmp_path), tmp_path / "out"
    assert main(arguments) == 0, capsys.readouterr().err
    rows = {row["variant"]: row for row in json.loads((out / "results.json").read_text())["rows"]}
    assert tuple(rows) == rivals.VARIANTS
    assert all(row["recall"]["niah_multikey_1"]["prompts"] == 4 and row["texts"] == 1 for row in rows.values())
    assert all((rows[name]["preparation"] > 0) == (name in rivals.OURS) for name in rows)
    assert rows["exact"]["token_ratio"] == rows["exact"]["prompt_ratio"] == 1
    assert rows["exact"]["output"] == 3
    assert rows["exact"]["likeliest"] == 1.0
    assert rows["snapkv-25"]["bytes"] == rows["exact"]["bytes"] / 4
    assert rows["keydiff-50"]["bytes"] == rows["exact"]["bytes"] / 2
    report = (out / "report.md").read_text()
    assert all(f"| {name} " in report for name in rivals.VARIANTS)
    records = (out / "records.jsonl").read_text().count('"kind": "record"')
    assert main(arguments) == 0
    assert (out / "records.jsonl").read_text().count('"kind": "record"') == records > 0


@pytest.mark.slow
def test_answers_by_other_options_are_no_part_of_a_report(tmp_path: Path) -> None:
    arguments, out = [*recipe_arguments(tmp_path), "--variants", "mixture"], tmp_path / "out"
    sizes = []
    for share in ("0.3", "0.8"):
        assert main([*arguments, f"--exact_share={share}"]) == 0
        rows = {row["variant"]: row for row in json.loads((out / "results.json").read_text())["rows"]}
        assert rows["mixture"]["recall"]["niah_multikey_1"]["prompts"] == 4
        sizes.append(rows["mixture"]["bytes"])
    assert sizes[0] < sizes[1]


@pytest.mark.slow
def test_a_conversion_joins_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its model is that of the folder of `convert`, and its preparation what all stages took."""
    arguments, folder = recipe_arguments(tmp_path), tmp_path / "converted"
    task = {"task_type": "causal-lm", "data__text_columns": ["text"], "attention": "elu"}
    steps = {"teacher__max_steps": None, "distill__max_steps": 1}
    config = convert_config(tmp_path / "model", tmp_path / "text" / "text.txt", folder, **task, **steps)
    training = asdict(convert(config, console=quiet()).training)
    assert main([*arguments, "--variants", "mixture", "--converted", str(folder)]) == 0, capsys.readouterr().err
    rows = {row["variant"]: row for row in json.loads((tmp_path / "out" / "results.json").read_text())["rows"]}
    assert tuple(rows) == ("exact", "mixture", "converted")
    converted = rows["converted"]
    assert converted["bytes"] == rivals.read_context(hla.load_pretrained(str(folder / "model")), range(3, 51)).bytes
    assert converted["preparation"] == sum(part.get("seconds") or 0 for part in training.values() if part) > 0
    assert converted["loss"] != rows["exact"]["loss"]


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--variants", "h2o"]) != 0
    assert "h2o" in capsys.readouterr().err
    assert main(["--output", str(tmp_path / "out")]) != 0
    assert "test_text" in capsys.readouterr().err

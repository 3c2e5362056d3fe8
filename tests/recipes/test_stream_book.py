"""The recipe that reads a book: a tiny decoder, a small book, every way to count."""

import json

import pytest
from transformers import AutoModelForCausalLM

import hf_linear_attn as hla
from recipes.benchmarks import stream_book
from tests.training.tiny_runs import save_decoder


@pytest.fixture(scope="module")
def recipe():
    return stream_book


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream")
    save_decoder(path / "decoder")
    vocabulary = ["the", "red", "cat", "saw", "a", "blue", "dog", "near", "the", "old", "house", "and", "went", "home"]
    lines = (" ".join(vocabulary[k % 7 :] + vocabulary[: k % 7]) for k in range(400))
    (path / "book.txt").write_text("\n\n".join(lines), encoding="utf-8")
    return path


def arguments_for(folder, *more):
    small = ["--steps", "2", "--train-length", "80", "--every", "500", "--tokens", "1500"]
    text = str(folder / "book.txt")
    return ["--model", str(folder / "decoder"), "--text", text, "--train-text", text, *small, *more]


@pytest.mark.parametrize("positions", ["wrap", "restart"])
def test_the_book_is_read_at_constant_memory(recipe, folder, tmp_path, positions, capsys):
    out = tmp_path / "runs.json"
    for chunk in ("64", "64", "1"):
        assert (
            recipe.main(arguments_for(folder, "--positions", positions, "--chunk-length", chunk, "--out", str(out)))
            == 0
        )
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["settings"]["chunk_length"] for row in rows] == [64, 1]  # the second run took the place of the first
    for row in rows:
        assert row["tokens"] == 1500
        assert row["growth"]["state_bytes"] == 0
        assert sum(value["tokens"] for value in row["ranges"]) == 1499
        assert [value["from"] for value in row["ranges"]] == [0, 512]
        assert "/" not in json.dumps(row["settings"])
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
    shown = capsys.readouterr().out
    assert "1,500 tokens" in shown
    assert "states 0" in shown


def test_counting_on_ends_with_a_learned_table(recipe, folder):
    with pytest.raises(ValueError, match=r"beyond the 96 learned positions.*extend_positions"):
        recipe.main(arguments_for(folder, "--positions", "continue"))
    assert recipe.main(arguments_for(folder, "--positions", "continue", "--max-length", "1600")) == 0


def test_exact_attention_grows_unless_it_restarts(recipe, folder):
    exact = ["--attention", "softmax"]
    assert recipe.main(arguments_for(folder, *exact, "--positions", "wrap", "--every", "700")) == 1
    assert recipe.main(arguments_for(folder, *exact, "--positions", "restart", "--period", "50", "--every", "400")) == 0


def test_a_patched_checkpoint_is_read_as_it_is(recipe, folder, tmp_path):
    from transformers import AutoTokenizer

    model = hla.patch_model(AutoModelForCausalLM.from_pretrained(folder / "decoder"), "elu")
    model.save_pretrained(tmp_path / "patched")
    AutoTokenizer.from_pretrained(folder / "decoder").save_pretrained(tmp_path / "patched")
    out = tmp_path / "runs.json"
    arguments = arguments_for(folder, "--out", str(out))
    arguments[1] = str(tmp_path / "patched")
    assert recipe.main(arguments) == 0
    assert json.loads(out.read_text(encoding="utf-8"))["rows"][0]["attention"] == ["elu"]


def test_an_empty_book_is_reported(recipe, folder, tmp_path):
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    arguments = arguments_for(folder)
    arguments[3] = str(tmp_path / "empty.txt")
    if recipe.AutoTokenizer.from_pretrained(folder / "decoder").bos_token_id is None:
        with pytest.raises(ValueError, match="holds no text"):
            recipe.main(arguments)


def test_help(recipe, capsys):
    with pytest.raises(SystemExit) as done:
        recipe.main(["--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert "python -m recipes.benchmarks.stream_book --model PATH --text book.txt" in shown
    assert "--positions {continue,wrap,restart}" in shown

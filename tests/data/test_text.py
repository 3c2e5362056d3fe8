"""Documents, the split into train and held-out, and token sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from hf_linear_attn.data.files import split_documents
from hf_linear_attn.data.text import (
    docstrings,
    encode_text,
    padded_batches,
    read_text,
    special_tokens,
    split_train,
    standard_library_documents,
    token_documents,
    token_passages,
)
from tests.tiny_text import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def test_standard_library_is_enough() -> None:
    text = read_text(None)
    assert len(text.train) > 60
    assert len(text.held_out) > 15
    assert sum(map(len, text.train)) + sum(map(len, text.held_out)) > 300_000
    assert not set(text.train) & set(text.held_out)


def test_standard_library_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("textwrap", "string", "json", "bisect", "this", "_weakrefset", "math")
    monkeypatch.setattr("sys.stdlib_module_names", frozenset(names))
    first = standard_library_documents()
    assert first == standard_library_documents()
    # bisect, json, string, textwrap in order; the others are built in, private or a joke.
    assert len(first) == 4
    assert first[0].startswith("Insert item x in list a")


@pytest.mark.parametrize(
    ("text", "documents"),
    [
        ("a b\n<|endoftext|>\nc\n\nd<|endoftext|>", ["a b", "c\n\nd"]),
        ("one\n\ntwo\nthree", ["one\n\ntwo\nthree"]),
        ("CCO\r\nCCN\nCCO\n", ["CCO", "CCN"]),
    ],
)
def test_documents(text: str, documents: list[str]) -> None:
    assert split_documents(text) == documents


def test_wikitext_is_split_into_articles(tmp_path: Path) -> None:
    """A line of one space, as WikiText has them, does not end a document."""
    article = " \n = Title {} = \n \n" + " A sentence . \n \n Another one . \n" * 10
    path = tmp_path / "wiki.train.tokens"
    path.write_text("".join(article.format(index) for index in range(20)))
    text = read_text(str(path))
    assert (len(text.train), len(text.held_out)) == (16, 4)


def test_every_fifth_document_is_held_out() -> None:
    documents = [str(index) for index in range(23)]
    train, held_out = split_train(documents)
    assert held_out == ["4", "9", "14", "19"]
    assert sorted(train + held_out, key=int) == documents


def test_a_running_text_is_cut_at_four_fifths() -> None:
    text = " ".join(str(index) for index in range(1000))
    (train,), (held_out,) = split_train([text])
    assert f"{train} {held_out}" == text
    assert len(train) / len(text) == pytest.approx(0.8, abs=0.01)


def test_docstrings_are_read_without_running_the_file(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Top."""\nraise SystemExit\ndef f():\n    """Inner\n       text."""\n', encoding="utf-8")
    assert list(docstrings(path)) == ["Top.", "Inner\ntext."]
    path.write_text("def broken(:", encoding="utf-8")
    assert list(docstrings(path)) == []


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no text file .*nowhere\.txt"):
        read_text(str(tmp_path / "nowhere.txt"))
    with pytest.raises(FileNotFoundError, match="no text file"):
        read_text(str(tmp_path))


def test_short_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short", encoding="utf-8")
    with pytest.raises(ValueError, match="9 characters; at least 2000"):
        read_text(str(path))


def test_binary_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "binary.txt"
    path.write_bytes(b"\xff\xfe\x00" * 2000)
    with pytest.raises(ValueError, match="not UTF-8"):
        read_text(str(path))


def test_special_tokens_are_detected(tokenizer: PreTrainedTokenizerFast) -> None:
    assert special_tokens(tokenizer, ["alpha beta", "gamma"]) == ([tokenizer.cls_token_id], [tokenizer.sep_token_id])
    bare = tiny_tokenizer()
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert special_tokens(bare, ["alpha beta"]) == ([], [])


def test_whole_documents_keep_to_the_budget(tokenizer: PreTrainedTokenizerFast) -> None:
    passages = token_documents(tokenizer, ["alpha beta", "gamma", "delta delta delta", "the"], 9)
    assert passages[:2] == [tokenizer("alpha beta")["input_ids"], tokenizer("gamma")["input_ids"]]
    assert [len(document) for document in passages] == [4, 3, 2]


def test_unreadable_text_is_reported() -> None:
    """A word-level tokenizer without an unknown token, as some published ones are."""
    strict = Tokenizer(models.WordLevel({"alpha": 0}))
    broken = PreTrainedTokenizerFast(tokenizer_object=strict)
    assert encode_text(broken, "alpha") == [0]
    with pytest.raises(ValueError, match="tokenizer cannot read 'omega'"):
        encode_text(broken, "omega")


def test_passages_have_the_length_and_lose_no_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    document = "alpha beta gamma delta " * 40
    passages = token_passages(tokenizer, [document], 34, 100)
    assert [len(passage) for passage in passages] == [34] * 5
    assert sum(len(passage) - 2 for passage in passages) == 160
    assert passages[0][0] == tokenizer.cls_token_id


def test_passages_are_spread_over_the_documents(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = ("alpha", "beta", "gamma", "delta")
    passages = token_passages(tokenizer, [f"{word} " * 64 for word in vocabulary], 34, 4)
    firsts = [passage[1] for passage in passages]
    assert firsts == tokenizer(" ".join(vocabulary), add_special_tokens=False)["input_ids"]


def test_batches_are_padded_on_the_right() -> None:
    first, second = padded_batches([[1, 2, 3], [4], [5, 6]], 2, pad=9)
    assert first["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert first["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert second["input_ids"].tolist() == [[5, 6]]

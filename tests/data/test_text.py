"""DocumentSplit, the split into train and held-out, and token sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from hf_linear_attn.data.files import DocumentSplit, text_documents
from hf_linear_attn.data.text import (
    cut_end,
    docstrings,
    encode_text,
    padded_batches,
    special_tokens,
    standard_library_documents,
    text_rows,
    token_passages,
)
from tests.tiny_text import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def test_standard_library_is_enough() -> None:
    documents = standard_library_documents()
    assert len(documents) > 75
    assert sum(map(len, documents)) > 300_000


def test_standard_library_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("textwrap", "string", "json", "bisect", "this", "_weakrefset", "math")
    monkeypatch.setattr("sys.stdlib_module_names", frozenset(names))
    read = standard_library_documents.__wrapped__  # without the cache
    first = read()
    assert first == read()
    # bisect, json, string, textwrap in order; the others are built in, private or a joke.
    assert len(first) == 4
    assert first[0].startswith("Insert item x in list a")


@pytest.mark.parametrize(
    ("name", "text", "by", "documents"),
    [
        ("a.txt", "a b\n<|endoftext|>\nc\n\nd<|endoftext|>", "auto", ["a b", "c\n\nd"]),
        ("a.txt", "one\n\ntwo\nthree\n \nfour", "auto", ["one\n\ntwo\nthree\n \nfour"]),
        ("a.txt", "one\n\ntwo\nthree\n \nfour", "paragraphs", ["one", "two\nthree", "four"]),
        ("a.txt", "CCO\r\nCCN\nCCO\n", "auto", ["CCO\nCCN\nCCO"]),
        ("a.txt", "CCO\r\nCCN\nCCO\n", "lines", ["CCO", "CCN"]),
        ("a.smi", "CCO\r\nCCN\nCCO\n", "auto", ["CCO", "CCN"]),
    ],
)
def test_documents(name: str, text: str, by: DocumentSplit, documents: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert text_documents(tmp_path / name, by) == documents


def test_wikitext_is_split_into_articles(tmp_path: Path) -> None:
    """A line of one space, as WikiText has them, does not end a document."""
    article = " \n = Title {} = \n \n" + " A sentence . \n \n Another one . \n" * 10
    path = tmp_path / "wiki.train.tokens"
    path.write_text("".join(article.format(index) for index in range(20)))
    assert len(text_documents(path)) == 20


def test_the_end_of_few_documents_is_held_out() -> None:
    text = " ".join(str(index) for index in range(1000))
    (train,), (validation,) = cut_end([text], 0.2)
    assert f"{train} {validation}" == text
    assert len(train) / len(text) == pytest.approx(0.8, abs=0.01)
    train, validation = cut_end(["x" * 60, "one two " * 5, "y" * 10], 0.25)  # 27 characters are held out
    assert (train, validation) == (["x" * 60, "one two one two one two"], ["one two one two", "y" * 10])


@pytest.mark.parametrize("text", ["\u4e00\u4e8c" * 500 + " \u4e09", "word\n" * 200 + "two words"])
def test_the_share_is_held_out_of_a_text_without_spaces(text: str) -> None:
    """Also where the only space is at the end: some scripts have none, and lines may be words."""
    (train,), (validation,) = cut_end([text], 0.2)
    assert "".join((train + validation).split()) == "".join(text.split())
    assert len(validation) / len(text) == pytest.approx(0.2, abs=0.01)


def test_rows_of_a_causal_model_are_packed() -> None:
    """A sentence a line, as one running text or as documents, gives rows of the full length."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "[SEP]"
    lines = ["alpha beta", "gamma", "delta delta delta", "the"] * 8
    ids = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines]
    stream = [token for document in ids for token in (*document, tokenizer.eos_token_id)]
    rows = text_rows(tokenizer, lines, 16, causal=True)
    assert rows == [[tokenizer.cls_token_id, *stream[start : start + 15]] for start in range(0, len(stream) - 14, 15)]
    assert text_rows(tokenizer, lines, 16, 2, causal=True) == [rows[0], rows[len(rows) // 2]]
    assert text_rows(tokenizer, lines, 4096, causal=True) == [[tokenizer.cls_token_id, *stream]]  # less than a row
    assert text_rows(tokenizer, lines, 16, causal=False) == [tokenizer(line)["input_ids"] for line in lines]


def test_docstrings_are_read_without_running_the_file(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Top."""\nraise SystemExit\ndef f():\n    """Inner\n       text."""\n', encoding="utf-8")
    assert list(docstrings(path)) == ["Top.", "Inner\ntext."]
    path.write_text("def broken(:", encoding="utf-8")
    assert list(docstrings(path)) == []


def test_special_tokens_are_detected(tokenizer: PreTrainedTokenizerFast) -> None:
    assert special_tokens(tokenizer, ["alpha beta", "gamma"]) == ([tokenizer.cls_token_id], [tokenizer.sep_token_id])
    bare = tiny_tokenizer()
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert special_tokens(bare, ["alpha beta"]) == ([], [])


def test_empty_documents_change_nothing() -> None:
    """A blank row, of which WikiText on the Hub has many, says nothing of the special tokens."""
    tokenizer = tiny_tokenizer(eos=True)
    documents = ["alpha beta gamma", "one two", "red green blue"]
    for causal in (False, True):
        expected = text_rows(tokenizer, documents, 5, causal=causal)
        assert {row[0] for row in expected} == {tokenizer.cls_token_id}
        assert text_rows(tokenizer, [documents[0], "", " ", *documents[1:]], 5, causal=causal) == expected
    assert special_tokens(tokenizer, ["", " "]) == ([], [])


def test_unreadable_text_is_reported() -> None:
    """A word-level tokenizer without an unknown token, as some published ones are."""
    strict = Tokenizer(models.WordLevel({"alpha": 0}))
    broken = PreTrainedTokenizerFast(tokenizer_object=strict)
    assert encode_text(broken, "alpha") == [0]
    with pytest.raises(ValueError, match="tokenizer cannot read 'omega'"):
        encode_text(broken, "omega")


def test_passages_have_the_length_and_lose_no_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    document = "alpha beta gamma delta " * 40
    passages = token_passages(tokenizer, [document], 34)
    assert [len(passage) for passage in passages] == [34] * 5
    assert sum(len(passage) - 2 for passage in passages) == 160
    assert passages[0][0] == tokenizer.cls_token_id


def test_passages_are_spread_over_the_documents(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = ("alpha", "beta", "gamma", "delta")
    passages = text_rows(tokenizer, [f"{word} " * 64 for word in vocabulary], 34, 4, causal=False)
    firsts = [passage[1] for passage in passages]
    assert firsts == tokenizer(" ".join(vocabulary), add_special_tokens=False)["input_ids"]


def test_batches_are_padded_on_the_right() -> None:
    first, second = padded_batches([[1, 2, 3], [4], [5, 6]], 2, pad=9)
    assert first["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert first["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert second["input_ids"].tolist() == [[5, 6]]

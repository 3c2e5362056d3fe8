"""Encoding: what the tokenizer gives, counted, cached, and errors that name the row."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
import pytest

from hf_linear_attn.data.encode import encode_blocks, encode_documents, encode_pairs
from tests.data.made_up import tokenizer

PAIRS = {
    "first": ["alpha beta", "one two three four", "red"],
    "second": ["gamma", "five six blue green", "green"],
    "label": [0, 1, 0],
}


def pairs(**features):
    made = datasets.Dataset.from_dict(PAIRS)
    return made.cast_column("label", features["label"]) if features else made


def test_pairs():
    tok = tokenizer()
    found = encode_pairs(pairs(), tok, ["first", "second"], 9)
    expected = [tok(a, b, truncation=True, max_length=9) for a, b in zip(PAIRS["first"], PAIRS["second"], strict=True)]
    for name in ("input_ids", "token_type_ids"):
        assert found.dataset[name][:] == [row[name] for row in expected]
    assert found.dataset["labels"][:] == [0, 1, 0]
    assert sorted(found.dataset.column_names) == ["input_ids", "labels", "token_type_ids"]
    assert (found.rows, found.tokens, found.truncated, found.dropped) == (3, 6 + 9 + 5, 1, 0)


def test_rows_that_just_fit_are_not_truncated():
    found = encode_pairs(pairs(), tokenizer(), ["first", "second"], 11)
    assert (found.truncated, max(map(len, found.dataset["input_ids"]))) == (0, 11)


def test_one_column_and_no_token_types():
    tok = tokenizer()
    tok.model_input_names = ["input_ids", "attention_mask"]
    found = encode_pairs(pairs(), tok, ["first"], 8)
    assert sorted(found.dataset.column_names) == ["input_ids", "labels"]
    assert found.dataset["input_ids"][0] == tok("alpha beta")["input_ids"]


def test_kinds_of_labels_stay():
    classes = datasets.ClassLabel(names=["no", "yes"])
    assert encode_pairs(pairs(label=classes), tokenizer(), ["first"], 8).dataset.features["labels"] == classes
    scores = encode_pairs(pairs(label=datasets.Value("float32")), tokenizer(), ["first"], 8).dataset
    assert scores["labels"][:] == [0.0, 1.0, 0.0]
    assert isinstance(scores[0]["labels"], float)


def test_encoding_is_found_again_in_the_cache(tmp_path):
    """Also after the same tokenizer was used with other settings, and whatever was encoded before."""
    pairs().save_to_disk(tmp_path)
    tok = tokenizer()

    def encoded(length=8):
        return encode_pairs(datasets.load_from_disk(str(tmp_path)), tok, ["first", "second"], length)

    first = encoded()
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache*")}
    assert len(files) == 1
    tok("alpha", truncation=True, max_length=3, padding="max_length")
    again = encoded()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache*")} == files
    assert again.dataset.to_dict() == first.dataset.to_dict()
    assert (again.truncated, again.tokens) == (first.truncated, first.tokens) == (1, first.tokens)
    assert encoded(20).truncated == 0


def test_nothing_is_written_where_nothing_can_be(monkeypatch, tmp_path):
    pairs().save_to_disk(tmp_path)
    held = datasets.load_from_disk(str(tmp_path))
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(Path(path)) or False)
    assert encode_pairs(held, tokenizer(), ["first"], 8).rows == 3
    assert asked == [tmp_path]
    assert not list(tmp_path.glob("cache*"))


def test_a_row_that_the_tokenizer_cannot_read_is_named():
    with pytest.raises(ValueError, match=r"Row 2: the tokenizer cannot read 'omega' "):
        encode_pairs(
            datasets.Dataset.from_dict({"text": ["alpha", "beta", "omega"], "label": [0, 1, 1]}),
            tokenizer(unknown=False),
            ["text"],
            8,
        )


@pytest.mark.parametrize(
    ("changes", "columns", "length", "message"),
    [
        ({}, ["frist"], 8, "no column 'frist'. Did you mean 'first'"),
        ({}, ["first", "second", "label"], 8, "One or two text columns can be encoded, got 3"),
        ({}, ["first", "second"], 4, "max_length=4 leaves no room for text beside 3 special tokens"),
        ({}, ["first"], 2.5, "max_length=2.5 leaves no room"),
        ({"first": ["a", None, "b"]}, ["first"], 8, "Row 1: expected text, found None"),
        ({"label": [0, -1, 0]}, ["first"], 8, "Row 1: the label is -1"),
        ({"label": [0, None, 0]}, ["first"], 8, "Row 1: the label is None"),
    ],
)
def test_what_cannot_be_encoded_is_told(changes, columns, length, message):
    with pytest.raises(ValueError, match=message):
        encode_pairs(datasets.Dataset.from_dict({**PAIRS, **changes}), tokenizer(), columns, length)


def test_a_row_without_tokens_is_told():
    tok = tokenizer()
    tok.backend_tokenizer.post_processor = tokenizer().backend_tokenizer.post_processor.__class__(
        single="$A", special_tokens=[]
    )
    with pytest.raises(ValueError, match="Row 1: the tokenizer makes no tokens of it"):
        encode_documents(datasets.Dataset.from_dict({"text": ["alpha", " "]}), tok, "text", 8)


def texts(count=25):
    words = ["alpha", "beta", "gamma", "one", "two", "red"]
    return [" ".join(words[(row + place) % 6] for place in range(row % 7)) for row in range(count)]


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("length", [2, 5, 16])
def test_blocks_hold_the_running_text(eos, length):
    tok = tokenizer()
    documents = texts()
    whole = []
    for document in documents:
        ids = tok(document, add_special_tokens=False)["input_ids"]
        whole += [*ids, *([tok.eos_token_id] if eos and ids else [])]
    found = encode_blocks(datasets.Dataset.from_dict({"text": documents}), tok, "text", length, eos=eos)
    blocks = found.dataset["input_ids"][:]
    assert {len(block) for block in blocks} == {length}
    kept = [token for block in blocks for token in block]
    assert kept == whole[: len(kept)]
    assert found.dropped == len(whole) - len(kept) < length
    assert (found.rows, found.tokens) == (len(blocks), len(kept))


def test_blocks_of_chosen_rows():
    """`select` leaves all rows in the table and keeps a list of those that count."""
    chosen = datasets.Dataset.from_dict({"text": ["alpha beta", "one", "two red"]}).select([2, 0])
    tok = tokenizer()
    found = encode_blocks(chosen, tok, "text", 6).dataset[0]["input_ids"]
    assert tok.convert_ids_to_tokens(found) == ["two", "red", "[EOS]", "alpha", "beta", "[EOS]"]


def test_blocks_that_cannot_be_made_are_told():
    short = datasets.Dataset.from_dict({"text": ["alpha"]})
    with pytest.raises(ValueError, match="2 tokens do not fill one block of 8"):
        encode_blocks(short, tokenizer(), "text", 8)
    with pytest.raises(ValueError, match="at least 2, got 1"):
        encode_blocks(short, tokenizer(), "text", 1)
    tok = tokenizer()
    tok.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        encode_blocks(short, tok, "text", 2)
    with pytest.raises(ValueError, match="no column 'txt'"):
        encode_blocks(short, tokenizer(), "txt", 2)


def test_documents():
    tok = tokenizer()
    found = encode_documents(
        datasets.Dataset.from_dict({"text": ["alpha beta gamma", "one"], "n": [1, 2]}), tok, "text", 4
    )
    assert found.dataset["input_ids"][:] == [tok("alpha beta")["input_ids"], tok("one")["input_ids"]]
    assert (found.rows, found.tokens, found.truncated) == (2, 7, 1)
    assert "labels" not in found.dataset.column_names

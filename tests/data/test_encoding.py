"""Encoding: what the tokenizer gives, counted, cached, and errors that name the row."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
import pytest

from hf_linear_attn.data.encoding import encode_blocks, encode_pairs, encode_passages, encode_targets
from hf_linear_attn.data.text import packed_rows
from tests.data.tiny_data import tokenizer

PAIRS = {
    "first": ["alpha beta", "one two three four", "red"],
    "second": ["gamma", "five six blue green", "green"],
    "label": [0, 1, 0],
}


def pairs(**features):
    dataset = datasets.Dataset.from_dict(PAIRS)
    return dataset.cast_column("label", features["label"]) if features else dataset


def test_pairs():
    tok = tokenizer()
    encoded = encode_pairs(pairs(), tok, ["first", "second"], 9)
    expected = [tok(a, b, truncation=True, max_length=9) for a, b in zip(PAIRS["first"], PAIRS["second"], strict=True)]
    for name in ("input_ids", "token_type_ids"):
        assert encoded.dataset[name][:] == [row[name] for row in expected]
    assert encoded.dataset["labels"][:] == [0, 1, 0]
    assert sorted(encoded.dataset.column_names) == ["input_ids", "labels", "token_type_ids"]
    assert (len(encoded.dataset), encoded.truncated, encoded.dropped) == (3, 1, 11 - 9)


def test_rows_that_just_fit_are_not_truncated():
    encoded = encode_pairs(pairs(), tokenizer(), ["first", "second"], 11)
    assert (encoded.truncated, max(map(len, encoded.dataset["input_ids"]))) == (0, 11)


def test_one_column_and_no_token_types():
    tok = tokenizer()
    tok.model_input_names = ["input_ids", "attention_mask"]
    encoded = encode_pairs(pairs(), tok, ["first"], 8)
    assert sorted(encoded.dataset.column_names) == ["input_ids", "labels"]
    assert encoded.dataset["input_ids"][0] == tok("alpha beta")["input_ids"]


def test_kinds_of_labels_stay():
    classes = datasets.ClassLabel(names=["no", "yes"])
    assert encode_pairs(pairs(label=classes), tokenizer(), ["first"], 8).dataset.features["labels"] == classes
    scores = encode_pairs(pairs(label=datasets.Value("float32")), tokenizer(), ["first"], 8).dataset
    assert scores["labels"][:] == [0.0, 1.0, 0.0]
    assert isinstance(scores[0]["labels"], float)


def test_encoding_is_detected_again_in_the_cache(tmp_path):
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
    assert again.truncated == first.truncated == 1
    assert encoded(20).truncated == 0


def test_nothing_is_written_where_nothing_can_be(monkeypatch, tmp_path):
    pairs().save_to_disk(tmp_path)
    data = datasets.load_from_disk(str(tmp_path))
    calls = []
    monkeypatch.setattr(os, "access", lambda path, mode: calls.append(Path(path)) or False)
    assert len(encode_pairs(data, tokenizer(), ["first"], 8).dataset) == 3
    assert calls == [tmp_path]
    assert not list(tmp_path.glob("cache*"))


def test_a_row_that_the_tokenizer_cannot_read_is_named():
    with pytest.raises(ValueError, match=r"The tokenizer cannot read 'omega' in row 2 "):
        encode_pairs(
            datasets.Dataset.from_dict({"text": ["alpha", "beta", "omega"], "label": [0, 1, 1]}),
            tokenizer(unknown=False),
            ["text"],
            8,
        )


@pytest.mark.parametrize(
    ("changes", "columns", "length", "message"),
    [
        ({}, ["first", "second"], 4, "data.max_length: 4 leaves no .* beside 3 special tokens. Give 5 or more"),
        ({}, ["first"], 2.5, "data.max_length: 2.5 leaves no room"),
        ({"first": ["a", None, "b"]}, ["first"], 8, "The tokenizer cannot read None in row 1"),
    ],
)
def test_what_cannot_be_encoded_is_an_error(changes, columns, length, message):
    with pytest.raises(ValueError, match=message):
        encode_pairs(datasets.Dataset.from_dict({**PAIRS, **changes}), tokenizer(), columns, length)


def test_a_row_without_tokens_is_an_error():
    tok = tokenizer()
    tok.backend_tokenizer.post_processor = tokenizer().backend_tokenizer.post_processor.__class__(
        single="$A", special_tokens=[]
    )
    with pytest.raises(ValueError, match="Row 1: the tokenizer makes no tokens of it"):
        encode_pairs(datasets.Dataset.from_dict({"text": ["alpha", " "], "label": [0, 1]}), tok, ["text"], 8)


def texts(count=25):
    vocabulary = ["alpha", "beta", "gamma", "one", "two", "red"]
    return [" ".join(vocabulary[(row + offset) % 6] for offset in range(row % 7)) for row in range(count)]


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("length", [2, 5, 16])
def test_blocks_hold_the_running_text(eos, length):
    tok = tokenizer()
    tok.eos_token = tok.eos_token if eos else None
    documents = texts()
    stream = []
    for document in documents:
        ids = tok(document, add_special_tokens=False)["input_ids"]
        stream += [*ids, *([tok.eos_token_id] if eos and ids else [])]
    encoded = encode_blocks(datasets.Dataset.from_dict({"text": documents}), tok, "text", length)
    blocks = encoded.dataset["input_ids"][:]
    assert {len(block) for block in blocks} == {length}
    assert {block[0] for block in blocks} == {tok.cls_token_id}  # the tokenizer puts it before every text
    tokens = [token for block in blocks for token in block[1:]]
    assert tokens == stream[: len(tokens)]
    assert encoded.dropped == len(stream) - len(tokens) < length
    assert len(encoded.dataset) == len(blocks)
    assert blocks == packed_rows(tok, [text for text in documents if text], length)[: len(blocks)]


def test_blocks_of_chosen_rows():
    """`select` leaves all rows in the table and keeps a list of those that count."""
    chosen = datasets.Dataset.from_dict({"text": ["alpha beta", "one", "two red"]}).select([2, 0])
    tok = tokenizer()
    encoded = encode_blocks(chosen, tok, "text", 7).dataset[0]["input_ids"]
    assert tok.convert_ids_to_tokens(encoded) == ["[CLS]", "two", "red", "[EOS]", "alpha", "beta", "[EOS]"]


def test_blocks_that_cannot_be_made_are_errors():
    short, empty = (datasets.Dataset.from_dict({"text": [text]}) for text in ("alpha", " "))
    with pytest.raises(ValueError, match="0 tokens leave nothing to predict"):
        encode_blocks(empty, tokenizer(), "text", 8)
    with pytest.raises(ValueError, match=r"data.max_length: 1 leaves no .* beside 1 special token\. Give 2 or more"):
        encode_blocks(short, tokenizer(), "text", 1)


def test_passages_without_room_for_text_are_errors():
    rows = datasets.Dataset.from_dict({"text": ["alpha"]})
    with pytest.raises(ValueError, match=r"data.max_length: 2 leaves no .* beside 2 special tokens\. Give 3 or more"):
        encode_passages(rows, tokenizer(), "text", 2)


def test_too_little_text_for_a_block_is_a_shorter_one():
    tok = tokenizer()
    encoded = encode_blocks(datasets.Dataset.from_dict({"text": ["alpha beta"]}), tok, "text", 8)
    (row,) = encoded.dataset["input_ids"][:]
    assert tok.convert_ids_to_tokens(row) == ["[CLS]", "alpha", "beta", "[EOS]"]
    assert (row, encoded.dropped) == (packed_rows(tok, ["alpha beta"], 8)[0], 0)


def test_targets_are_the_tokens_of_the_other_column():
    tok = tokenizer()
    rows = datasets.Dataset.from_dict({"a": ["alpha beta gamma", "one"], "b": ["beta", "gamma alpha"]})
    encoded = encode_targets(rows, tok, ("a", "b"), 4)
    assert encoded.dataset["input_ids"][1] == tok("one")["input_ids"]
    assert [tok.decode(ids, skip_special_tokens=True) for ids in encoded.dataset["labels"]] == ["beta", "gamma alpha"]
    whole = len(tok("alpha beta gamma")["input_ids"])
    assert (len(encoded.dataset["input_ids"][0]), encoded.truncated, encoded.dropped) == (4, 1, whole - 4)


def test_passages_are_pieces_of_documents():
    tok = tokenizer()
    rows = datasets.Dataset.from_dict({"text": ["alpha beta gamma " * 6, "one"], "n": [1, 2]})
    encoded = encode_passages(rows, tok, "text", 11)
    expected = [tok("alpha beta gamma " * 3)["input_ids"]] * 2 + [tok("one")["input_ids"]]
    assert encoded.dataset["input_ids"][:] == expected
    assert (len(encoded.dataset), encoded.truncated) == (3, 0)
    assert encoded.dataset.column_names == ["input_ids"]


def test_ends_that_passages_leave_out_are_not_counted():
    tok = tokenizer()
    rows = datasets.Dataset.from_dict({"text": ["alpha beta gamma " * 3 + "one"]})
    encoded = encode_passages(rows, tok, "text", 11)
    assert encoded.dataset["input_ids"][:] == [tok("alpha beta gamma " * 3)["input_ids"]]
    assert encoded.dropped is None


def test_empty_rows_change_nothing():
    tok = tokenizer()
    documents = ["alpha beta gamma one two", "red one"]
    for encode, length in ((encode_passages, 5), (encode_blocks, 4)):
        rows, gaps = (
            encode(datasets.Dataset.from_dict({"text": texts}), tok, "text", length).dataset.to_dict()
            for texts in (documents, [" ", documents[0], "", documents[1]])
        )
        assert gaps == rows

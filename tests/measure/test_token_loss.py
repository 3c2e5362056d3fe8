"""The loss of predicted tokens against a direct computation token by token."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import BertForMaskedLM, GPT2LMHeadModel, T5ForConditionalGeneration

from hf_linear_attn.measure.metric import BATCH_TOKENS, in_batches
from hf_linear_attn.measure.token_loss import IGNORED, TokenLoss, strided_windows
from tests.tiny_models import VOCABULARY, tiny_model

DOCUMENTS = [list(range(1, 40)), [5, 9, 3], [7], list(range(60, 20, -1))]


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return tiny_model("gpt2", GPT2LMHeadModel)


def direct(model: GPT2LMHeadModel, documents: list[list[int]], context: int, stride: int) -> tuple[float, int]:
    """Sum of the losses by the definition: token i is predicted in the first window that reaches it."""
    total, count = 0.0, 0
    for document in documents:
        for position in range(1, len(document)):
            start = 0
            while start + context <= position:
                start += stride
            with torch.no_grad():
                logits = model(torch.tensor([document[start:position]])).logits[0, -1].double()
            total -= float(logits.log_softmax(dim=-1)[document[position]])
            count += 1
    return total, count


@pytest.mark.parametrize(("context", "stride"), [(16, 8), (16, 15), (7, 1), (96, 48)])
def test_equals_the_definition(model: GPT2LMHeadModel, context: int, stride: int) -> None:
    total, count = direct(model, DOCUMENTS, context, stride)
    values = TokenLoss(strided_windows(DOCUMENTS, context, stride))(model)
    assert values["tokens"] == count == sum(len(document) - 1 for document in DOCUMENTS)
    assert values["loss"] == pytest.approx(total / count, rel=1e-5)
    assert values["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_a_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    model = tiny_model("gpt2", GPT2LMHeadModel)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert TokenLoss(strided_windows(DOCUMENTS, 16, 8))(model)["perplexity"] == pytest.approx(VOCABULARY, rel=1e-5)


def test_losses_by_position_add_up(model: GPT2LMHeadModel) -> None:
    values = TokenLoss(strided_windows([list(range(1, 34))], 33, 16), positions=8)(model)
    losses = [value for name, value in values.items() if name.startswith("loss_at_")]
    assert len(losses) == 8
    assert sum(losses) / 8 == pytest.approx(values["loss"])  # 32 tokens are predicted, four in each part


def test_windows_count_each_token_once() -> None:
    for context, stride in ((4, 2), (5, 4), (3, 1)):
        predicted = []
        for batch in strided_windows([list(range(23))], context, stride):
            assert batch["input_ids"].shape[1] <= context
            predicted += batch["labels"][batch["labels"] != IGNORED].tolist()
        assert sorted(predicted) == list(range(1, 23))


def test_the_mode_of_the_model_is_restored(model: GPT2LMHeadModel) -> None:
    model.train()
    TokenLoss(strided_windows(DOCUMENTS, 16, 8))(model)
    assert model.training
    model.eval()


@pytest.mark.parametrize(("context", "stride"), [(1, 1), (8, 0), (8, 8)])
def test_impossible_windows_are_refused(context: int, stride: int) -> None:
    with pytest.raises(ValueError, match="context"):
        strided_windows(DOCUMENTS, context, stride)


def test_rows_without_a_target_are_an_error(model: GPT2LMHeadModel) -> None:
    ids = torch.tensor([[3, 4]])
    with pytest.raises(ValueError, match="no token to predict"):
        TokenLoss([{"input_ids": ids, "labels": torch.full_like(ids, IGNORED)}])(model)


def test_the_standard_error_is_the_spread_of_rows_of_equal_size(model: GPT2LMHeadModel) -> None:
    rows = torch.randint(1, VOCABULARY, (12, 17), generator=torch.Generator().manual_seed(0)).tolist()
    values = TokenLoss(strided_windows(rows, 17, 16))(model)
    means = torch.tensor([TokenLoss(strided_windows([row], 17, 16))(model)["loss"] for row in rows])
    assert values["loss_stderr"] == pytest.approx(float(means.std(correction=0)) / 12**0.5, rel=1e-4)
    assert "loss_stderr" not in TokenLoss(strided_windows(rows[:1], 17, 16))(model)
    assert values["longest_input"] == 17


def test_masked_tokens_are_predicted_where_they_stand() -> None:
    torch.manual_seed(0)
    model = tiny_model("bert", BertForMaskedLM)
    ids = torch.randint(4, VOCABULARY, (2, 7))
    labels = torch.full_like(ids, IGNORED)
    labels[0, 2], labels[1, 5] = 11, 12
    with torch.no_grad():
        logits = model(ids).logits.log_softmax(dim=-1)
    expected = -float(logits[0, 2, 11] + logits[1, 5, 12]) / 2
    values = TokenLoss([{"input_ids": ids, "labels": labels}], predicts_next=False)(model)
    assert (values["tokens"], values["loss"]) == (2, pytest.approx(expected, rel=1e-5))


def test_an_encoder_decoder_reads_its_labels_shifted() -> None:
    torch.manual_seed(0)
    model = tiny_model("t5", T5ForConditionalGeneration, decoder_start_token_id=0)
    ids, labels = torch.randint(4, VOCABULARY, (2, 7)), torch.randint(4, VOCABULARY, (2, 5))
    labels[1, 3:] = IGNORED
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=labels).loss)
    values = TokenLoss([{"input_ids": ids, "labels": labels}], predicts_next=False)(model)
    assert (values["tokens"], values["loss"]) == (8, pytest.approx(expected, rel=1e-5))


def test_batches_keep_the_order_and_hold_no_more_tokens_than_they_may() -> None:
    rows = [{"input_ids": [index] * length} for index, length in enumerate((1000, 1000, 2000, 4096, 8000, 1))]

    def collate(part: list[dict[str, list[int]]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [row["input_ids"] for row in part]}

    batches = [[row[0] for row in batch["input_ids"]] for batch in in_batches(rows, collate)]
    assert batches == [[0, 1], [2], [3], [4], [5]]
    assert BATCH_TOKENS == 4096

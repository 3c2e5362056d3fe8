"""Recall: prompts by their parts, and models of which the answer is known."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration, GenerationConfig

import hf_linear_attn as hla
from hf_linear_attn.measure.recall import TASKS, PromptMaker, measure_recall

from ..tiny_models import VOCABULARY, tiny_model
from ..tiny_text import tiny_tokenizer


class Copier(nn.Module):
    """Generates what followed the longest earlier occurrence of its last tokens, of which it sees `reach`."""

    device = "cpu"
    config = SimpleNamespace(vocab_size=VOCABULARY)

    def __init__(self, reach: int = 10**6) -> None:
        super().__init__()
        self.reach, self.generation_config = reach, GenerationConfig()

    def can_generate(self) -> bool:
        return True

    def generate(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        rows = input_ids.tolist()
        for row in rows:
            for _ in range(self.generation_config.max_new_tokens or 0):
                row.append(self.next_token(row[-self.reach :]))
        return torch.tensor(rows)

    @staticmethod
    def next_token(row: list[int]) -> int:
        def matching(end: int) -> int:
            same = 0
            while same < end and row[end - 1 - same] == row[-1 - same]:
                same += 1
            return same

        return row[max(range(1, len(row)), key=matching)]


class WordCounts(nn.Module):
    """A sentence encoder that counts the tokens among the first `reach`."""

    device = "cpu"

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        ids, mask = (batch[name][:, : self.reach] for name in ("input_ids", "attention_mask"))
        return {"sentence_embedding": (nn.functional.one_hot(ids, VOCABULARY) * mask[..., None]).sum(1).float()}


@pytest.fixture(scope="module")
def maker() -> PromptMaker:
    return PromptMaker(tiny_tokenizer(), VOCABULARY)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("depth", "length"), [(0.0, 60), (0.5, 61), (1.0, 200)])
def test_prompts_have_their_length_and_the_answer_at_its_depth(
    maker: PromptMaker, task: str, depth: float, length: int
) -> None:
    prompt = TASKS[task](maker, random.Random(3), length, depth)
    assert len(prompt.ids) == length
    assert prompt.ids[prompt.position : prompt.position + len(prompt.answer)] == prompt.answer
    assert prompt == TASKS[task](maker, random.Random(3), length, depth)
    # What comes before the answer is the question at the end.
    context = {"key_value": 1}.get(task, 8)
    assert prompt.ids[prompt.position - context : prompt.position] == prompt.ids[-context:]
    special = set(tiny_tokenizer().all_special_ids)
    assert not special & set(prompt.ids)
    room = length - 60  # other needles and the question lie behind the answer, too
    assert prompt.position == pytest.approx(depth * room, abs=60)


def test_a_model_that_copies_recalls_everything_and_a_short_sighted_one_nothing() -> None:
    options: dict[str, Any] = {"lengths": (96, 160), "depths": (0.0, 0.5), "trials": 3}
    perfect = measure_recall(Copier(), tiny_tokenizer(), **options)
    longer = perfect.table[perfect.table["task"] != "key_value"]
    assert longer["correct"].all()
    assert len(perfect.table) == 4 * 2 * 2 * 3
    blind = measure_recall(Copier(reach=30), tiny_tokenizer(), **options).table
    assert not blind[blind["task"] != "key_value"]["correct"].any()
    assert list(perfect.summary().columns) == [96, 160]
    assert perfect.summary().loc["pass_key"].tolist() == [1.0, 1.0]
    # The sight of a model decides by the distance.
    middle = measure_recall(Copier(reach=110), tiny_tokenizer(), **{**options, "tasks": ("pass_key", "induction")})
    assert (middle.table["correct"] == (middle.table["distance"] <= 100)).all()


def test_key_value_recall_asks_for_the_only_occurrence_of_a_key() -> None:
    table = measure_recall(Copier(), tiny_tokenizer(), tasks=["key_value"], lengths=[64], trials=8).table
    assert table["correct"].all()
    assert set(table["distance"]) == {64 - 1 - start for start in (round(depth * 61) for depth in (0.1, 0.5, 0.9))}


def test_a_sentence_is_found_in_the_document_that_holds_it() -> None:
    options: dict[str, Any] = {"lengths": (64,), "trials": 16}
    everything = measure_recall(WordCounts(64), tiny_tokenizer(), depths=(0.0, 1.0), **options)
    assert everything.table["correct"].mean() > 0.8  # counts of few words collide
    table = measure_recall(WordCounts(20), tiny_tokenizer(), depths=(0.0, 1.0), **options).table
    share = table.groupby("depth")["correct"].mean()
    assert share[0.0] > 0.8
    assert share[1.0] < 0.4
    assert set(table["task"]) == {"retrieval"}


def test_models_of_transformers() -> None:
    torch.manual_seed(0)
    decoder = hla.patch_model(tiny_model("gpt2"), "elu")
    options: dict[str, Any] = {"lengths": (60,), "depths": (0.2, 0.8), "trials": 2}
    result = measure_recall(decoder, tiny_tokenizer(), **options)
    again = measure_recall(decoder, tiny_tokenizer(), **options, batch_size=1)
    pd.testing.assert_frame_equal(result.table, again.table)
    # Neither dropout nor what its generation config says matters, and both are as before afterwards.
    decoder.train()
    decoder.generation_config.update(repetition_penalty=9.0, num_beams=2, num_return_sequences=2)
    again = measure_recall(decoder, tiny_tokenizer(), **options)
    pd.testing.assert_frame_equal(result.table, again.table)
    assert decoder.training
    assert decoder.generation_config.num_beams == 2
    retrieval = measure_recall(tiny_model("bert"), tiny_tokenizer(), **options)
    assert len(retrieval.table) == 4


def test_text_that_a_tokenizer_can_encode_is_used() -> None:
    class Characters:
        unk_token_id, bos_token_id, eos_token_id, pad_token_id = None, None, None, 0
        all_special_ids: tuple[int, ...] = ()
        added_tokens_decoder: tuple[int, ...] = ()

        def __len__(self) -> int:
            return 128

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(character) for character in text]}

    maker = PromptMaker(Characters())
    prompt = TASKS["needles"](maker, random.Random(0), 400, 0.5)
    text, answer = ("".join(map(chr, ids)) for ids in (prompt.ids, prompt.answer))
    assert text.count(" The pass key of ") == 5
    question = text[text.rindex(" The pass key of ") :]
    assert f"{question}{answer}." in text
    assert text.startswith(" ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["passkey"]}, "'passkey' is none of pass_key, needles"),
        ({"tasks": ["retrieval"]}, "which this model can answer"),
        ({"lengths": (12,)}, "no room for the question"),
        ({"lengths": (96,)}, "beyond the model's 96 positions"),
        ({"depths": (2.0,)}, "depths in 0 to 1"),
        ({"trials": 0}, "must be positive"),
        ({"depths": ()}, "must not be empty"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_recall(tiny_model("gpt2"), tiny_tokenizer(), **{"lengths": (60,), **options})


def test_an_encoder_decoder_is_refused() -> None:
    sizes = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    model = BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, d_model=16, **sizes))
    with pytest.raises(NotImplementedError, match="is an encoder-decoder"):
        measure_recall(model, tiny_tokenizer(), lengths=(60,))

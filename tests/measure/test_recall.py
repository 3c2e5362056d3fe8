"""Recall: prompts by their parts, and models of which the answer is known."""

from __future__ import annotations

import math
import random
import re
import string
import zlib
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    PreTrainedTokenizerFast,
)

import hf_linear_attn as hla
from hf_linear_attn.data.recall_prompts import PROMPT_FUNCTIONS, Prompt, PromptMaker
from hf_linear_attn.measure.recall import Recall, generate_answers, measure_recall, wilson_interval

from ..architectures.models import architecture_model
from ..inputs import token_ids
from ..tiny_models import VOCABULARY, tiny_model
from ..tiny_text import tiny_tokenizer


class Characters:
    """A tokenizer with a token for each character."""

    unk_token_id, bos_token_id, eos_token_id, pad_token_id = None, None, None, 0
    all_special_ids: tuple[int, ...] = ()
    added_tokens_decoder: tuple[int, ...] = ()

    def __len__(self) -> int:
        return 128

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text if ord(character) < 128]}

    def decode(self, ids: Any, **options: Any) -> str:
        return "".join(map(chr, ids))


class Oracle(nn.Module):
    """Answers by regular expressions over the last `reach` characters of the text."""

    device = "cpu"
    config = GPT2Config(vocab_size=128)

    def __init__(self, reach: int = 10**6) -> None:
        super().__init__()
        self.reach, self.generation_config, self.passes = reach, GenerationConfig(), 0

    @property
    def base_model(self) -> Oracle:
        return self

    def can_generate(self) -> bool:
        return True

    def forward(self, ids: Tensor, use_cache: bool) -> Any:
        self.passes += len(ids)
        return {"cache": DynamicCache()}

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **cache: Any) -> Tensor:
        count = self.generation_config.max_new_tokens
        answers = ["".join(map(chr, row))[-self.reach :] for row in input_ids.tolist()]
        rows = [[ord(one) for one in self.answer(text).ljust(count)[:count]] for text in answers]
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    @staticmethod
    def answer(text: str) -> str:
        if "?" not in text and "Question" not in text:  # pairs of characters
            return (text + "?")[text.find(text[-1]) + 1]
        if requested := re.search(r"assigned the value (\d+) in the text above", text):
            known, body = {requested[1]}, text[: requested.start()]
            for name, value in re.findall(r"VAR (\w{5}) = (?:VAR )?(\w+)", body):
                known |= {name} if value in known else set()
            return " ".join(known)
        names = re.findall(r"[\w-]+", re.findall(r"(?:number|uuid)s? for ([^?]*) mentioned", text)[-1])
        return ", ".join(value for name in names for value in re.findall(rf" for {name} is: ([\w-]+)", text))


class WordTokenizer(Characters):
    """A tokenizer with a token for each word, by its hash."""

    def __len__(self) -> int:
        return 5000

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [zlib.crc32(word.encode()) % 5000 for word in re.findall(r"\w+", text)]}


class WordCounts(nn.Module):
    """A sentence encoder that counts the tokens among the first `reach`."""

    device = "cpu"

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        ids, mask = (batch[name][:, : self.reach] for name in ("input_ids", "attention_mask"))
        return {"sentence_embedding": (nn.functional.one_hot(ids, 5000) * mask[..., None]).sum(1).float()}


@pytest.fixture(scope="module", params=["characters", "words that are not its own"])
def maker(request: pytest.FixtureRequest) -> PromptMaker:
    return PromptMaker(Characters() if request.param == "characters" else tiny_tokenizer())


@pytest.mark.parametrize("task", PROMPT_FUNCTIONS)
@pytest.mark.parametrize("length", [900, 1501])
def test_prompts_have_their_length_and_the_answers_where_they_say(maker: PromptMaker, task: str, length: int) -> None:
    depths = (0.0, 0.5, 1.0)
    prompts = PROMPT_FUNCTIONS[task](maker, random.Random(3), length, depths)
    assert prompts == PROMPT_FUNCTIONS[task](maker, random.Random(3), length, depths)
    assert len(prompts) == 3
    for prompt in prompts:
        assert len(prompt.ids) == length
        for position, answer in zip(prompt.positions, prompt.references, strict=True):
            assert prompt.ids[position : position + len(answer)] == answer
            assert position + len(answer) <= prompt.shared
        assert maker.score(prompt, [token for answer in prompt.references for token in answer]) == 1
        assert prompt.new_tokens >= sum(map(len, prompt.references))
    several = task in ("niah_multivalue", "niah_multiquery", "vt")
    assert [prompt.depth for prompt in prompts if not math.isnan(prompt.depth)] == ([] if several else list(depths))
    about_one_text = len({tuple(prompt.ids[: prompt.shared]) for prompt in prompts}) == 1
    assert about_one_text == (task == "mqar" or "multikey" in task)
    if not several:  # the text lies behind the header and before the question
        ends = [prompt.positions[0] for prompt in prompts]
        assert ends == sorted(ends)
        sentence = 450 if maker.reads_text else 90  # at most, with the needle behind it
        assert ends[0] < 60 + sentence
        assert ends[2] > length - 100 - sentence


def test_a_number_that_is_recalled_in_part_scores_in_part() -> None:
    maker = PromptMaker(Characters())
    prompt = PROMPT_FUNCTIONS["niah_multivalue"](maker, random.Random(0), 900, [0.5])[0]
    texts = ["".join(map(chr, answer)).strip() for answer in prompt.references]
    output = f": {texts[2]}, {texts[0]} and 1{texts[1][1:]}"
    assert maker.score(prompt, [ord(one) for one in output]) == 0.5
    pair = PROMPT_FUNCTIONS["mqar"](maker, random.Random(0), 900, [0.5])[0]
    (answer,) = pair.references
    assert maker.score(pair, answer) == 1
    assert maker.score(pair, [answer[0] + 1]) == maker.score(pair, []) == 0


def test_an_oracle_recalls_everything_and_a_short_sighted_one_nothing() -> None:
    options: dict[str, Any] = {"lengths": (900, 1500), "depths": (0.0, 0.3), "trials": 2}
    oracle = Oracle()
    perfect = measure_recall(oracle, Characters(), **options)
    assert perfect.table["correct"].all()
    assert len(perfect.table) == len(PROMPT_FUNCTIONS) * 2 * 2 * 2
    assert oracle.passes == 4 * 2 * 2  # one for each text about which there are several questions
    # From 450 characters on before the end all is question, or answered too late to be seen.
    blind = measure_recall(Oracle(reach=450), Characters(), **options)
    far = blind.table[(blind.table["distance"] > 450) & blind.table["depth"].notna()]
    assert len(far) > 40
    assert not far["correct"].any()
    comparison = perfect.against(blind)
    assert (comparison["wins"] == comparison["wins"] + comparison["losses"]).all()
    assert comparison.loc[("niah_single_1", 900), "wins"] == 4
    with pytest.raises(ValueError, match="the same prompts"):
        perfect.against(measure_recall(oracle, Characters(), tasks=["mqar"], lengths=(900,)))
    one, other = (measure_recall(oracle, Characters(), tasks=["mqar"], lengths=(900,), seed=seed) for seed in (0, 1))
    with pytest.raises(ValueError, match="the same prompts"):
        one.against(other)


def test_a_summary_has_the_interval_of_each_mean() -> None:
    scores = [1.0, 1.0, 0.5, 0.0]
    table = pd.DataFrame({"task": "vt", "length": 64, "score": scores})
    row = Recall(table).summary().loc[("vt", 64)]
    assert (row["prompts"], row["score"]) == (4, 0.625)
    for bound in (row["low"], row["high"]):  # the roots of (p - share)² = z² p (1 - p) / n
        assert (bound - 0.625) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / 4)
    for count in range(1, 200):  # a share of 0 or 1 is in its interval, whatever rounding does
        assert wilson_interval(0.0, count)[0] == 0.0
        assert wilson_interval(1.0, count)[1] == 1.0
    assert "0.62 [0.22, 0.91]" in repr(Recall(table))


@pytest.mark.parametrize("attention", [None, "elu", "window"])
def test_questions_about_one_text_share_a_pass_over_it(attention: str | None) -> None:
    torch.manual_seed(0)
    model = tiny_model("llama", max_position_embeddings=512).eval()
    if attention is not None:
        hla.patch_model(model, attention)
    maker = PromptMaker(tiny_tokenizer(), VOCABULARY)
    prompts = PROMPT_FUNCTIONS["niah_multikey_1"](maker, random.Random(0), 200, (0.1, 0.5, 0.9))
    prompts += PROMPT_FUNCTIONS["niah_multikey_1"](maker, random.Random(1), 200, (0.1, 0.5, 0.9))
    prompts = [replace(prompt, new_tokens=number) for number, prompt in enumerate(prompts, start=3)]
    together = list(generate_answers(model, prompts, 2, 0))  # no answer has the tokens that a longer one may have
    assert together == [next(generate_answers(model, [prompt], 1, 0)) for prompt in prompts]


@pytest.mark.parametrize("attention", [None, "elu"])
def test_a_question_follows_the_state_of_its_text(attention: str | None) -> None:
    """Jamba's Mamba begins anew where several tokens follow a cache: it reads each prompt as a whole."""
    model: Any = architecture_model("jamba").eval()
    if attention is not None:
        hla.patch_model(model, attention)
    for name, parameter in model.named_parameters():
        if "mamba" in name:
            parameter.data *= 4
    text = token_ids(1, 40, seed=0)[0].tolist()
    prompts = [Prompt([*text, first, 7, 9], [[1]], [1], len(text), 0.5, 8) for first in (5, 11)]
    together = list(generate_answers(model, prompts, 1, 0))
    assert together == [next(generate_answers(model, [prompt], 1, 0)) for prompt in prompts]


def test_the_document_of_a_sentence_is_retrieved() -> None:
    options: dict[str, Any] = {"lengths": (64,), "trials": 16}
    everything = measure_recall(WordCounts(64), WordTokenizer(), depths=(0.0, 1.0), **options)
    assert everything.table["correct"].mean() > 0.8
    table = measure_recall(WordCounts(20), WordTokenizer(), depths=(0.0, 1.0), **options).table
    share = table.groupby("depth")["correct"].mean()
    assert share[0.0] > 0.8
    assert share[1.0] < 0.4
    assert set(table["task"]) == {"retrieval"}


@pytest.mark.slow
def test_models_of_transformers() -> None:
    torch.manual_seed(0)
    decoder = hla.patch_model(tiny_model("gpt2"), "elu")
    options: dict[str, Any] = {"lengths": (80,), "depths": (0.2, 0.8), "trials": 2, "tasks": ["niah_single_1", "mqar"]}
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
    retrieval = measure_recall(tiny_model("bert"), tiny_tokenizer(), **{**options, "tasks": None})
    assert len(retrieval.table) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["passkey"]}, "'passkey' is none of niah_single_1, niah_single_2"),
        ({"tasks": ["retrieval"]}, "which this model can answer"),
        ({"lengths": (12,)}, "takes 7. tokens or more, got 12"),
        ({"tasks": ["mqar"], "lengths": (4,)}, "^Recall by mqar cannot be measured. A prompt takes"),
        ({"lengths": (96,)}, "beyond the model's 96 positions"),
        ({"depths": (2.0,)}, "depths must be a finite number of at least 0 and of at most 1, got 2.0"),
        ({"trials": 0}, "trials must be a whole number of at least 1, got 0"),
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


def test_an_answer_of_unknown_letters_is_not_in_every_output() -> None:
    known = ["<unk>", "<pad>", *string.ascii_lowercase, *"0123456789 .,:-?()\nTHIMWSAO"]
    characters = Tokenizer(WordLevel({token: number for number, token in enumerate(known)}, unk_token="<unk>"))
    characters.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, unk_token="<unk>", pad_token="<pad>")
    maker = PromptMaker(tokenizer)
    for task in PROMPT_FUNCTIONS.values():
        for prompt in task(maker, random.Random(0), 2000, [0.5]):
            assert maker.score(prompt, [tokenizer.pad_token_id] * prompt.new_tokens) == 0
            assert maker.score(prompt, [token for answer in prompt.references for token in answer]) == 1

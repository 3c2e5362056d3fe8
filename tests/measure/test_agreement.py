"""Agreement by generation, against continuations that are made token by token without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_linear_attn as hla

from ..tiny_models import VOCABULARY, tiny_model


def continuation(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + count:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
def test_continuations_are_compared_token_by_token() -> None:
    torch.manual_seed(0)
    exact = tiny_model("llama", eos_token_id=None, initializer_range=0.3).eval()
    model = tiny_model("llama", eos_token_id=None, initializer_range=0.3).eval()
    model.load_state_dict(exact.state_dict())
    hla.patch_model(model, "window", window_size=6)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, VOCABULARY, (size,), generator=generator).tolist() for size in (9, 20, 33, 40)]
    agreement = hla.measure_agreement(model, exact, prompts, new_tokens=8)
    for prompt, row in zip(prompts, agreement.table.itertuples(), strict=True):
        generated, expected = (continuation(one, prompt, 8) for one in (model, exact))
        equal = [one == other for one, other in zip(generated, expected, strict=True)]
        assert row.common == (equal.index(False) if False in equal else 8)
        assert row.equal == pytest.approx(sum(equal) / 8)
        assert row.same == all(equal)
    assert 0 < agreement.summary()["equal"] < 1
    assert "4 continuations" in repr(agreement)
    same = hla.measure_agreement(exact, exact, prompts, new_tokens=3).summary()
    assert (same["common"], same["same"], same["high"]) == (3, 1, pytest.approx(1))


def test_one_that_ends_earlier_differs_from_there_on() -> None:
    class Fixed(torch.nn.Module):
        device = "cpu"

        def __init__(self, *tokens: int) -> None:
            super().__init__()
            self.tokens, self.generation_config = tokens, tiny_model("llama").generation_config

        def generate(self, input_ids: Any, **options: Any) -> Any:
            return torch.cat([input_ids, torch.tensor([self.tokens])], dim=1)

    row = hla.measure_agreement(Fixed(5, 6), Fixed(5, 6, 7, 8), [[1, 2]]).table.iloc[0]
    assert (row["common"], row["equal"], row["same"]) == (2, 0.5, False)


def test_refusals() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="one prompt or more"):
        hla.measure_agreement(model, model, [])
    with pytest.raises(ValueError, match="new_tokens must be a whole number of at least 1, got 0"):
        hla.measure_agreement(model, model, [[1]], new_tokens=0)

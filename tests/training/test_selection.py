"""`close_harmful_parts`: the losses that it reports, and what remains open."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import hf_linear_attn as hla
from hf_linear_attn.integration.context import attention_modules
from hf_linear_attn.mechanisms.window import CLOSED_MIX
from tests.tiny_models import BERT, LLAMA, VOCABULARY, Family


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, VOCABULARY, (2, 24), generator=generator)} for _ in range(2)]


def patched(family: Family, **plan: Any) -> Any:
    torch.manual_seed(0)
    model = family.build() if family is LLAMA else family.build().base_model
    for parameter in model.parameters():
        parameter.data *= 3
    return hla.patch_model(model, {"default": {"attention": "window", "window_size": 4, "mix_init": 2.0}, **plan})


def mixes(model: Any) -> list[Tensor]:
    """The log mixing weights of all layers."""
    modules = [module.linear_attention for module in attention_modules(model)]
    return [getattr(module, "mechanism", module).log_mix for module in modules]


def losses(model: Any, exact: Any, closed: tuple[int, ...]) -> Tensor:
    """The loss of each token or row with some layers closed, from its definition."""
    model = copy.deepcopy(model)
    for layer in closed:
        mixes(model)[layer].data.fill_(-1e5)
    values = []
    with torch.no_grad():
        for row in rows():
            ids = row["input_ids"]
            if exact is None:
                logits = model(**row).logits
                values.append(functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"))
            else:
                own, target = (one(**row).last_hidden_state.mean(dim=1) for one in (model, exact))
                values.append(1 - functional.cosine_similarity(own, target))
    return torch.stack(values).flatten().double()


def harm(model: Any, exact: Any, closed: tuple[int, ...], than: tuple[int, ...] = ()) -> tuple[float, float]:
    """By how much the loss with some layers closed is above that with others, and its standard error."""
    difference = losses(model, exact, closed) - losses(model, exact, than)
    return float(difference.mean()), float(difference.std() / len(difference) ** 0.5)


@pytest.mark.parametrize("family", [LLAMA, BERT], ids=["llama", "bert"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_parts_that_do_harm_beyond_the_noise_are_closed(family: Family, scale: float) -> None:
    model = patched(family)
    for mix in mixes(model):
        mix.data *= scale
    exact = None if family is LLAMA else hla.unpatch_model(copy.deepcopy(model))
    before = copy.deepcopy(model)
    result = hla.close_harmful_parts(model, rows())
    expected = [harm(before, exact, (layer,)) for layer in (0, 1)]
    assert result.table[["worth", "stderr"]].to_numpy() == pytest.approx(np.array(expected), abs=1e-5)
    open_parts = tuple(layer for layer in (0, 1) if expected[layer][0] < -expected[layer][1])
    for other in ((), (0, 1)):
        above, stderr = harm(before, exact, open_parts, other)
        open_parts = other if above > stderr else open_parts
    assert tuple(result.closed) == open_parts
    means = [float(losses(before, exact, closed).mean()) for closed in ((), (0, 1), open_parts)]
    assert list(result.loss.values()) == pytest.approx(means, abs=1e-5)
    assert float(losses(model, exact, ()).mean()) == pytest.approx(means[2], abs=1e-5)
    for layer, mix in enumerate(mixes(model)):
        expected_mix = torch.full_like(mix, CLOSED_MIX) if layer in result.closed else mixes(before)[layer]
        assert torch.equal(mix, expected_mix)
    assert "all closed" in repr(result)


def test_parts_with_which_the_loss_is_not_finite_are_closed() -> None:
    model = patched(LLAMA)
    mixes(model)[1].data.fill_(float("nan"))
    result = hla.close_harmful_parts(model, rows())
    assert np.isnan(result.loss["all open"])
    assert result.loss["kept"] == result.loss["all closed"]
    assert result.closed == [0, 1]


def test_one_row_is_too_few_to_close_a_part() -> None:
    model = patched(BERT)
    result = hla.close_harmful_parts(model, [{"input_ids": rows()[0]["input_ids"][:1]}])
    assert not result.closed
    assert result.table["stderr"].isna().all()


def test_closed_parts_stay_closed_through_calibration_and_files(tmp_path: Any) -> None:
    model = patched(LLAMA, **{"0": {"exact_heads": [0]}})
    mixes(model)[1].data.fill_(CLOSED_MIX)
    assert hla.close_harmful_parts(model, rows()).table["layer"].tolist() == [0]
    hla.calibrate(model, rows())
    model.save_pretrained(tmp_path)
    again = hla.load_pretrained(tmp_path)
    assert torch.equal(mixes(again)[1], torch.full_like(mixes(again)[1], CLOSED_MIX))
    assert torch.equal(mixes(again)[0], mixes(model)[0])
    without = hla.patch_model(LLAMA.build(), "hedgehog")
    assert not len(hla.close_harmful_parts(without, rows()).table)


def test_bad_batches_are_errors() -> None:
    model = patched(LLAMA)
    with pytest.raises(TypeError, match="one batch alone"):
        hla.close_harmful_parts(model, rows()[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no batches"):
        hla.close_harmful_parts(model, [])
    before = copy.deepcopy(mixes(model))
    with pytest.raises(ValueError, match="not finite"):  # one token predicts nothing
        hla.close_harmful_parts(model, [{"input_ids": torch.tensor([[5]])}])
    assert all(map(torch.equal, mixes(model), before))

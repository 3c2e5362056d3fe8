"""Which parameters decay, at which rate they learn, and how the rate moves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_linear_attn.training.optim import lr_factor, make_optimizer, parameter_groups
from hf_linear_attn.training.options import TrainSettings
from tests.helpers import BERT, FAMILIES, GPT2, patched

#: Parts of the names of biases and norms of the tiny families, those of GPT-2 (ln_1, ln_f) among them.
UNDECAYED = ("bias", "LayerNorm", "ln_", "norm")


def placed(model, settings):
    """Parameter name -> (learning rate, weight decay), each exactly once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for group in parameter_groups(model, settings):
        for parameter in group["params"]:
            name = names[id(parameter)]
            assert name not in found
            found[name] = (group["lr"], group["weight_decay"])
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_only_matrices_decay(family):
    model = family.build()
    found = placed(model, TrainSettings(lr=1e-3, weight_decay=0.1, learned_lr=0.5))
    assert set(found) == {name for name, _ in model.named_parameters()}
    undecayed = {name for name, (_, decay) in found.items() if decay == 0}
    assert undecayed == {name for name in found if any(part in name for part in UNDECAYED)}
    assert undecayed
    assert {decay for _, decay in found.values()} == {0.0, 0.1}
    assert {rate for rate, _ in found.values()} == {1e-3}


@pytest.mark.parametrize("family", [BERT, GPT2], ids=str)
@pytest.mark.parametrize("learned_lr", [None, 0.02])
def test_learned_parts_have_a_rate_and_no_decay(family, learned_lr):
    model = patched("hedgehog", family)
    found = placed(model, TrainSettings(lr=1e-3, weight_decay=0.1, learned_lr=learned_lr))
    learned = {name for name in found if "linear_attention" in name}
    assert any(parameter.dim() >= 2 for name, parameter in model.named_parameters() if name in learned)
    assert {found[name] for name in learned} == {(learned_lr or 1e-3, 0.0)}
    assert {rate for name, (rate, _) in found.items() if name not in learned} == {1e-3}


def test_frozen_parameters_are_left_out():
    model = GPT2.build().requires_grad_(False)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no parameter that requires a gradient"):
        make_optimizer(model, TrainSettings())
    model.transformer.ln_f.requires_grad_(True)
    assert set(placed(model, TrainSettings())) == {"transformer.ln_f.weight", "transformer.ln_f.bias"}


def test_tied_weights_are_in_one_group_once():
    model = GPT2.build()
    assert model.lm_head.weight is model.transformer.wte.weight
    optimizer = make_optimizer(model, TrainSettings(lr=2e-3, weight_decay=0.3))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len({id(parameter) for parameter in held}) == len([*model.parameters()])
    assert {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups} == {(2e-3, 0.3), (2e-3, 0.0)}


def test_a_name_that_only_resembles_a_learned_part():
    model = nn.ModuleDict({"my_linear_attention": nn.Linear(2, 2)})
    found = placed(model, TrainSettings(lr=1.0, learned_lr=2.0, weight_decay=0.1))
    assert found == {"my_linear_attention.weight": (1.0, 0.1), "my_linear_attention.bias": (1.0, 0.0)}


# --------------------------------------------------------------------------------------------------------------------
# The schedule


def factors(steps, **settings):
    return [lr_factor(step, steps, TrainSettings(**settings)) for step in range(steps)]


def test_shapes():
    assert factors(4, warmup=0.0, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert factors(4, warmup=0.0, schedule="constant") == [1.0] * 4
    cosine = [0.5 + 0.5 * math.cos(math.pi * step / 4) for step in range(4)]
    assert factors(4, warmup=0.0, schedule="cosine") == pytest.approx(cosine)
    # Three steps of warm-up of ten: 1/4, 2/4, 3/4, then the peak.
    assert factors(10, warmup=0.3, schedule="constant") == [0.25, 0.5, 0.75] + [1.0] * 7
    falling = [1 - step / 7 for step in range(7)]
    assert factors(10, warmup=0.3, schedule="linear") == pytest.approx([0.25, 0.5, 0.75, *falling])


@given(
    steps=st.integers(1, 300),
    warmup=st.floats(0, 1, exclude_max=True),
    schedule=st.sampled_from(["linear", "cosine", "constant"]),
)
def test_rises_then_falls_and_every_step_learns(steps, warmup, schedule):
    found = factors(steps, warmup=warmup, schedule=schedule)
    assert all(0 < factor <= 1 for factor in found)
    peak = found.index(max(found))
    assert peak == min(math.ceil(warmup * steps), steps - 1)
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)


@pytest.mark.parametrize(("schedule", "last"), [("linear", 0.0), ("cosine", 0.0), ("constant", 1.0)])
def test_never_negative_beyond_the_end(schedule, last):
    for step in (10, 11, 1000):
        assert lr_factor(step, 10, TrainSettings(schedule=schedule)) == pytest.approx(last, abs=1e-12)
        assert lr_factor(step, 10, TrainSettings(schedule=schedule)) >= 0

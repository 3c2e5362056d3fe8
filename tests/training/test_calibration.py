"""`calibrate`: the start of learned parts, against the attention weights of the exact model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import hf_linear_attn as hla
from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.feature_maps.vq import VQFeatureMap
from hf_linear_attn.integration.context import attention_modules
from hf_linear_attn.integration.exact import AttentionCall, observe_attention
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.mechanisms.window import CLOSED_MIX
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.training import calibration
from tests.inputs import token_ids
from tests.slow_cases import slow_rows
from tests.tiny_models import BERT, LLAMA, MAX_LENGTH, VOCABULARY, Family

WINDOW, SINKS, LENGTH = 5, 2, 40


def rows(count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)} for _ in range(count)]


def sharp(family: Family) -> Any:
    """A model whose attention is far from uniform."""
    model = family.build()
    for name, parameter in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name or "query.weight" in name or "key.weight" in name:
            parameter.data *= 2
    return model


def is_far(causal: bool) -> Tensor:
    """Which keys are outside of window and sinks, from the definition, pair by pair."""
    far = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for i in range(LENGTH):
        for j in range(LENGTH):
            ends = j < SINKS or (not causal and (j >= LENGTH - SINKS or i < SINKS or i >= LENGTH - SINKS))
            near = 0 <= i - j < WINDOW if causal else abs(i - j) < WINDOW
            far[i, j] = (j <= i or not causal) and not near and not ends
    return far


def exact_shares(model: Any, far: Tensor) -> list[Tensor]:
    """The mean share of attention on far keys of each head, of the queries that have such keys."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = [torch.stack(model(**row, output_attentions=True).attentions) for row in rows()]
    shares = (torch.stack(weights) * far).sum(-1)[..., far.any(1)]  # [rows, layers, B, H, n]
    return list(shares.mean(dim=(0, 2, 4)))


def implied_shares(model: Any, far: Tensor) -> list[Tensor]:
    shares: list[Tensor] = []

    def observer(call: AttentionCall) -> None:
        shares.append((call.linear_weights() * far).sum(-1)[..., far.any(1)].mean(dim=(0, 2)))

    with torch.no_grad(), observe_attention(model, observer):
        for row in rows():
            model(**row)
    layers = len(shares) // len(rows())
    return [torch.stack(shares[layer::layers]).mean(0) for layer in range(layers)]


@pytest.mark.parametrize(
    ("family", "causal", "feature_map"),
    [(LLAMA, True, "vq"), *slow_rows((BERT, False, "vq"), (BERT, False, "hedgehog"))],
    ids=["llama-vq", "bert-vq", "bert-hedgehog"],
)
def test_attention_outside_of_the_window_is_that_of_the_exact_model(
    family: Family, causal: bool, feature_map: str
) -> None:
    exact = sharp(family)
    options: dict[str, Any] = {"window_size": WINDOW, "sink_tokens": SINKS, "feature_map": feature_map}
    model = hla.patch_model(copy.deepcopy(exact), "window", **options)
    far = is_far(causal)
    expected = exact_shares(exact, far)
    before = implied_shares(model, far)
    result = hla.calibrate(model, rows(), max_length=LENGTH)
    after = implied_shares(model, far)
    # In rows this short every query is counted.
    assert torch.allclose(torch.stack(after), torch.stack(expected), atol=2e-4)
    assert not torch.allclose(torch.stack(before), torch.stack(expected), atol=5e-2)
    assert result.table["exact"].to_numpy() == pytest.approx(torch.cat(expected).numpy(), abs=2e-4)
    assert result.within(1.01) == 1.0
    assert "0." in repr(result)


@pytest.mark.parametrize("family", [LLAMA, BERT], ids=str)
def test_padding_changes_nothing(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of so many tokens, some runs of queries are counted; here all of them."""
    monkeypatch.setattr(calibration, "DRAWS", 64)
    exact, tables = sharp(family), []
    for size in (0, MAX_LENGTH - LENGTH):
        model = hla.patch_model(copy.deepcopy(exact), "window", window_size=WINDOW, sink_tokens=SINKS)
        masked = ({**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows())
        batches = [{name: pad(x, (0, size)) for name, x in batch.items()} for batch in masked]
        tables.append(hla.calibrate(model, batches, max_length=LENGTH).table)
    assert tables[1].to_numpy() == pytest.approx(tables[0].to_numpy(), abs=2e-4)


@pytest.mark.parametrize(("family", "causal"), [(LLAMA, True), (BERT, False)], ids=["llama", "bert"])
def test_codes_make_up_for_a_saturation_and_for_what_queries_add(family: Family, causal: bool) -> None:
    exact = sharp(family)
    options: dict[str, Any] = {"window_size": WINDOW, "sink_tokens": SINKS, "feature_map": "vq", "saturation": 3}
    model = hla.patch_model(copy.deepcopy(exact), "window", **options)
    for module in attention_modules(model):
        module.linear_attention.mix_weight.data.add_(0.2)
    hla.calibrate(model, rows(), max_length=LENGTH)
    far = is_far(causal)
    assert torch.allclose(torch.stack(implied_shares(model, far)), torch.stack(exact_shares(exact, far)), atol=2e-4)


def test_what_is_closed_stays_closed_in_another_precision() -> None:
    model = hla.patch_model(sharp(LLAMA).bfloat16(), "window", window_size=WINDOW, mix_init=CLOSED_MIX).float()
    hla.calibrate(model, rows())
    assert not len(hla.close_harmful_parts(model, rows()).table)
    for module in attention_modules(model):
        assert not module.linear_attention.log_mix.exp().any()


def test_exact_heads_have_no_part_in_it() -> None:
    exact = sharp(LLAMA)
    plan = {"default": {"attention": "window", "window_size": WINDOW, "sink_tokens": SINKS}, "0": {"exact_heads": [1]}}
    model = hla.patch_model(copy.deepcopy(exact), plan)
    shares = exact_shares(exact, is_far(True))
    table = hla.calibrate(model, rows(), max_length=LENGTH).table
    first = table[table["layer"] == 0]
    repeats = exact.config.num_attention_heads // exact.config.num_key_value_heads
    linear = [head for head in range(exact.config.num_attention_heads) if head // repeats != 1]
    assert list(first["exact"]) == pytest.approx(shares[0][linear].tolist(), abs=2e-4)
    assert list(first["calibrated"]) == pytest.approx(shares[0][linear].tolist(), abs=2e-4)


def build(heads: int, groups: int, width: int, codes: int, causal: bool) -> Any:
    entry = ATTENTIONS.get("vq")
    return entry.factory(AttentionShape(heads, groups, width, width, causal=causal), entry.options(num_features=codes))


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_keys_of_few_values_are_attended_to_exactly(causal: bool) -> None:
    """With a code for each value of the keys, the weights are those of softmax."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 4, 50, 6, generator=generator)
    values = 2 * torch.randn(2, 7, 6, generator=generator)
    key = values[:, torch.randint(0, 7, (50,), generator=generator)].unsqueeze(0)
    mechanism = build(4, 2, 6, 50, causal)
    mechanism.feature_map.fit(key[0], query[0].view(2, -1, 6))
    weights = mechanism.attention_weights(AttentionInputs(query, key, key, 0.7, causal))
    logits = 0.7 * query @ key.repeat_interleave(2, dim=1).transpose(-1, -2)
    if causal:
        logits = logits.masked_fill(torch.ones(50, 50).triu(1).bool(), float("-inf"))
    assert torch.allclose(weights, logits.softmax(-1), atol=1e-3)


@pytest.mark.parametrize("offset", [0.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_of_any_precision_tell_clusters_of_keys_apart(dtype: torch.dtype, offset: float) -> None:
    """Keys may have a large vector in common, as they have where their projection has a bias."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(8, 16, generator=generator)
    cluster = torch.arange(400) // 50
    common = offset * torch.randn(16, generator=generator)
    key = (centres[cluster] + 0.05 * torch.randn(400, 16, generator=generator) + common).unsqueeze(0)
    feature_map = build(1, 1, 16, 16, True).feature_map.to(dtype)
    feature_map.fit(key, torch.randn(1, 400, 16, generator=generator))
    codes = feature_map.key(key.unsqueeze(0), 0.25).values[0, 0].detach()
    # Keys of two clusters share no code.
    shared = codes @ codes.T
    same = cluster[:, None] == cluster
    assert not shared[~same].max() > 1e-3
    assert torch.allclose(codes.sum(1), torch.ones(400), atol=1e-3)


def test_a_key_of_importance_n_counts_as_n_keys() -> None:
    generator = torch.Generator().manual_seed(1)
    key, query = (torch.randn(1, count, 6, generator=generator) for count in (60, 80))
    counts = torch.randint(1, 5, (60,), generator=generator)
    weighted, repeated = (build(1, 1, 6, 2, False).feature_map for _ in range(2))
    weighted.fit(key, query, importance=counts.unsqueeze(0))
    repeated.fit(key.repeat_interleave(counts, dim=1), query)
    assert torch.allclose(weighted.query_weight, repeated.query_weight, atol=1e-4)
    codes = [fitted.key(key.unsqueeze(0), 0.4).values for fitted in (weighted, repeated)]
    assert torch.allclose(*codes, atol=1e-4)


def test_codes_of_encoders_lie_where_attention_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key counts by the mean weight that far queries give it in exact attention, here of all queries."""
    monkeypatch.setattr(calibration, "DRAWS", 64)
    exact = sharp(BERT)
    model = hla.patch_model(copy.deepcopy(exact), "window", window_size=WINDOW, sink_tokens=SINKS)
    seen: list[Tensor] = []
    fit = VQFeatureMap.fit

    def record(self: VQFeatureMap, keys: Tensor, queries: Tensor, damping: Any, importance: Tensor) -> None:
        seen.append(importance / importance.sum(dim=1, keepdim=True))
        fit(self, keys, queries, damping, importance)

    monkeypatch.setattr(VQFeatureMap, "fit", record)
    hla.calibrate(model, rows(), max_length=LENGTH)
    exact.set_attn_implementation("eager")
    far = is_far(False)
    with torch.no_grad():
        weights = [torch.stack(exact(**row, output_attentions=True).attentions) * far for row in rows()]
    received = torch.cat(weights, dim=1).sum(dim=3)[..., far.any(0)]  # [layers, B, H, keys]
    expected = received.transpose(1, 2).flatten(2)
    for layer, importance in enumerate(seen):
        assert torch.allclose(importance, expected[layer] / expected[layer].sum(dim=1, keepdim=True), rtol=1e-3)


def test_codes_get_the_attention_of_their_keys() -> None:
    """`vq` alone: on the rows of the calibration, exact and implied attention to each code agree."""
    model = hla.patch_model(sharp(LLAMA), "vq", num_features=4)
    hla.calibrate(model, rows(), max_length=LENGTH)
    totals: dict[int, Tensor] = {}

    def observer(call: AttentionCall) -> None:
        feature_map = call.mechanism.feature_map
        codes = feature_map.key(call.key, call.scaling).values
        codes = codes.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)
        weights = feature_map.query(call.query, call.scaling).values * (call.allowed.float() @ codes)
        weights = weights / weights.sum(-1, keepdim=True)
        both = torch.stack([shares.sum((0, 2)) for shares in (call.exact_weights() @ codes, weights)])
        totals[id(call.module)] = totals.get(id(call.module), 0) + both

    with torch.no_grad(), observe_attention(model, observer):
        for row in rows():
            model(**row)
    assert len(totals) == len(list(attention_modules(model)))
    for exact, implied in totals.values():
        assert torch.allclose(implied, exact, rtol=2e-2)


@pytest.mark.slow
def test_short_rows_stand_at_positions_up_to_the_longest_input() -> None:
    model = hla.patch_model(sharp(LLAMA), "window", window_size=WINDOW)
    seen: list[Tensor] = []
    model.model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True)
    length = 5 * LENGTH
    hla.calibrate(model, rows(1), max_length=length)
    seen = [positions for positions in seen if len(positions) == 2]  # not the row whose rotation is measured
    passes = 2
    assert sum(positions.numel() for positions in seen) >= passes * length
    assert min(int(positions.min()) for positions in seen) == 0
    assert max(int(positions.max()) for positions in seen) == length - 1
    assert all((positions.diff(dim=1) == 1).all() for positions in seen)


def test_codes_do_not_tell_keys_apart_by_a_coordinate_that_is_damped_away() -> None:
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(4, 8, generator=generator)
    key = centres[torch.arange(200) % 4]
    key[:, 3] = 10 * torch.randn(200, generator=generator)
    damping = torch.ones(8)
    damping[3] = 0.0
    feature_map = build(1, 1, 8, 4, True).feature_map
    feature_map.fit(key.unsqueeze(0), torch.randn(1, 200, 8, generator=generator), damping)
    codes = feature_map.key(key[None, None], 0.35).values[0, 0].detach()
    assert not feature_map.query_weight[0, 3].any()
    same = torch.arange(200)[:, None] % 4 == torch.arange(200) % 4
    shared = codes @ codes.T
    assert not shared[~same].max() > 1e-3
    assert torch.allclose(codes[:4].repeat(50, 1), codes, atol=1e-3)


def test_what_cannot_be_calibrated_is_an_error() -> None:
    with pytest.raises(ValueError, match="not patched"):
        hla.calibrate(LLAMA.build(), rows())
    model = hla.patch_model(LLAMA.build(), "window")
    with pytest.raises(TypeError, match="one batch alone"):
        hla.calibrate(model, rows()[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no batches"):
        hla.calibrate(model, [])
    with pytest.raises(ValueError, match="max_length must be a positive integer, got 0"):
        hla.calibrate(model, rows(), max_length=0)
    with pytest.raises(ValueError, match="Give longer rows, such as whole documents"):
        hla.calibrate(model, rows())  # all rows lie within the windows


@pytest.mark.parametrize("batches", [["a text"], "a text", [torch.ones(1, 9)], [{"input_ids": [[1, 2, 3]]}]], ids=str)
def test_texts_and_lists_are_no_batches(batches):
    with pytest.raises(ValueError, match=r'Pass dicts of tensors, .* padding=True, return_tensors="pt"'):
        hla.calibrate(hla.patch_model(LLAMA.build(), "window"), batches)


@pytest.mark.parametrize("family", [LLAMA, BERT], ids=str)
def test_rows_without_a_token_outside_of_the_window_are_refused(family):
    """A window of 4 with 2 sinks at either end that holds one; nothing has changed then."""
    model = hla.patch_model(family.build(), "window", window_size=4, sink_tokens=2)
    limit = max(module.exact_length for module in model.modules() if hasattr(module, "exact_length"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"\({limit} tokens\), so there is nothing to fit\. Give longer rows"):
        hla.calibrate(model, [{"input_ids": token_ids(2, limit)}])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert len(hla.calibrate(model, [{"input_ids": token_ids(2, limit + 4)}]).table)

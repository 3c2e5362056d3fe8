"""The registries: complete entries, third parties, entry points, names that are taken."""

from dataclasses import dataclass, field, fields

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn import registry
from hf_linear_attn.feature_maps import FeatureMap
from hf_linear_attn.mechanisms import LinearAttention
from hf_linear_attn.ops.common import Features
from hf_linear_attn.registry import ATTENTIONS, FEATURE_MAPS, Registry, build_options
from tests.cases import entries
from tests.comparing import assert_close, logits
from tests.inputs import token_ids
from tests.tiny_models import BERT, GPT2


@dataclass(frozen=True)
class SquareOptions:
    power: int = field(default=2, metadata={"help": "exponent"})


@pytest.fixture
def square():
    """A feature map by somebody else, taken out again afterwards."""

    @hla.register_feature_map(
        "square", description="x to a power", paper="nobody 2020", options=SquareOptions, learned=False
    )
    class SquareFeatureMap(FeatureMap):
        def __init__(self, shape, options):
            super().__init__(shape, options)
            self.num_features = shape.head_dim

        def query(self, x, scaling):
            return Features(x.abs() ** self.options.power + 0.01)

    yield SquareFeatureMap
    ATTENTIONS.discard("square")
    FEATURE_MAPS.discard("square")


def mean_attention(name="mean", causal=False):
    """A mechanism by somebody else: every query sees the mean of the values."""

    @hla.register_attention(
        name,
        description="the mean",
        paper="nobody 2020",
        options=SquareOptions,
        causal=causal,
        bidirectional=True,
        learned=False,
        alternative="elu",
    )
    class MeanAttention(LinearAttention):
        def forward(self, inputs):
            repeats = inputs.query.shape[1] // inputs.value.shape[1]
            return self.attention_weights(inputs) @ inputs.value.repeat_interleave(repeats, dim=1), None

        def attention_weights(self, inputs):
            query = inputs.query
            allowed = inputs.visible().expand(query.shape[0], query.shape[1], -1, -1).to(query.dtype)
            return allowed / allowed.sum(dim=-1, keepdim=True).clamp(min=1)

    return MeanAttention


@pytest.fixture
def mean():
    yield mean_attention()
    ATTENTIONS.discard("mean")


def test_listed_entries_are_complete():
    listing = hla.list_attentions()
    assert list(listing) == sorted(listing)
    assert set(listing) == {name for name, _ in ATTENTIONS}
    keys = {"description", "paper", "causal", "bidirectional", "learned", "state", "cost", "recommendation", "options"}
    for name, entry in listing.items():
        assert set(entry) >= keys, name
        assert all(entry[key] for key in ("description", "paper", "cost", "recommendation")), name
        assert entry["causal"] or entry["bidirectional"], name
        assert entry["state"] in {"none", "constant", "growing"}, name
        assert entry["state"] != "none" or not entry["causal"], name
        for option, description in entry["options"].items():
            assert description["help"], f"{name}.{option}"
            assert "default" in description


def test_entries_name_an_alternative_for_a_missing_direction():
    for entry in entries():
        if not (entry.causal and entry.bidirectional):
            assert entry.alternative in ATTENTIONS, entry.name


def test_options_are_frozen_dataclasses_with_defaults():
    for entry in entries():
        assert entry.options.__dataclass_params__.frozen, entry.name
        build_options(entry, {})


def test_every_feature_map_is_a_mechanism_too():
    hla.list_attentions()
    for name, entry in FEATURE_MAPS:
        assert ATTENTIONS.get(name).options is entry.options


@pytest.mark.slow
def test_a_feature_map_of_a_third_party(square, tmp_path):
    assert hla.list_attentions()["square"]["options"] == {"power": {"default": 2, "help": "exponent"}}
    for family in (BERT, GPT2):
        model = hla.patch_model(family.build(), "square", power=3)
        model.save_pretrained(tmp_path / family.name)
        loaded = hla.load_pretrained(str(tmp_path / family.name))
        assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))
    tokens = model.generate(token_ids(), max_new_tokens=4, do_sample=False)
    assert torch.equal(tokens, model.generate(token_ids(), max_new_tokens=4, do_sample=False, use_cache=False))
    windowed = hla.patch_model(GPT2.build(), "window", feature_map="square", feature_map_options={"power": 4})
    assert bool(torch.isfinite(logits(windowed, token_ids())).all())


def test_a_mechanism_of_a_third_party(mean):
    model, calls = hla.patch_model(BERT.build(), "mean"), []
    with hla.observe_attention(model, calls.append):
        logits(model, token_ids())
    assert_close(calls[0].linear_output(), calls[0].value.mean(dim=2, keepdim=True).expand(-1, -1, 21, -1))
    with pytest.raises(NotImplementedError, match=r"'mean' cannot be causal.*Use 'elu'"):
        hla.patch_model(GPT2.build(), "mean")


def test_names_are_not_taken_twice(square, mean):
    with pytest.raises(ValueError, match=r"Attention mechanism 'mean' is already registered. Choose another name"):
        mean_attention()
    with pytest.raises(ValueError, match="'square' is already registered"):
        mean_attention("square")
    for name in ("square", "mean"):
        decorate = hla.register_feature_map(name, description="", paper="", options=SquareOptions, learned=False)
        with pytest.raises(ValueError, match=f"'{name}' is already registered"):
            decorate(type(square.__name__, (FeatureMap,), {}))
    assert ATTENTIONS.get("square").options is SquareOptions


@pytest.mark.parametrize("register", [hla.register_attention, hla.register_feature_map])
def test_what_cannot_be_registered(register):
    directions = {"causal": True, "bidirectional": True} if register is hla.register_attention else {}
    fields_of_entry = {"description": "", "paper": "", "learned": False, **directions}
    with pytest.raises(TypeError, match="The options of 'new' must be a dataclass, got <class 'dict'>"):
        register("new", options=dict, **fields_of_entry)
    with pytest.raises(TypeError, match=r"decorates subclasses of .*, got <class 'int'>"):
        register("new", options=SquareOptions, **fields_of_entry)(int)
    for name in ("", 3):
        with pytest.raises(TypeError, match="must be a non-empty string"):
            Registry("thing").add(name, 1)
    assert "new" not in ATTENTIONS


class Point:
    """An entry point that registers a mechanism when it is loaded."""

    loads = 0

    def load(self):
        Point.loads += 1
        mean_attention("from-a-plugin")


def test_a_plugin_is_detected_through_its_entry_point(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()] if group == "hf_linear_attn" else [])
    monkeypatch.setattr(ATTENTIONS, "_loaded", False)
    try:
        model = hla.patch_model(BERT.build(), "from-a-plugin")
        assert hla.patch_report(model).layers[0].attention == "from-a-plugin"
        assert "from-a-plugin" in hla.list_attentions()
        assert Point.loads == 1
    finally:
        ATTENTIONS.discard("from-a-plugin")


def test_unknown_names_suggest_near_ones():
    hla.list_attentions()
    with pytest.raises(ValueError, match=r"Unknown feature map 'favor'|Unknown feature map 'hedghog'"):
        FEATURE_MAPS.get("hedghog")
    with pytest.raises(TypeError, match=r"must be a string, got 3 \(int\)"):
        ATTENTIONS.get(3)
    with pytest.raises(ValueError, match=r"'num_slot'.*Did you mean 'num_slots'.*Options: num_slots"):
        build_options(ATTENTIONS.get("linformer"), {"num_slot": 3})


def test_fields_of_options_have_help():
    for entry in entries():
        assert all(option.metadata.get("help") for option in fields(entry.options)), entry.name

"""Settings: parsing, the order of precedence, the saved form."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_linear_attn import LayerConfig, LinearAttentionConfig, __version__

NAMES = ["encoder.0.attn", "encoder.1.attn", "decoder.0.attn"]


def resolved(plan):
    layers = LinearAttentionConfig.parse(plan).resolve(NAMES)
    return [None if layer is None else layer.attention for layer in layers]


def test_index_beats_name_beats_pattern_beats_default():
    plan = {"default": "softmax", "encoder.*": "elu", "encoder.1.attn": "favor+"}
    assert resolved(plan) == ["elu", "favor+", "softmax"]
    assert resolved({**plan, "-2": "hedgehog"}) == ["elu", "hedgehog", "softmax"]
    assert resolved({"decoder.*": "elu"}) == [None, None, "elu"]


def test_the_last_matching_pattern_wins():
    assert resolved({"*": "elu", "*.0.*": "favor+"}) == ["favor+", "elu", "favor+"]


def test_layers_are_parsed_from_names_and_dicts():
    expected = LayerConfig("favor+", {"num_features": 8})
    assert LayerConfig.parse({"attention": "favor+", "num_features": 8}) == expected
    assert LayerConfig.parse({"attention": "favor+", "options": {"num_features": 8}}) == expected
    assert LayerConfig.parse(expected) is expected
    assert LayerConfig.parse("elu") == LayerConfig("elu")


def test_the_saved_form_is_json_with_every_option():
    saved = LinearAttentionConfig.parse({"default": "favor+", "0": "softmax"}).to_dict()
    assert saved["format_version"] == 1
    assert saved["package_version"] == __version__
    assert saved["default"]["options"]["num_features"] == 256
    assert LinearAttentionConfig.from_dict(json.loads(json.dumps(saved))).to_dict() == saved


#: The options of a layer as hf-linear-attn 0.1.0 saved them: all that it had.
SAVED_BY_0_1_0 = {
    "window": {
        "window_size": 64,
        "feature_map": "vq",
        "feature_map_options": {},
        "mix_init": -100.0,
        "saturation": None,
        "sink_tokens": 4,
        "store_size": 0,
        "cache_dtype": "auto",
    },
    "scatterbrain": {
        "window_size": 64,
        "feature_map": "performer-relu",
        "feature_map_options": {"kernel": "relu"},
        "num_hash_buckets": 0,
        "hash_rounds": 1,
        "bucket_capacity": 16,
        "seed": 0,
    },
    "performer-relu": {
        "num_features": 256,
        "seed": 0,
        "orthogonal": True,
        "scaling": "chi",
        "kernel": "relu",
        "epsilon": 0.001,
        "split_scaling": False,
    },
    "luna": {"num_packed": 64, "activation": "elu", "scale_query": False, "init_scale": 2.0, "seed": 0},
    "nystrom": {"num_landmarks": 64, "iterations": 6, "conv_kernel": None},
    "linformer": {
        "num_slots": 128,
        "max_length": 96,
        "projection": "linear",
        "sharing": "headwise",
        "init": "segment-mean",
        "fit": "resample",
        "seed": 0,
    },
}


def saved_layer(attention, **changes):
    layer = {"attention": attention, "options": {**SAVED_BY_0_1_0[attention], **changes}}
    return {"format_version": 1, "package_version": "0.1.0", "default": None, "layers": {"0": layer}}


@pytest.mark.parametrize(
    ("attention", "gone"),
    [
        ("window", {"store_size"}),
        ("scatterbrain", {"num_hash_buckets", "hash_rounds", "bucket_capacity"}),
        ("performer-relu", {"kernel"}),
        ("luna", {"activation", "scale_query", "init_scale"}),
        ("nystrom", {"conv_kernel"}),
        ("linformer", {"projection"}),
    ],
)
def test_what_an_earlier_version_saved_is_read_without_the_options_that_are_gone(attention, gone):
    expected = {name: value for name, value in SAVED_BY_0_1_0[attention].items() if name not in gone}
    if "feature_map_options" in expected:
        expected["feature_map_options"] = {}
    assert dict(LinearAttentionConfig.from_dict(saved_layer(attention)).layers["0"].options) == expected


@pytest.mark.parametrize(
    ("attention", "option", "value"),
    [
        ("window", "store_size", 4),
        ("scatterbrain", "num_hash_buckets", 8),
        ("performer-relu", "kernel", "gelu"),
        ("luna", "activation", "softplus"),
        ("luna", "scale_query", True),
        ("nystrom", "conv_kernel", 33),
        ("linformer", "projection", "conv"),
    ],
)
def test_a_saved_option_that_is_gone_is_refused_where_it_was_used(attention, option, value):
    with pytest.raises(ValueError, match=rf"{option}={value!r} of {attention!r} is gone: hf-linear-attn 0\.1\.0 was"):
        LinearAttentionConfig.from_dict(saved_layer(attention, **{option: value}))


def test_a_saved_option_of_a_feature_map_that_is_gone_is_refused_where_it_was_used():
    with pytest.raises(ValueError, match=r"kernel='gelu' of 'performer-relu' is gone"):
        LinearAttentionConfig.from_dict(saved_layer("scatterbrain", feature_map_options={"kernel": "gelu"}))


def test_a_saved_mechanism_that_is_gone_is_refused_with_the_version_that_had_it():
    layer = {"attention": "cosformer", "options": {"max_length": 512, "epsilon": 0.01}}
    saved = {"format_version": 1, "package_version": "0.1.0", "default": layer, "layers": {}}
    with pytest.raises(ValueError, match=r"'cosformer' is gone: hf-linear-attn 0\.1\.0 was the last"):
        LinearAttentionConfig.from_dict(saved)


LAYER = st.one_of(
    st.sampled_from(["elu", "hedgehog", "softmax"]),
    st.builds(lambda m: {"attention": "favor+", "num_features": m}, st.integers(1, 64)),
)


@given(default=st.none() | LAYER, layers=st.dictionaries(st.integers(-3, -1) | st.just("decoder.*"), LAYER, min_size=1))
def test_round_trip(default, layers):
    plan = {**layers, **({} if default is None else {"default": default})}
    config = LinearAttentionConfig.parse(plan)
    again = LinearAttentionConfig.parse(json.loads(json.dumps(config.to_dict())))
    assert again.to_dict() == config.to_dict()
    assert [layer and layer.attention for layer in again.resolve(NAMES)] == resolved(plan)


@pytest.mark.parametrize("version", [None, "1", 1.5])
def test_what_is_no_version(version):
    with pytest.raises(ValueError, match="Not the settings of linear attention: format_version is"):
        LinearAttentionConfig.from_dict({"format_version": version})


def test_a_newer_format_says_how_to_upgrade():
    with pytest.raises(ValueError, match=r"format 2, written by hf-linear-attn 9\.0;.*pip install -U hf-linear-attn"):
        LinearAttentionConfig.from_dict({"format_version": 2, "package_version": "9.0"})

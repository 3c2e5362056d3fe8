"""Saving and loading: bit-equal, with every option of from_pretrained, and refusing what does not fit."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    BertModel,
    Trainer,
    TrainingArguments,
    pipeline,
)

import hf_linear_attn as hla
from tests.comparing import assert_close, logits
from tests.inputs import token_ids
from tests.slow_cases import slow
from tests.small import patched
from tests.subprocesses import run_python
from tests.tiny_models import BERT, FAMILIES, GPT2, LLAMA, saved_and_loaded

FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=str)
WEIGHTS = "model.safetensors"


@pytest.fixture
def checkpoint(tmp_path):
    """A saved patched BERT: the model and its folder."""
    model = patched("hedgehog", BERT)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config.pop(key) if value is None else config.__setitem__(key, value)
    path.write_text(json.dumps(config))


def edit_weights(folder, edit):
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


# --------------------------------------------------------------------------------------------------------------------
# Loading


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32, torch.float16, torch.float64)], ids=str)
@FAMILY
def test_dtype(family, dtype, tmp_path):
    model = saved_and_loaded(patched("hedgehog", family), tmp_path / "first", dtype=dtype)
    loaded = saved_and_loaded(model, tmp_path / "second", dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert all(torch.equal(own, loaded.state_dict()[key]) for key, own in model.state_dict().items())
    assert_close(logits(loaded, token_ids()), logits(model, token_ids()), torch.float64)
    assert hla.load_pretrained(str(tmp_path / "second"), dtype="auto").dtype == dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hedgehog", "favor+"])
@FAMILY
def test_device_map_and_shards(name, family, tmp_path):
    model = patched(name, family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for kwargs in ({}, {"device_map": {"": "cpu"}}, {"device_map": "cpu", "low_cpu_mem_usage": True}):
        loaded = hla.load_pretrained(str(tmp_path), **kwargs)
        assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))
    for layer in (module for key, module in loaded.named_modules() if key.endswith("linear_attention")):
        assert not any(tensor.is_meta for tensor in layer.state_dict().values())


@pytest.mark.slow
def test_saving_twice_and_loading_twice(checkpoint, tmp_path):
    model, folder = checkpoint
    again = saved_and_loaded(hla.load_pretrained(str(folder)), tmp_path / "again")
    assert torch.equal(logits(again, token_ids()), logits(model, token_ids()))
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["architectures"] == ["BertForMaskedLM"]
    assert config["linear_attention"] == json.loads((folder / "config.json").read_text())["linear_attention"]


def test_a_loaded_model_can_be_unpatched(tmp_path):
    exact = GPT2.build()
    expected = logits(exact, token_ids())
    model = hla.unpatch_model(saved_and_loaded(hla.patch_model(exact, "hedgehog"), tmp_path))
    assert torch.equal(logits(model, token_ids()), expected)
    model.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert not {"linear_attention", "auto_map", "attn_implementation", "fusion_config", "experts_implementation"} & set(
        config
    )
    unpatched = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(unpatched, token_ids()), expected)


def test_an_exact_implementation_may_be_chosen_when_loading(tmp_path):
    model = hla.patch_model(GPT2.build(), {"default": "hedgehog", "0": "softmax"})
    model.save_pretrained(tmp_path)
    assert_close(logits(hla.load_pretrained(str(tmp_path)), token_ids()), logits(model, token_ids()))


@FAMILY
def test_auto_classes_with_trust_remote_code(family, tmp_path):
    model = patched("hedgehog", family)
    model.save_pretrained(tmp_path)
    auto = AutoModelForCausalLM if family.causal else AutoModelForMaskedLM
    loaded = auto.from_pretrained(tmp_path, trust_remote_code=True)
    assert hla.is_patched(loaded)
    assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))
    assert loaded.config.architectures == [type(model).__name__]
    base = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert hla.is_patched(base)


REFUSED = r"This checkpoint runs linear attention\. Load it with hf_linear_attn\.load_pretrained\(path\)"


def fill_mask(path, **kwargs):
    return pipeline("fill-mask", model=str(path), model_kwargs=kwargs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kwargs", [{}, {"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}], ids=str)
@pytest.mark.parametrize(
    "load",
    [AutoModel.from_pretrained, AutoModelForMaskedLM.from_pretrained, BertForMaskedLM.from_pretrained, fill_mask],
    ids=["AutoModel", "AutoModelForMaskedLM", "BertForMaskedLM", "pipeline"],
)
def test_other_ways_of_loading_are_refused_whatever_attention_they_name(load, kwargs, tmp_path):
    patched("elu", BERT).save_pretrained(tmp_path)  # No weights of its own would be missed.
    with pytest.raises(ValueError, match=REFUSED):
        load(tmp_path, **kwargs)


@pytest.mark.slow
def test_a_config_read_from_the_checkpoint_is_refused_too(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint[1], num_labels=3)
    with pytest.raises(ValueError, match=REFUSED):
        BertForMaskedLM.from_pretrained(checkpoint[1], config=config, attn_implementation="sdpa")
    assert hla.is_patched(hla.load_pretrained(str(checkpoint[1]), config=config))
    with pytest.raises(ValueError, match=REFUSED):  # Our loading has left the config as it was.
        BertForMaskedLM.from_pretrained(checkpoint[1], config=config, attn_implementation="sdpa")


ABSENT = """
import sys
sys.modules["hf_linear_attn"] = None  # not installed
from transformers import AutoConfig, AutoModel, BertModel
for cls in (AutoModel, BertModel):
    for kwargs in ({}, {"attn_implementation": "sdpa"}):
        try:
            cls.from_pretrained(sys.argv[1], **kwargs)
        except ValueError as error:
            assert "pip install hf-linear-attn" in str(error), error
        else:
            raise AssertionError((cls, kwargs))
assert AutoConfig.from_pretrained(sys.argv[1]).model_type == "bert"
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import hf_linear_attn"], ids=["absent", "imported"])
def test_a_process_that_has_not_used_the_package_refuses_the_checkpoint(first, checkpoint):
    code = ABSENT.replace('sys.modules["hf_linear_attn"] = None', first) if first else ABSENT
    done = run_python("-c", code, checkpoint[1])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_checkpoint_without_the_refusals_in_its_config(checkpoint):
    model, folder = checkpoint
    edit_config(folder, fusion_config=None, experts_implementation=None)
    assert torch.equal(logits(hla.load_pretrained(str(folder)), token_ids()), logits(model, token_ids()))
    unpatched = BertForMaskedLM.from_pretrained(folder)
    with pytest.raises(RuntimeError, match=r"has no linear attention.*load_pretrained\(path\)"):
        unpatched(token_ids())


#: What 0.1.0 wrote into `config.json` beside the options of today.
GONE_IN_0_2_0 = {
    "performer-relu": {"kernel": "relu"},
    "luna": {"activation": "elu", "scale_query": False, "init_scale": 2.0},
    "nystrom": {"conv_kernel": None},
    "linformer": {"projection": "linear"},
    "scatterbrain": {"num_hash_buckets": 0, "hash_rounds": 1, "bucket_capacity": 16},
    "window": {"store_size": 0},
}


@pytest.mark.parametrize("attention", GONE_IN_0_2_0)
def test_a_checkpoint_of_0_1_0_computes_as_it_did(attention, tmp_path):
    model = patched(attention, BERT)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["linear_attention"]
    for layer in saved["layers"].values():
        layer["options"] |= GONE_IN_0_2_0[attention]
    edit_config(tmp_path, linear_attention={**saved, "package_version": "0.1.0"})
    assert torch.equal(logits(hla.load_pretrained(str(tmp_path)), token_ids()), logits(model, token_ids()))


@pytest.mark.slow
def test_the_trainer_resumes_and_loads_its_best_model(tmp_path):
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in token_ids(batch=8, length=9)]
    settings = {"per_device_train_batch_size": 2, "max_steps": 4, "save_steps": 2, "report_to": "none"}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "use_cpu": True, "disable_tqdm": True, "seed": 3}

    def trainer(out, **changes):
        torch.manual_seed(0)
        arguments = TrainingArguments(str(tmp_path / out), **{**settings, **changes})
        return Trainer(patched("hedgehog", GPT2), arguments, train_dataset=rows, eval_dataset=rows)

    full = trainer("whole")
    full.train()
    resumed = trainer("resumed", load_best_model_at_end=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.state.best_model_checkpoint.endswith("checkpoint-4")
    expected = logits(full.model.eval(), token_ids())
    assert torch.equal(logits(resumed.model.eval(), token_ids()), expected)
    best = hla.load_pretrained(str(tmp_path / "resumed" / "checkpoint-4"))
    assert torch.equal(logits(best, token_ids()), expected)


def test_the_class_of_a_patched_model_loads_it_again(checkpoint):
    model, folder = checkpoint
    for auto_class in (type(model), BertForMaskedLM, "BertForMaskedLM"):
        loaded = hla.load_pretrained(str(folder), auto_class=auto_class)
        assert type(loaded) is type(model)
        assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))


def test_the_class_of_a_patched_model_builds_another_from_its_config():
    model = patched("hedgehog", LLAMA)
    before = logits(model, token_ids())
    other = type(model)(model.config).eval()
    assert torch.equal(logits(model, token_ids()), before)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, token_ids()), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "auto_class",
    [AutoModelForSequenceClassification, "AutoModelForSequenceClassification", "BertForSequenceClassification"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_new_head_on_a_patched_checkpoint(checkpoint, auto_class):
    model, folder = checkpoint
    classifier = hla.load_pretrained(str(folder), auto_class=auto_class, num_labels=3)
    assert type(classifier).__name__ == "BertForSequenceClassification"
    assert logits(classifier, token_ids()).shape == (2, 3)
    inner, full = model.bert.state_dict(), classifier.bert.state_dict()
    assert all(torch.equal(full[key], inner[key]) for key in inner)


def test_a_base_checkpoint_into_a_head(tmp_path):
    base = hla.patch_model(BertModel(BERT.build().config).eval(), "hedgehog")
    base.save_pretrained(tmp_path)
    classifier = hla.load_pretrained(str(tmp_path), auto_class=AutoModelForSequenceClassification)
    with torch.no_grad():
        assert torch.equal(classifier.bert(token_ids())[0], base(token_ids())[0])


@pytest.mark.slow
def test_weights_passed_as_a_state_dict(checkpoint):
    """By keyword and without a folder, as from_pretrained takes them."""
    model, _ = checkpoint
    arguments = {"config": model.config, "state_dict": model.state_dict()}
    again = type(model).from_pretrained(pretrained_model_name_or_path=None, **arguments)
    assert torch.equal(logits(again, token_ids()), logits(model, token_ids()))
    arguments["state_dict"] = {key: value for key, value in model.state_dict().items() if "linear_attention" not in key}
    with pytest.raises(ValueError, match="in the given state_dict do not match"):
        type(model).from_pretrained(None, **arguments)


@pytest.mark.slow
def test_other_sizes_are_a_runtime_error_as_in_transformers(checkpoint):
    """Whoever handles it for plain models need not learn another error; the rest of the package raises ValueErrors."""
    _, folder = checkpoint
    hla.load_pretrained(folder, "AutoModelForSequenceClassification", num_labels=3).save_pretrained(folder)
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match="classifier"):
            hla.load_pretrained(folder, num_labels=4)
    assert hla.load_pretrained(folder, num_labels=4, ignore_mismatched_sizes=True).config.num_labels == 4


@pytest.mark.slow
def test_output_loading_info(checkpoint):
    model, info = hla.load_pretrained(str(checkpoint[1]), output_loading_info=True)
    assert hla.is_patched(model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("call", ["push_to_hub", "save_pretrained"])
def test_push_to_hub_uses_save_pretrained(call, monkeypatch, tmp_path):
    uploaded = {}

    def create_commit(self, *args, operations=(), **kwargs):
        for operation in operations:
            uploaded[operation.path_in_repo] = Path(operation.path_or_fileobj).read_bytes()

    def create_repo(self, repo_id, *args, **kwargs):
        return SimpleNamespace(repo_id=repo_id)

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    model = patched("hedgehog", BERT)
    if call == "push_to_hub":
        model.push_to_hub("someone/model", token="not-a-token")
    else:
        model.save_pretrained(tmp_path, push_to_hub=True, repo_id="someone/model", token="not-a-token")
    assert {"config.json", WEIGHTS, "modeling_hf_linear_attn.py"} <= set(uploaded)
    config = json.loads(uploaded["config.json"])
    assert config["auto_map"]["AutoModelForMaskedLM"] == "modeling_hf_linear_attn.BertForMaskedLM"
    assert next(iter(config["fusion_config"])).startswith("This checkpoint runs linear attention.")


def test_only_the_main_process_writes(tmp_path):
    patched("hedgehog", BERT).save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "modeling_hf_linear_attn.py").exists()


# --------------------------------------------------------------------------------------------------------------------
# What does not fit


LEARNED = "bert.encoder.layer.1.attention.self.linear_attention.feature_map.query_weight"


def test_an_unpatched_checkpoint(tmp_path):
    BERT.build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no linear attention.*no 'linear_attention'.*patch_model\(model, name\)"):
        hla.load_pretrained(str(tmp_path))


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(OSError, match="nothing"):
        hla.load_pretrained(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda weights: weights.pop(LEARNED), f"missing: {LEARNED}"),
        (lambda weights: weights.update({LEARNED + "_2": torch.ones(3)}), f"unexpected: {LEARNED}_2"),
        (lambda weights: weights.update({LEARNED: torch.ones(3)}), f"{LEARNED}"),
    ],
    ids=["missing", "extra", "wrong-shape"],
)
def test_weights_that_disagree_with_the_config(checkpoint, edit, message):
    _, folder = checkpoint
    edit_weights(folder, edit)
    # Shows a bug (wrong-shape): Transformers' own error comes first, and names neither the weight nor a remedy.
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        hla.load_pretrained(str(folder))


@pytest.mark.slow
def test_a_config_that_disagrees_with_the_weights(checkpoint):
    _, folder = checkpoint
    saved = json.loads((folder / "config.json").read_text())["linear_attention"]
    saved["layers"]["1"] = {"attention": "linformer", "options": {}}
    edit_config(folder, linear_attention=saved)
    with pytest.raises(ValueError, match=r"do not match the linear attention of its config.json.*missing.*unexpected"):
        hla.load_pretrained(str(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format 99, written by hf-linear-attn .*reads formats up to 1.*pip install -U"),
        ({"format_version": "x"}, "format_version is 'x', not a number"),
        ({"surprise": 1}, r"Not the settings of linear attention: \['surprise'\]"),
        ({"layers": [1]}, r"Not the settings of linear attention: \[1\]"),
        ({"layers": {"0": {"attention": "hedgehogg"}}}, "Unknown attention mechanism 'hedgehogg'.*'hedgehog'"),
        ({"layers": {"7": {"attention": "hedgehog"}}}, "Layer index 7 is out of range"),
    ],
)
def test_settings_that_cannot_be_read(checkpoint, change, message):
    _, folder = checkpoint
    saved = json.loads((folder / "config.json").read_text())["linear_attention"]
    edit_config(folder, linear_attention={**saved, **change})
    with pytest.raises(ValueError, match=message):
        hla.load_pretrained(str(folder))
    with pytest.raises(ValueError, match=message):
        AutoModel.from_pretrained(folder, trust_remote_code=True)


@pytest.mark.parametrize("size", [0, 4, 1000])
def test_a_truncated_weights_file(checkpoint, size):
    _, folder = checkpoint
    weights = folder / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"cannot be read \(.*truncated or corrupt.*again"):
        hla.load_pretrained(str(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("auto_class", "error", "message"),
    [
        ("AutoModelForTelepathy", ValueError, "no model class 'AutoModelForTelepathy'"),
        (dict, TypeError, "auto_class must be an AutoModel… class, a model class, or a name, got <class 'dict'>"),
        ("AutoModelForSpeechSeq2Seq", ValueError, "has no class for model type 'bert'"),
    ],
)
def test_a_class_that_cannot_be(checkpoint, auto_class, error, message):
    with pytest.raises(error, match=message):
        hla.load_pretrained(str(checkpoint[1]), auto_class=auto_class)


def test_a_config_that_names_no_class(checkpoint):
    edit_config(checkpoint[1], architectures=None)
    with pytest.raises(ValueError, match="Pass auto_class=AutoModelForCausalLM"):
        hla.load_pretrained(str(checkpoint[1]))
    edit_config(checkpoint[1], architectures=["NoSuchModel"])
    with pytest.raises(ValueError, match="no model class 'NoSuchModel'"):
        hla.load_pretrained(str(checkpoint[1]))


def test_llama_in_shards_generates_the_same(tmp_path):
    model = patched("window", LLAMA)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    loaded = hla.load_pretrained(str(tmp_path))
    settings = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(token_ids(), **settings), model.generate(token_ids(), **settings))

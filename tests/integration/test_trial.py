"""What the table of architectures does not list is tried before it is patched, and nothing of the model is touched."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import BertModel, DiffLlamaConfig, DiffLlamaForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_linear_attn as hla
from hf_linear_attn.integration import trial
from hf_linear_attn.integration.discovery import find_attention, patched_layers
from tests.architectures.models import architecture_model
from tests.comparing import assert_close, logits
from tests.inputs import token_ids
from tests.slow_cases import slow
from tests.tiny_models import tiny_model

DIFFLLAMA = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}


class OwnLlama(LlamaForCausalLM):
    """A class of a user that changes nothing."""


class BiasedLayer(LlamaDecoderLayer):
    """Adds a learned bias, zero at first, to the logits of each distance."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bias = nn.Parameter(torch.zeros(128))

    def forward(self, hidden_states: Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        length = hidden_states.shape[1]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = torch.zeros(length, length).masked_fill(distance < 0, -torch.inf)
        mask = (hidden + self.bias[distance.abs()])[None, None]
        return super().forward(hidden_states, *args, attention_mask=mask, **kwargs)


class HiddenModel(OwnLlama):
    """Takes no tokens."""

    def forward(self, inputs_embeds: Tensor) -> Any:  # type: ignore[override]
        return super().forward(inputs_embeds=inputs_embeds)


def own_llama(cls: type[PreTrainedModel] = OwnLlama) -> Any:
    torch.manual_seed(0)
    return cls(tiny_model("llama").config).eval()


def biased_llama() -> Any:
    model = own_llama()
    for index in range(len(model.model.layers)):
        model.model.layers[index] = BiasedLayer(model.config, index)
    return model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path)
    monkeypatch.delenv(trial.SKIP_VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the layers of each trial that runs."""
    runs: list[list[str]] = []
    try_layers = trial.try_layers

    def counted(root: PreTrainedModel, candidates: Any, names: Any) -> str:
        runs.append(list(names))
        return try_layers(root, candidates, names)

    monkeypatch.setattr(trial, "try_layers", counted)
    return runs


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama", "bart", "vit"])
def test_what_the_table_lists_is_not_tried(architecture: str, trials: list[Any]) -> None:
    if not trial._table():
        pytest.skip(f"The table does not list Transformers {transformers.__version__}.")
    hla.patch_model(tiny_model(architecture), "elu")
    assert not trials


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama", "bart", "vit", "modernbert"])
def test_what_works_passes_a_trial(architecture: str, trials: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_table", frozenset)
    model = hla.patch_model(tiny_model(architecture), "elu")
    assert sorted(itertools.chain(*trials)) == sorted(layer.name for layer in patched_layers(model).values())


@pytest.mark.parametrize("model_type", ["wav2vec2", "qwen2_5_vl", *slow("whisper", "qwen3_vl", "audioflamingo3")])
def test_towers_for_images_and_sounds_pass_a_trial(
    model_type: str, trials: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_table", frozenset)
    model = hla.patch_model(architecture_model(model_type), "elu")
    assert sorted(itertools.chain(*trials)) == sorted(layer.name for layer in patched_layers(model).values())


def test_a_class_of_the_user_is_tried(trials: list[Any]) -> None:
    model, listed = own_llama(), tiny_model("llama")
    model.load_state_dict(listed.state_dict())
    expected = logits(hla.patch_model(listed, "elu"), token_ids())
    hla.patch_model(model, "elu")
    assert trials == [["model.layers.0.self_attn", "model.layers.1.self_attn"]]
    assert_close(logits(model, token_ids()), expected)


def test_a_trial_leaves_everything_as_it_was() -> None:
    model, calls = own_llama(), []
    model.model.layers[0].train()
    model.lm_head.weight.requires_grad_(False)
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append("called"))
    tensors = {name: (tensor, tensor.clone()) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    config, state, modes = model.config.to_dict(), torch.get_rng_state(), [part.training for part in model.modules()]
    flags = [tensor.requires_grad for tensor in model.parameters()]
    names = [layer.name for layer in find_attention(model)]
    assert trial.try_layers(model, [""], names) == ""
    assert not calls
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in model.modules()] == modes
    assert [tensor.requires_grad for tensor in model.parameters()] == flags
    assert all(tensor.grad is None for tensor in model.parameters())
    assert model.config.to_dict() == config
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is tensors[name][0]
        assert torch.equal(tensor, tensors[name][1])
    for name, module in model.named_modules():
        assert vars(module).keys() == attributes[name].keys()
        assert all(vars(module)[key] is value for key, value in attributes[name].items())


def test_a_bias_that_is_still_zero_is_seen() -> None:
    model = biased_llama()
    with pytest.raises(
        NotImplementedError, match=r"\(model\.layers\.0\.self_attn\) is not among .* values other than 0.*'softmax'"
    ):
        hla.patch_model(model, "elu")
    assert not hla.is_patched(model)


def test_attention_that_is_wrong_with_a_cache_only_is_refused() -> None:
    """DiffLlama runs two attentions on one layer of its cache; in one pass it would be right."""
    sizes = {**DIFFLLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**sizes)).eval()
    with pytest.raises(NotImplementedError, match=r"DiffLlamaAttention .* \(in pieces, with a cache\)"):
        hla.patch_model(model, "elu")
    hla.patch_model(tiny_model("llama"), "elu")


def test_a_verdict_is_kept_and_a_damaged_one_is_not_believed(trials: list[Any], folder: Path) -> None:
    hla.patch_model(own_llama(), "elu")
    hla.patch_model(own_llama(), "hedgehog")
    assert len(trials) == 1
    (path,) = (folder / "trials").iterdir()
    assert json.loads(path.read_text())["reason"] == ""
    for text in ("", "{", "[]", '{"reason"'):
        path.write_text(text)
        hla.patch_model(own_llama(), "elu")
        assert json.loads(path.read_text())["reason"] == ""
    assert len(trials) == 5
    hla.patch_model(own_llama(), "elu", layers=[1])
    assert len(trials) == 6


def test_the_verdict_on_a_refused_model_is_kept(trials: list[Any]) -> None:
    messages = []
    for _ in range(2):
        with pytest.raises(NotImplementedError) as caught:
            hla.patch_model(biased_llama(), "elu")
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert len(trials) == 1


def test_a_class_whose_file_has_changed_is_tried_again(
    trials: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "from transformers import LlamaForCausalLM\n\nclass Changing(LlamaForCausalLM):\n    pass\n"
    for comment in ("", "# another version\n"):
        (tmp_path / "changing_model.py").write_text(text + comment)
        sys.modules.pop("changing_model", None)
        hla.patch_model(own_llama(importlib.import_module("changing_model").Changing), "elu")
    assert len(trials) == 2


def test_a_class_that_is_in_no_file_has_no_verdict(trials: list[Any], folder: Path) -> None:
    own = type("Notebook", (LlamaForCausalLM,), {"__module__": "__no_file__"})
    for _ in range(2):
        hla.patch_model(own_llama(own), "elu")
    assert len(trials) == 2
    assert not (folder / "trials").exists()


def test_a_trial_may_be_left_out(trials: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trial.SKIP_VARIABLE, "1")
    assert hla.is_patched(hla.patch_model(biased_llama(), "elu"))
    assert not trials


def test_what_cannot_be_tried_is_refused_with_the_way_to_force_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        unloaded = OwnLlama(tiny_model("llama").config)
    models = ((unloaded, "weights .* are not loaded"), (own_llama(HiddenModel), "takes neither tokens nor"))
    for model, reason in models:
        with pytest.raises(NotImplementedError, match=rf"cannot be tried here: .*{reason}.*{trial.SKIP_VARIABLE}=1"):
            hla.patch_model(model, "elu")
        assert not hla.is_patched(model)
        monkeypatch.setattr(trial, "_candidates", lambda *_: ("",))  # not the model inside that takes tokens


def test_a_model_around_that_takes_no_tokens_leaves_the_one_inside_to_be_tried(trials: list[Any]) -> None:
    assert hla.is_patched(hla.patch_model(own_llama(HiddenModel), "elu"))
    assert len(trials) == 1


def test_a_checkpoint_is_tried_when_its_weights_are_loaded(
    trials: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hla.patch_model(tiny_model("llama"), "elu")
    model.save_pretrained(tmp_path / "checkpoint")
    monkeypatch.setattr(trial, "_table", frozenset)
    loaded = hla.load_pretrained(str(tmp_path / "checkpoint"))
    assert len(trials) == 1
    assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))


def test_half_precision_and_many_layers_pass() -> None:
    config = tiny_model("llama").config
    config.num_hidden_layers = 12
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model = OwnLlama(config).to(dtype).eval()
        assert trial.try_layers(model, [""], [layer.name for layer in find_attention(model)]) == ""


def test_an_encoder_needs_no_cache() -> None:
    own = type("OwnBert", (BertModel,), {"__module__": __name__})
    model = own(tiny_model("bert").config).eval()
    assert hla.is_patched(hla.patch_model(model, "linformer", max_length=32))


def test_single_tokens_are_tried_where_pieces_are_refused() -> None:
    """Zamba's mixer starts anew in a piece of several tokens, and its attention shares a layer of the cache with it."""
    model = architecture_model("zamba")
    with pytest.raises(NotImplementedError, match=r"a trial \(token by token, with a cache\) raised"):
        hla.patch_model(model, "elu")
    assert not hla.is_patched(model)


def test_a_module_that_computes_its_attention_elsewhere_is_refused() -> None:
    """The vision layers of Kosmos-2.5 run eager attention whatever the implementation: nothing would be linear."""
    model = architecture_model("kosmos-2.5")
    with pytest.raises(NotImplementedError, match=r"do not reach the attention of vision_model\..*'softmax'"):
        hla.patch_model(model, "elu")
    layers = {layer.name: "elu" for layer in find_attention(model) if ".text_model." in f".{layer.name}"}
    assert hla.is_patched(hla.patch_model(model, {"default": "softmax", **layers}))

"""What the guards see in Transformers' source. A test that fails here means that an upstream file says it otherwise.

Then look at the new source: change the guard (`integration/source_guards.py`), or the list here if the fact changed.
"""

from __future__ import annotations

import importlib
import textwrap
from typing import Any

import pytest

from hf_linear_attn.integration import source_guards

#: Guard -> classes (modeling file, class) for which it must answer yes, and classes for which it must answer no.
EXPECTED: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "calls_interface": (
        [
            ("bert", "BertSelfAttention"),
            ("gpt2", "GPT2Attention"),
            ("llama", "LlamaAttention"),
            ("t5", "T5Attention"),
            ("bart", "BartAttention"),
            ("vit", "ViTAttention"),
        ],
        [("bert", "BertLayer"), ("xlnet", "XLNetRelativeAttention"), ("deberta", "DisentangledSelfAttention")],
    ),
    "passes_causal_argument": ([("clip", "CLIPTextModel")], [("clip", "CLIPVisionModel")]),
    "makes_masks": ([("llama", "LlamaModel"), ("gpt2", "GPT2Model")], [("llama", "LlamaAttention")]),
    "makes_causal_masks_only": ([("opt", "OPTDecoder")], [("bert", "BertEncoder")]),
    "makes_masks_by_positions": (
        [("llama", "LlamaModel"), ("gpt2", "GPT2Model"), ("gemma3", "Gemma3TextModel"), ("mistral", "MistralModel")],
        [("opt", "OPTDecoder"), ("clip", "CLIPTextModel"), ("afmoe", "AfmoeModel"), ("bert", "BertModel")],
    ),
    "restarts_its_state": (
        [("jamba", "JambaMambaMixer")],
        [("falcon_h1", "FalconH1Mixer"), ("qwen3_next", "Qwen3NextGatedDeltaNet"), ("llama", "LlamaAttention")],
    ),
    "caps_logits": ([("gemma2", "Gemma2Attention")], [("llama", "LlamaAttention")]),
    "passes_sinks": ([("gpt_oss", "GptOssAttention")], [("llama", "LlamaAttention")]),
    "passes_keyword_arguments_on": (
        [("llama", "LlamaModel"), ("llama", "LlamaDecoderLayer"), ("bert", "BertEncoder")],
        [("stablelm", "StableLmDecoderLayer")],
    ),
    "drops_arguments": (
        [("bloom", "BloomForCausalLM"), ("mpt", "MptForCausalLM"), ("falcon", "FalconForCausalLM")],
        [("llama", "LlamaForCausalLM")],
    ),
}


def find_class(model_type: str, name: str) -> type:
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    return getattr(module, name)


@pytest.mark.parametrize("guard", EXPECTED)
def test_what_a_guard_sees(guard: str) -> None:
    see = getattr(source_guards, guard)
    for answer, classes in zip((True, False), EXPECTED[guard], strict=True):
        for model_type, name in classes:
            assert see(find_class(model_type, name)) is answer, f"{guard}({name})"


@pytest.mark.parametrize(
    ("model_type", "name", "direction", "masks"),
    [
        ("aimv2", "Aimv2", "False", set()),
        ("gemma", "Gemma", "not getattr(config, 'use_bidirectional_attention', False)", {"causal"}),
        ("bert", "BertSelf", "is_causal", set()),
        ("phi4_multimodal", "Phi4MultimodalVision", "True", {"bidirectional"}),
    ],
)
def test_directions_of_layers_and_masks(model_type: str, name: str, direction: str, masks: set[str]) -> None:
    source = source_guards.direction_source(find_class(model_type, f"{name}Attention"))
    assert source.replace('"', "'") == direction
    if masks:
        assert source_guards.own_masks(find_class(model_type, f"{name}Model")) == masks


FORMATTED = """
class Attention:
    def forward(self, hidden_states, attention_mask=None, **kwargs):
        # a comment
        attention_interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attention_interface(
            self,
            hidden_states,
            attention_mask = attention_bias,
            is_causal = True,
            **kwargs,
        )
"""
REFORMATTED = """
class Attention:
    def forward(
        self,
        hidden_states, attention_mask=None,
        **kwargs
    ):
        attention_interface = (
            ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        )
        return attention_interface(self, hidden_states, attention_mask=attention_bias, is_causal=True, **kwargs)
"""


def test_layout_does_not_matter(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line breaks, spaces and comments change nothing that a guard sees."""
    monkeypatch.syspath_prepend(tmp_path)
    sources = []
    for name, text in (("formatted_source", FORMATTED), ("reformatted_source", REFORMATTED)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        cls = importlib.import_module(name).Attention
        sources.append(source_guards.forward_source(cls))
        assert source_guards.calls_interface(cls)
        assert source_guards.passes_causal_argument(cls)
        assert source_guards.passes_keyword_arguments_on(cls)
    assert sources[0] == sources[1]


def test_a_class_without_source() -> None:
    assert source_guards.forward_source(int) == ""
    assert not source_guards.calls_interface(int)

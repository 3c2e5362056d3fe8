"""Test classes of Transformers' own mixins, over tiny models that are patched as they are built.

Run by `recipes.quality_assurance.transformers_tests`, which puts the mixins into `transformers_suite` beside this
project and names the family and the mechanism in the environment. Nothing is collected by a plain `pytest`.
"""

from __future__ import annotations

import os
import unittest
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import BertConfig, GPT2Config, LlamaConfig, PreTrainedConfig
from transformers_suite.generation.test_utils import GenerationTesterMixin
from transformers_suite.test_modeling_common import ModelTesterMixin
from transformers_suite.test_training_mixin import TrainingTesterMixin

from hf_linear_attn.config import CONFIG_FIELD, LinearAttentionConfig
from hf_linear_attn.integration.model_class import linear_attention_class
from hf_linear_attn.registry import ATTENTIONS
from tests.small import small_options

FAMILY = os.environ["SUITE_FAMILY"]
#: The mechanism, or `exact` for models that are not patched.
ATTENTION = os.environ["SUITE_ATTENTION"]
EXACT = "exact"

HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Kind:
    """Configs and classes of a family; `sizes` are the names that its config gives to the sizes."""

    config: type[PreTrainedConfig]
    classes: tuple[str, ...]
    settings: dict[str, Any]
    causal: bool
    base: str


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
KINDS = {
    "bert": Kind(
        BertConfig,
        ("BertModel", "BertForMaskedLM", *(f"Bert{head}" for head in HEADS)),
        {**SIZES, **DROPOUT, "type_vocab_size": 2},
        False,
        "bert",
    ),
    "gpt2": Kind(
        GPT2Config,
        ("GPT2Model", "GPT2LMHeadModel", *(f"GPT2{head}" for head in HEADS)),
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0},
        True,
        "transformer",
    ),
    "llama": Kind(
        LlamaConfig,
        ("LlamaModel", "LlamaForCausalLM", *(f"Llama{head}" for head in HEADS)),
        {**SIZES, "num_key_value_heads": 2},
        True,
        "model",
    ),
}
KIND = KINDS[FAMILY]


def model_class(name: str) -> Any:
    """The class of Transformers, or its counterpart that patches what it builds from a config that says so."""
    cls = getattr(transformers, name)
    return cls if ATTENTION == EXACT else linear_attention_class(cls)


class ModelTester:
    """What the mixins ask of a model: its sizes, a config and inputs."""

    batch_size = 5
    seq_length = 7
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    vocab_size = 99
    pad_token_id = 0
    num_choices = 4
    is_training = True
    base_model_class = None
    causal_lm_class = None

    def __init__(self, parent: Any) -> None:
        self.parent = parent
        for name in KIND.classes:
            if name.endswith(("ForCausalLM", "LMHeadModel")):
                self.causal_lm_class = model_class(name)

    def get_config(self) -> PreTrainedConfig:
        limit = "n_positions" if FAMILY == "gpt2" else "max_position_embeddings"
        tokens = {"pad_token_id": self.pad_token_id, "bos_token_id": 97, "eos_token_id": 98}
        sizes = {"vocab_size": self.vocab_size, limit: 64}
        config = KIND.config(**KIND.settings, **sizes, **tokens)
        if ATTENTION != EXACT:
            options = small_options(ATTENTIONS.get(ATTENTION).options)
            setattr(config, CONFIG_FIELD, LinearAttentionConfig.parse(ATTENTION, None, options).to_dict())
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Any]]:
        ids = torch.randint(1, self.vocab_size - 2, (self.batch_size, self.seq_length))
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0  # one row ends in padding
        if KIND.causal:
            mask[0] = mask[0].flip(0)
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


#: A class that cannot generate must not inherit the tests of generation: the common tests check that.
MIXINS: tuple[Any, ...] = (ModelTesterMixin, GenerationTesterMixin) if KIND.causal else (ModelTesterMixin,)


class SuiteTests(*MIXINS, unittest.TestCase):
    """The common tests of models, and of generation where the source has them (an sdist has not)."""

    all_model_classes = tuple(model_class(name) for name in KIND.classes)
    base_model_class = all_model_classes[0]

    def setUp(self) -> None:
        self.model_tester = ModelTester(self)


class TrainingTests(TrainingTesterMixin, unittest.TestCase):
    """Overfitting one batch."""

    all_model_classes = tuple(model_class(name) for name in KIND.classes[1:2])
    model_tester = property(lambda self: ModelTester(self))  # type: ignore[assignment]

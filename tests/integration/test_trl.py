"""TRL's trainers on patched decoders: two steps of each, and what they save."""

import copy
from itertools import pairwise

import pytest
import torch
from datasets import Dataset

import hf_linear_attn as hla
from tests.comparing import assert_close, logits
from tests.tiny_models import LLAMA
from tests.tiny_text import TOKENS, sample_text, tiny_tokenizer

trl = pytest.importorskip("trl", reason="needs TRL, from the extra 'trl'")

PLAN = {"default": {"attention": "window", "window_size": 4, "mix_init": 0.0}, "0": "softmax"}
TOKENIZER = tiny_tokenizer(eos=True)
ROWS = [line.split() for line in sample_text(8).splitlines()]
TEXTS = Dataset.from_list([{"text": " ".join(row[: 6 + 5 * index])} for index, row in enumerate(ROWS)])
PROMPTS = Dataset.from_list([{"prompt": " ".join(row[:10])} for row in ROWS])
PAIRS = Dataset.from_list(
    [{"prompt": " ".join(r[:10]), "chosen": " ".join(r[10:20]), "rejected": " ".join(r[20:])} for r in ROWS]
)


@pytest.fixture
def exact():
    return LLAMA.build(vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)


@pytest.fixture
def model(exact):
    return hla.patch_model(copy.deepcopy(exact), PLAN)


def settings(folder, **more):
    common = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_steps": 2}
    return {"output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 2, **common, **more}


def assert_trains(trainer, folder):
    """Every parameter learns, and the checkpoint is the model."""
    model = trainer.model
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    trainer.train()
    assert [name for name, tensor in model.named_parameters() if torch.equal(tensor, before[name])] == []
    again = hla.load_pretrained(str(folder / "checkpoint-2"))
    ids = torch.randint(5, len(TOKENS), (2, 11))
    assert torch.equal(logits(again.eval(), ids), logits(model.eval(), ids))


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_supervised_fine_tuning(model, packing, tmp_path):
    arguments = trl.SFTConfig(**settings(tmp_path, packing=packing, max_length=40))
    trainer = trl.SFTTrainer(model, arguments, train_dataset=TEXTS, processing_class=TOKENIZER)
    assert_trains(trainer, tmp_path)


@pytest.mark.slow
def test_packed_documents_match_unpacked_ones(model, tmp_path):
    arguments = trl.SFTConfig(**settings(tmp_path, packing=True, max_length=40))
    trainer = trl.SFTTrainer(model, arguments, train_dataset=TEXTS, processing_class=TOKENIZER)
    batch = next(iter(trainer.get_train_dataloader()))
    ids = batch.pop("input_ids")
    bounds = [*batch["position_ids"][0].eq(0).nonzero().flatten().tolist(), ids.shape[1]]
    assert len(bounds) > 2
    packed = logits(model, ids, **{name: value for name, value in batch.items() if name != "labels"})
    for start, end in pairwise(bounds):
        assert_close(packed[:, start:end], logits(model, ids[:, start:end]))


@pytest.mark.slow
def test_distillation_from_the_exact_model(model, exact, tmp_path):
    """The student generates by itself, with its states."""
    arguments = trl.DistillationConfig(**settings(tmp_path, max_completion_length=8))
    trainer = trl.DistillationTrainer(model, exact, arguments, train_dataset=PROMPTS, processing_class=TOKENIZER)
    assert_trains(trainer, tmp_path)


@pytest.mark.slow
def test_preferences_with_a_reference_of_its_own(model, tmp_path):
    arguments = trl.DPOConfig(**settings(tmp_path))
    reference = copy.deepcopy(model)
    trainer = trl.DPOTrainer(model, reference, arguments, train_dataset=PAIRS, processing_class=TOKENIZER)
    assert_trains(trainer, tmp_path)


@pytest.mark.slow
def test_group_relative_policy_optimization(model, tmp_path):
    def reward(completions, **kwargs):
        return [float(len(completion) % 7) for completion in completions]

    arguments = trl.GRPOConfig(**settings(tmp_path, max_completion_length=8, num_generations=2))
    trainer = trl.GRPOTrainer(model, reward, arguments, train_dataset=PROMPTS, processing_class=TOKENIZER)
    assert_trains(trainer, tmp_path)


@pytest.mark.slow
def test_generation_with_paged_attention_is_refused(model, exact, tmp_path):
    arguments = trl.GRPOConfig(**settings(tmp_path, num_generations=2, use_transformers_continuous_batching=True))
    trainer = trl.GRPOTrainer(
        model, lambda completions, **kwargs: [0.0] * len(completions), arguments, PROMPTS, processing_class=TOKENIZER
    )
    with pytest.raises(NotImplementedError, match="Continuous batching"):
        trainer.train()

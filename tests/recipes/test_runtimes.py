"""The benchmark `runtimes`: graphs with ONNX Runtime's own operators for attention, and with weights in int8."""

from functools import partial

import numpy as np
import pytest
import torch

from recipes.benchmarks import runtimes, workloads

pytest.importorskip("onnxruntime", reason="pip install 'hf-linear-attn[export]'")
pytest.importorskip("transformers.exporters", reason="Transformers before 5.23 has no exporters")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 60}


@pytest.mark.slow
def test_fused_attention_in_onnx_runtime(monkeypatch, tmp_path):
    onnx = pytest.importorskip("onnx")
    monkeypatch.setitem(workloads.SHAPES, "tiny", partial(workloads.llama, **TINY))
    assert runtimes.RUNTIMES["ONNX Runtime, fused"].func.save("tiny", runtimes.EXACT, 16, str(tmp_path))
    for name in ("prefill", "decode"):
        graph = onnx.load(tmp_path / f"{name}.onnx", load_external_data=False).graph
        assert {"GroupQueryAttention", "MultiHeadAttention"} & {node.op_type for node in graph.node}
    runner = runtimes.RUNTIMES["ONNX Runtime, fused"](str(tmp_path))
    runner.read(np.full((1, 8), runtimes.TOKEN))
    for _ in range(2):
        runner.write()
        assert runner.states["logits"].shape == (1, 1, TINY["vocab_size"])
        assert np.isfinite(runner.states["logits"]).all()


@pytest.mark.slow
def test_weights_in_int8(monkeypatch, tmp_path):
    """They compute what the model does but for rounding."""
    monkeypatch.setitem(workloads.SHAPES, "tiny", partial(workloads.llama, **TINY))
    outputs = {}
    for name in ("ONNX Runtime", "ONNX Runtime, int8 weights"):
        torch.manual_seed(0)
        folder = tmp_path / name
        folder.mkdir()
        runtimes.RUNTIMES[name].func.save("tiny", "elu", 16, str(folder))
        runner = runtimes.RUNTIMES[name](str(folder))
        runner.read(np.arange(8)[None])
        runner.write()
        outputs[name] = runner.states["logits"]
    exact, rounded = outputs.values()
    assert 0 < np.abs(exact - rounded).max() < 0.1 * np.abs(exact).max()

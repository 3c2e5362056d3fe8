"""The functions of ONNX operators under ONNX Runtime, against the same calls in torch."""

import pytest
import torch

from hf_linear_attn import use_backend
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops import efficient, gated, gated_delta, kernelized, luna, windowed
from hf_linear_attn.ops.graph_nodes import DOMAIN
from hf_linear_attn.ops.onnx_functions import replace_nodes
from hf_linear_attn.ops.terms import Terms
from tests.comparing import assert_close
from tests.inputs import padding_mask, qkv
from tests.ops.test_kernelized import SCALING
from tests.ops.test_windowed import call_of
from tests.slow_cases import slow_rows
from tests.small import feature_map, mechanism

ir = pytest.importorskip("onnx_ir", reason="pip install 'hf-linear-attn[export]'")
onnxruntime = pytest.importorskip("onnxruntime")


def run_node(name, inputs, attributes, *shapes):
    """Compute a node at once, as the graph that has it alone would."""
    from onnxscript import optimizer

    arrays = [None if x is None else x.detach().numpy() for x in inputs]
    values = [
        None if x is None else ir.val(f"x{i}", ir.DataType.from_numpy(x.dtype), [None] * x.ndim)
        for i, x in enumerate(arrays)
    ]
    node = ir.node(name, values, attributes, domain=DOMAIN, num_outputs=len(shapes))
    graph_inputs = [value for value in values if value is not None]
    graph = ir.Graph(graph_inputs, node.outputs, nodes=[node], opset_imports={"": 20}, name="graph")
    for index, output in enumerate(node.outputs):
        output.name, output.dtype = f"y{index}", ir.DataType.FLOAT
    model = ir.Model(graph, ir_version=10)
    replace_nodes(model)
    optimizer.inline(model)
    del model.opset_imports[DOMAIN]
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    outputs = session.run(None, {f"x{i}": x for i, x in enumerate(arrays) if x is not None})
    for output, shape in zip(outputs, shapes, strict=True):
        assert output.shape == tuple(shape)
    return [torch.from_numpy(output) for output in outputs]


@pytest.fixture
def nodes(monkeypatch):
    """Return a function that calls another one, whose attention is computed by the nodes that it would become."""
    placing = (windowed, gated, efficient, gated_delta)

    def compute(function, *inputs):
        with monkeypatch.context() as patch, torch.no_grad(), use_backend("torch"):
            for module in (*placing, kernelized, luna):
                patch.setattr(module, "places_nodes", lambda *_: True)
            for module in placing:
                patch.setattr(module, "graph_node", run_node)
            return function(*inputs)

    return compute


def assert_same(actual, expected, mask):
    """Compare outputs and states, as `(out, state)`."""
    real = mask[:, None, :, None]
    assert_close(actual[0] * real, expected[0] * real)
    if expected[1] is not None:
        assert actual[1].keys() == expected[1].keys()
        for name, entry in actual[1].items():
            assert_close(entry, expected[1][name])


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize(
    ("name", "length", "window", "sinks", "softcap"),
    [
        ("hedgehog", 650, 40, 1, None),  # two groups of blocks
        ("favor+", 290, 33, 2, None),
        ("vq", 70, 100, 0, None),
        *slow_rows(
            ("vq", 1, 5, 3, None), ("favor+", 129, 4, 0, None), ("hedgehog", 64, 64, 4, 2.0), ("elu", 200, 64, 1, None)
        ),
    ],
)
def test_windows(nodes, name, length, window, sinks, softcap, causal):
    q, k, v = qkv(length, seed=length)
    mask = padding_mask([length, max(length - 60, 1)], length, "left" if causal else "right")
    mix = torch.randn(2, 4, length, generator=torch.Generator().manual_seed(1))
    call = call_of(feature_map(name), q, k, v, window=window, causal=causal, log_mix=mix, mask=mask, sinks=sinks)
    call.terms = Terms(softcap=softcap)
    with torch.no_grad():
        expected = windowed.windowed(call)
    assert_same(nodes(windowed.windowed, call), expected, mask)


@pytest.mark.parametrize(
    "name", ["favor+", "gla", "luna", "efficient", "gated-delta", *slow_rows(("elu",), ("favor",), ("rfa",))]
)
def test_causal_sums_over_chunks_and_from_a_state(nodes, name):
    built, mask = mechanism(name, causal=True), padding_mask([150, 97], 150, "left")
    tensors = qkv(150)
    before = None
    for part in (slice(0, 70), slice(70, 150)):
        inputs = AttentionInputs(
            *(x[:, :, part] for x in tensors), SCALING, True, mask[:, part], before, return_state=True
        )
        with torch.no_grad(), use_backend("torch"):
            expected = built(inputs)
        assert_same(nodes(built, inputs), expected, mask[:, part])
        before = expected[1]

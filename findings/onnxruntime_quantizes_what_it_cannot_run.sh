#!/usr/bin/env bash
# quantize_dynamic(per_channel=True) takes weights with a batch dimension, and writes a graph that cannot run.
#
# onnx 1.23.2, onnxruntime 1.32.0. A MatMul with a weight [3, 8, 16], one matrix a head, is quantized with a scale for
# each of the 16 channels; the graph is written without a warning and loads, and its first run raises "b zero point is
# not valid". With one scale a tensor the same graph runs, and so does a weight [8, 16] with a scale a channel, whose
# error is smaller. An Identity between the weight and its MatMul hides the weight, which then stays in float32.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

onnxruntime.set_default_logger_severity(4)
generator = numpy.random.default_rng(0)
x = generator.standard_normal((3, 5, 8)).astype(numpy.float32)


def save(shape, hidden):
    weight = numpy_helper.from_array(generator.standard_normal(shape).astype(numpy.float32), "w")
    nodes = [helper.make_node("Identity", ["w"], ["seen"])] if hidden else []
    nodes.append(helper.make_node("MatMul", ["x", "seen" if hidden else "w"], ["y"]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 5, size]) for name, size in (("x", 8), ("y", 16))]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, "float.onnx")


def run(path):
    return onnxruntime.InferenceSession(path).run(None, {"x": x})[0]


seen = {}
for shape, per_channel, hidden in (((8, 16), True, False), ((3, 8, 16), False, False), ((3, 8, 16), True, False), ((3, 8, 16), True, True)):
    save(shape, hidden)
    quantize_dynamic("float.onnx", "int8.onnx", per_channel=per_channel)
    onnxruntime.InferenceSession("int8.onnx")
    expected = run("float.onnx")
    try:
        result = f"error {numpy.abs(run('int8.onnx') - expected).max() / numpy.abs(expected).max():.4f}"
    except Exception as error:
        assert "b zero point is not valid" in str(error), error
        result = "b zero point is not valid"
    print(f"weight {shape}, per_channel={per_channel}, hidden={hidden}: {result}")
    seen[shape, per_channel, hidden] = result
assert [key for key, result in seen.items() if "error" not in result] == [((3, 8, 16), True, False)], "This has changed."
PYTHON

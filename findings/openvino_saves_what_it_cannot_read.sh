#!/usr/bin/env bash
# A stateful model whose state is written and never read compiles, runs and is saved, and the file cannot be read.
#
# openvino 2026.4.1, with the transformation that exporters of decoders use to turn pairs of inputs and outputs into
# variables. Where the input of a pair has no consumer, the model keeps the variable and its Assign, runs, and is saved
# without a warning; read_model of the file raises "map::at", which names neither variable nor node. With an input that
# is read the same model is read again, and so is it where the pair is left out. A layer that only writes its state,
# such as one that is rebuilt from the whole prompt at each call, is enough.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet openvino==2026.4.1 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import numpy
import openvino
from openvino import opset13
from openvino._offline_transformations import apply_make_stateful_transformation


def build(is_read):
    x = opset13.parameter([1, 4], numpy.float32, name="x")
    state = opset13.parameter([1, 4], numpy.float32, name="state")
    result = opset13.add(x, state) if is_read else opset13.multiply(x, opset13.constant(numpy.float32(2)))
    new = opset13.add(x, opset13.constant(numpy.float32(1)))
    for node, name in ((x, "x"), (state, "state"), (result, "y"), (new, "new_state")):
        node.output(0).set_names({name})
    return openvino.Model([opset13.result(result), opset13.result(new)], [x, state], "model")


core = openvino.Core()
seen = {}
for is_read, is_stateful in ((True, True), (False, True), (False, False)):
    model = build(is_read)
    if is_stateful:
        apply_make_stateful_transformation(model, {"state": "new_state"})
    assert len(model.get_variables()) == is_stateful
    request = core.compile_model(model, "CPU").create_infer_request()
    inputs = {"x": numpy.ones((1, 4), numpy.float32)}
    inputs |= {} if is_stateful else {"state": numpy.zeros((1, 4), numpy.float32)}
    output = request.infer(inputs)["y"][0, 0]
    openvino.save_model(model, "model.xml")
    try:
        core.read_model("model.xml")
        result = "read again"
    except RuntimeError as error:
        assert "map::at" in str(error), error
        result = "map::at"
    print(f"state is read: {is_read}, a variable: {is_stateful}: runs in memory (y = {output:.0f}), {result}")
    seen[is_read, is_stateful] = result
assert [key for key, result in seen.items() if result != "read again"] == [(False, True)], "This has changed."
PYTHON

"""The verb `export`: patched checkpoints as graphs of ONNX and OpenVINO, and as programs of torch.export."""

import math
import sys
from functools import partial

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2ForSequenceClassification

import hf_linear_attn as hla
from hf_linear_attn.cli import main
from hf_linear_attn.exporting import export_model, padded_inputs
from hf_linear_attn.integration.cache import state_layer
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.integration.positions import length_limit
from hf_linear_attn.mechanisms.window import WindowAttention
from tests.comparing import assert_close, logits, relative_error
from tests.inputs import padded_batch, token_ids
from tests.slow_cases import long, slow_rows
from tests.small import on_the_grid, patched
from tests.tiny_models import BERT, Family, save_checkpoint, tiny_model

pytest.importorskip("onnxruntime", reason="pip install 'hf-linear-attn[export]'")
base = pytest.importorskip("transformers.exporters.base", reason="Transformers before 5.23 has no exporters")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

#: Precision of OpenVINO, which is bfloat16 by default where the processor has it.
OPENVINO = {"INFERENCE_PRECISION_HINT": "f32"}

ONE_BERT = Family("bert", False, (), BERT.model_class, num_layers=1)
ONE_LLAMA = Family("llama", True, (), num_layers=1)


@pytest.fixture
def checkpoint(tmp_path):
    def make(architecture, name, **config):
        exact = save_checkpoint(tmp_path / "exact", architecture, **{"num_hidden_layers": 1, **config})
        options = ["--options.window_size", "4", "--options.mix_init", "0"] if name == "window" else []
        assert main(["patch", str(exact), str(tmp_path / "patched"), "--attention", name, *options]) == 0
        return tmp_path / "patched"

    return make


@pytest.mark.parametrize(
    ("name", "format"),
    [("hedgehog", "onnx"), *slow_rows(("hedgehog", "openvino")), *long(("window", "onnx"), ("window", "openvino"))],
)
def test_graph_of_an_encoder(checkpoint, name, format, tmp_path, capsys):
    folder, out = checkpoint("bert", name), tmp_path / "out"
    settings = {}
    if format == "openvino":
        pytest.importorskip("openvino")
        settings = {"config": OPENVINO}
    assert main(["export", str(folder), str(out), "--format", format]) == 0
    assert "outputs differ from the model's by" in capsys.readouterr().out
    graph = {"onnx": "model.onnx", "openvino": "openvino_model.xml"}[format]
    assert {graph, "export.json", "config.json", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    model, exported = (
        hla.load_pretrained(str(folder)),
        base.ExportedModel.from_pretrained(out, device="cpu", **settings),
    )
    for lengths, padding in (((2,), "left"), ((96, 11, 50), "right"), ((64, 63), "left")):
        batch = padded_batch([token_ids(1, n, seed=n)[0] for n in lengths], padding)
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        real = batch["attention_mask"].bool()
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
        assert_close(exported(**inputs).last_hidden_state[real], expected[real])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "name", "format"),
    [
        ("gpt2", "elu", "torch"),
        ("llama", "window", "onnx"),
        *long(("gpt2", "elu", "onnx"), ("llama", "window", "torch")),
    ],
)
def test_a_decoder_continues_from_its_state(checkpoint, architecture, name, format, tmp_path, caplog):
    # torch 2.13 reports the class of the example inputs by a warning whose arguments are missing.
    caplog.set_level("ERROR", logger="torch._export.serde.serialize")
    folder, out = checkpoint(architecture, name, max_position_embeddings=256), tmp_path / "out"
    assert main(["export", str(folder), str(out), "--format", format]) == 0
    model = hla.load_pretrained(str(folder))
    loaded = base.ExportedModel.from_pretrained(out, trust_remote_code=format == "torch")  # a .pt2 is pickled
    tokens, cache = token_ids(2, 115), DynamicCache(config=model.config)
    state_layer(cache, 0)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    expected = logits(model, tokens, attention_mask=mask, position_ids=positions)
    start = 0
    for stop in (14, *range(15, 116)):
        inputs = {"input_ids": tokens[:, start:stop], "position_ids": positions[:, start:stop]}
        runner = loaded.runners["prefill" if start == 0 else "decode"]
        output = runner(**inputs, attention_mask=mask[:, :stop], **cache_argument(model, cache))
        cache, start = output_cache(output), stop
        assert_close(output.logits[:, -1], expected[:, stop - 1])
    assert int(cache.get_seq_length()) == 115


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hedgehog", {}),
        *long(
            ("window", {"exact_heads": [1]}),
            ("window", {"exact_heads": [1], "cache_dtype": "int8"}),
            ("favor+", {}),
            ("gla", {}),
        ),
    ],
    ids=str,
)
def test_openvino_generates_as_the_model_does(name, options, tmp_path):
    openvino = pytest.importorskip("openvino")
    model = patched(name, ONE_LLAMA, **options)
    export_model(model, "openvino")[0].save_pretrained(tmp_path)
    load = partial(openvino.Core().compile_model, device_name="CPU", config=OPENVINO)
    prefill, decode = (load(tmp_path / f"openvino_{graph}.xml") for graph in ("prefill", "decode"))
    request = decode.create_infer_request()
    for rows, prompt, new in ((1, 7, 20), (3, 21, 9), (1, 1, 9), (2, 70, 3)):
        ids = token_ids(rows, prompt)
        mask = torch.ones_like(ids)
        mask[1:, :4] = 0
        length = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        expected = model.generate(ids, attention_mask=mask, do_sample=False, **length)
        tokens, mask = ids.numpy(), mask.numpy()
        positions = (mask.cumsum(axis=1) - 1).clip(0)
        read = prefill({"input_ids": tokens, "attention_mask": mask, "position_ids": positions})
        for state in request.query_state():
            state.state = openvino.Tensor(read[state.name])
        written, row = [], np.arange(rows, dtype=np.int32)
        for _ in range(new):
            written.append(read["logits"][:, -1:].argmax(axis=-1))
            mask, positions = np.pad(mask, ((0, 0), (0, 1)), constant_values=1), positions[:, -1:] + 1
            token = {"input_ids": written[-1], "attention_mask": mask, "position_ids": positions}
            read = request.infer({**token, "beam_idx": row})
        assert np.concatenate(written, axis=1).tolist() == expected[:, prompt:].tolist()


@pytest.mark.parametrize(
    ("architecture", "dtype", "format"),
    [("llama", "float16", "torch"), ("gpt2", "bfloat16", "onnx"), ("bert", "bfloat16", "onnx")],
)
def test_precisions_that_a_graph_cannot_have_are_refused_before_it_is_traced(architecture, dtype, format):
    model = hla.patch_model(tiny_model(architecture), "elu").to(getattr(torch, dtype))
    with pytest.raises(NotImplementedError, match=rf"cannot be exported in {dtype}: .* dtype='float32'"):
        export_model(model, format)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cache_dtype", "format"),
    [("hedgehog", "auto", "torch"), ("window", "int8", "onnx"), *long(("window", "int8", "torch"))],
)
def test_a_decoder_with_exact_heads_goes_on_with_any_number_of_rows(name, cache_dtype, format):
    """And from a prompt of any length, one token included."""
    model = patched(name, ONE_LLAMA, exact_heads=[1], cache_dtype=cache_dtype)
    model = model if cache_dtype == "auto" else on_the_grid(model)
    exported, _ = export_model(model, format)
    for lengths, prompt in (((9,), 6), ((7, 9, 3), 6), ((9,), 1), ((9, 9), 1)):
        batch = padded_batch([token_ids(1, n, seed=n)[0] for n in lengths], "left")
        with torch.no_grad():
            expected = model(**batch, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        for index in range(len(cache.layers)):
            state_layer(cache, index)
        for start, stop in ((0, prompt), *((start, start + 1) for start in range(prompt, 9))):
            inputs = {name: batch[name][:, start:stop] for name in ("input_ids", "position_ids")}
            runner = exported.runners["prefill" if start == 0 else "decode"]
            output = runner(**inputs, attention_mask=batch["attention_mask"][:, :stop], **cache_argument(model, cache))
            cache = output_cache(output)
            real = batch["attention_mask"][:, stop - 1].bool()
            assert_close(output.logits[real, -1], expected[real, stop - 1])


@pytest.mark.slow
def test_layers_of_one_kind_are_traced_once(monkeypatch):
    """Also the parts of a mixture; a layer of another kind is traced by itself."""
    traced = []
    forward = WindowAttention.forward

    def counted(self, inputs):
        traced.extend([self] if torch.compiler.is_exporting() else [])
        return forward(self, inputs)

    monkeypatch.setattr(WindowAttention, "forward", counted)
    options = {"attention": "window", "window_size": 4, "mix_init": 0.0, "exact_heads": [1]}
    model = tiny_model("llama", num_hidden_layers=4)
    hla.patch_model(model, {"default": options, "1": {**options, "window_size": 6}})
    exported, difference = export_model(model, "onnx")
    assert len(traced) == 2 * len(exported.components)
    assert difference <= 1e-4
    for component in exported.components.values():
        assert not component.program.functions
        assert {node.domain for node in component.program.graph} <= {""}
    # By their names a program passes the states of one graph to the next.
    graphs = {name: component.program.graph for name, component in exported.components.items()}
    read = [value.name.removeprefix("input.") for value in graphs["decode"].inputs]
    states = [name for name in read if name.startswith("cache.layers.")]
    assert len(states) > 4 * len(model.model.layers)
    for graph in graphs.values():
        assert [value.name.removeprefix("output.") for value in graph.outputs] == ["logits", *states]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [(ONE_BERT, "window"), (ONE_LLAMA, "hedgehog")])
def test_onnx_runtime_quantizes_the_linear_layers_only(family, name, tmp_path):
    onnx = pytest.importorskip("onnx")
    quantization = pytest.importorskip("onnxruntime.quantization")
    model = patched(name, family)
    exported, _ = export_model(model, "onnx")
    exported.save_pretrained(tmp_path)
    for path in tmp_path.glob("*.onnx"):
        # Of processors without VNNI instructions products of eight bits overflow.
        quantization.quantize_dynamic(path, path, per_channel=True, reduce_range=True)
        graph = onnx.load(path).graph
        ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
        weights = [node.input[1] for node in graph.node if node.op_type == "MatMulInteger"]
        assert len(weights) >= 7
        assert {ranks[weight] for weight in weights} == {2}
    runner = base.ExportedModel.from_pretrained(tmp_path, device="cpu").runners
    inputs, empty = padded_inputs(model, (40, 33)), {}
    if family.causal:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        state_layer(cache, 0)
        empty = cache_argument(model, cache)
    with torch.no_grad():
        expected = model(**inputs)[0]
    actual = runner["prefill" if family.causal else "model"](**inputs, **empty)[0]
    real = inputs["attention_mask"].bool()
    assert relative_error(actual[real], expected[real]) <= 0.1


@pytest.mark.parametrize("package", ["onnxscript", "transformers.exporters"])
def test_a_missing_package_is_named(checkpoint, package, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert package in error
    assert "hf-linear-attn[export]" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "options", "limit"),
    [
        ("bert", {"attention": "linformer", "num_slots": 8, "max_length": 40}, 40),
        ("bert", {"attention": {"default": "hedgehog", "1": {"attention": "linformer", "max_length": 70}}}, 70),
        ("roberta", {"attention": "hedgehog"}, 94),  # two of its 96 positions are for padding
        *slow_rows(("bert", {"attention": "linformer", "exact_heads": [1], "max_length": 60}, 60)),
        *long(
            ("bert", {"attention": "hedgehog"}, 96),
            ("roberta", {"attention": "linformer", "num_slots": 8}, 94),
        ),
    ],
    ids=str,
)
def test_the_smallest_limit_bounds_the_length(architecture, options, limit):
    model = hla.patch_model(tiny_model(architecture), **options)
    assert length_limit(model) == limit
    exported, difference = export_model(model, "torch")
    assert difference <= 1e-4
    for length in (2, limit - 1, limit):
        ids = token_ids(2, length) % 50 + 5
        inputs = {**padded_inputs(model, (length, 2)), "input_ids": ids}
        with torch.no_grad():
            assert_close(exported(**inputs)[0][0], model(**inputs)[0][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_outputs_that_are_no_numbers_are_an_error(dtype, wrong, monkeypatch):
    model = hla.patch_model(tiny_model("bert"), "hedgehog").to(dtype)

    class Exported:
        export_format = "dynamo"

        def __call__(self, **inputs):
            with torch.no_grad():
                return (model(**inputs)[0] * wrong,)

    monkeypatch.setattr("transformers.exporters.exporter_dynamo.DynamoExporter.export", lambda *_: Exported())
    with pytest.raises(RuntimeError, match=f"differ from the model's by {wrong}"):
        export_model(model, "torch")


@pytest.mark.slow
def test_a_classifier_reads_the_last_token_that_is_no_padding():
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=60, n_positions=96, pad_token_id=1, num_labels=3)
    torch.manual_seed(0)
    model = hla.patch_model(GPT2ForSequenceClassification(config).eval(), "hedgehog")
    assert export_model(model, "torch")[1] <= 1e-4


@pytest.mark.slow
def test_what_cannot_be_exported(checkpoint, tmp_path, capsys):
    out = tmp_path / "out"
    folder = checkpoint("gpt2", "gated-delta")
    assert main(["export", str(folder), str(out), "--format", "torch"]) == 1
    assert "cannot be exported with a free length" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "exact"), str(out)]) == 1
    assert "has no linear attention" in capsys.readouterr().err
    assert not out.exists()

"""The verb `export`: patched checkpoints as ONNX graphs and as programs of torch.export."""

import math
import sys

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
from tests.comparing import assert_close, logits
from tests.inputs import padded_batch, token_ids
from tests.slow_cases import long, slow_rows
from tests.small import patched
from tests.tiny_models import LLAMA, save_checkpoint, tiny_model

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'hf-linear-attn[export]'")
base = pytest.importorskip("transformers.exporters.base", reason="Transformers before 5.23 has no exporters")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def checkpoint(tmp_path):
    def make(architecture, name, **config):
        exact = save_checkpoint(tmp_path / "exact", architecture, **{"num_hidden_layers": 1, **config})
        options = ["--options.window_size", "4", "--options.mix_init", "0"] if name == "window" else []
        assert main(["patch", str(exact), str(tmp_path / "patched"), "--attention", name, *options]) == 0
        return tmp_path / "patched"

    return make


@pytest.mark.parametrize("name", ["hedgehog", *long("window")])
def test_onnx_graph_of_an_encoder(checkpoint, name, tmp_path, capsys):
    folder, out = checkpoint("bert", name), tmp_path / "out"
    assert main(["export", str(folder), str(out)]) == 0
    assert "outputs differ from the model's by" in capsys.readouterr().out
    assert {"model.onnx", "export.json", "config.json", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    model, session = hla.load_pretrained(str(folder)), onnxruntime.InferenceSession(out / "model.onnx")
    for lengths, padding in (((2,), "left"), ((96, 11, 50), "right"), ((64, 63), "left")):
        batch = padded_batch([token_ids(1, n, seed=n)[0] for n in lengths], padding)
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        real = batch["attention_mask"].bool()
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
        (actual, *_) = session.run(None, {key: value.numpy() for key, value in inputs.items()})
        assert_close(torch.from_numpy(np.array(actual))[real], expected[real])


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
def test_onnx_refuses_a_state_in_int8(tmp_path, capsys):
    patched("hedgehog", LLAMA, exact_heads=[1], cache_dtype="int8").save_pretrained(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out"), "--format", "onnx"]) == 1
    assert "cache_dtype='int8' cannot be exported to ONNX" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("architecture", "dtype", "format"),
    [("llama", "float16", "torch"), ("gpt2", "bfloat16", "onnx"), ("bert", "bfloat16", "onnx")],
)
def test_precisions_that_a_graph_cannot_have_are_refused_before_it_is_traced(architecture, dtype, format):
    model = hla.patch_model(tiny_model(architecture), "elu").to(getattr(torch, dtype))
    with pytest.raises(NotImplementedError, match=rf"cannot be exported in {dtype}: .* dtype='float32'"):
        export_model(model, format)


@pytest.mark.slow
def test_a_decoder_with_exact_heads_goes_on_with_any_number_of_rows():
    """And from a prompt of any length, one token included."""
    model = patched("hedgehog", LLAMA, exact_heads=[1])
    exported, _ = export_model(model, "torch")
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

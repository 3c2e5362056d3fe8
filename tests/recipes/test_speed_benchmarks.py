"""The benchmarks of speed and memory on tiny shapes: their rows, limits and counts. No timing is asserted."""

from __future__ import annotations

from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from recipes.benchmarks import attention, gpu, workloads
from recipes.benchmarks.workloads import Inputs
from tests.cases import every_mechanism
from tests.comparing import relative_error
from tests.recipes.benchmark_runs import SMALL, rows_of
from tests.tiny_models import save_checkpoint

QUICK: dict[str, Any] = {**SMALL, "seconds": 0.001, "dtypes": ("float32",), "backend": ("torch",)}


def small_inputs(length: int, dtype: str = "float32") -> Inputs:
    return Inputs.make(1, 2, length, 8, dtype, "cpu", 0)


@pytest.mark.slow
def test_attention_by_itself(tmp_path: Path) -> None:
    options = {**QUICK, "attention": ("elu", "linformer"), "lengths": (16, 24), "peers": False}
    rows = rows_of("attention", tmp_path / "out", **options)
    assert {(row["attention"], row["backend"], row["direction"], row["pass"], row["length"]) for row in rows} == {
        (name, backend, direction, done, length)
        for direction in ("bidirectional", "causal")
        for name, backend in (("sdpa", ""), ("elu", "torch"), *((("linformer", ""),) * (direction != "causal")))
        for done in ("forward", "forward+backward")
        for length in (16, 24)
    }
    assert {row["attention"]: row.get("limit") for row in rows} == {
        "sdpa": None,
        "elu": "products",
        "linformer": "operations",
    }
    for row in rows:
        assert row["seconds"]["p20"] <= row["seconds"]["median"] <= row["seconds"]["p80"]
        assert row["speedup"]["rounds"] == row["seconds"]["rounds"] >= 3


def test_what_takes_too_long_is_left_out(tmp_path: Path) -> None:
    options = {**QUICK, "attention": ("elu",), "directions": ("causal",), "passes": ("forward",), "peers": False}
    rows = rows_of("attention", tmp_path / "out", **options, lengths=(16, 64), longest=1e-9)
    assert {row["length"] for row in rows} == {16}


def test_decoding_steps(tmp_path: Path) -> None:
    names = ("elu", "linformer-causal", "linformer")
    rows = rows_of("decoding", tmp_path / "out", **QUICK, attention=names, batches=(2,), contexts=(16, 24))
    assert {(row["attention"], row["context"]) for row in rows} == {
        (name, context) for name in ("sdpa", "elu", "linformer-causal") for context in (16, 24)
    }
    sizes = {(row["attention"], row["context"]): row["bytes"] for row in rows}
    assert sizes["sdpa", 24] == 2 * 2 * 2 * 24 * 8 * 4
    assert sizes["elu", 16] == sizes["elu", 24] == 2 * 2 * (8 * 8 + 8) * 4
    assert all(("over_floor" in row) is (row["attention"] == "elu") for row in rows)


@pytest.fixture
def tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tiny_models import tiny_model

    shapes = {
        "encoder": lambda longest: tiny_model("bert", max_position_embeddings=max(96, longest)),
        "decoder": lambda longest: tiny_model("gpt2", n_positions=longest),
    }
    monkeypatch.setattr(workloads, "SHAPES", shapes)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_shapes")
def test_whole_models(tmp_path: Path) -> None:
    mixture = "window of 384, 20 % of the heads exact"
    options: dict[str, Any] = {"attention": ("elu", "linformer", mixture), "shapes": ("encoder", "decoder")}
    options |= {"lengths": (16, 32), "batches": (1, 2), "dtypes": ("float32",), "seconds": 0.001}
    rows = rows_of("models", tmp_path / "out", **options)
    assert {(row["model"], row["pass"], row["attention"]) for row in rows} == {
        *(("encoder", "forward", name) for name in ("sdpa", "without attention", "elu", "linformer", mixture)),
        *(("decoder", "forward", name) for name in ("sdpa", "without attention", "elu", mixture)),
        *(("decoder", "decoding", name) for name in ("sdpa", "elu", mixture)),
    }
    assert {row["batch"] for row in rows} == {1, 2}
    assert all(("bytes" in row) is (row["pass"] == "decoding") for row in rows)


@pytest.mark.usefixtures("tiny_shapes")
def test_whole_models_beyond_the_longest_input_of_the_exact_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"attention": ("window",), "shapes": ("encoder",), "lengths": (16, 32), "seconds": 0.001}
    options |= {"dtypes": ("float32",), "longest_exact": 16, "memory": True}
    rows = rows_of("models", tmp_path / "out", **options)
    assert [row["attention"] for row in rows if row["length"] == 16] == ["sdpa", "without attention", "window"]
    assert [row["attention"] for row in rows if row["length"] == 32] == ["without attention", "window"]
    assert all(row["bytes"] >= 0 for row in rows)
    assert next(row["speedup"]["median"] for row in rows[3:]) == 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_shapes")
def test_what_compilation_gains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    options: dict[str, Any] = {"attention": ("sdpa", "hedgehog"), "shapes": ("encoder", "decoder"), "rounds": 2}
    rows = rows_of("compiled", tmp_path / "out", **options, dtypes=("float32",), length=16, tokens=4)
    works = [(row["model"], row["work"], row["attention"]) for row in rows[::2]]
    assert works == [("encoder", "forward", "sdpa"), ("decoder", "forward", "sdpa"), ("decoder", "token", "sdpa")]
    assert all(row["speedup"]["rounds"] == row["compiled"]["rounds"] == 2 for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_shapes")
def test_a_step_of_attention_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randint", lambda low, high, size: torch.ones(size, dtype=torch.long))
    options: dict[str, Any] = {"shapes": ("encoder", "decoder"), "lengths": (16,), "seconds": 0.001}
    rows = rows_of("transfer-cost", tmp_path / "out", **options, attention=("hedgehog", "linformer"))
    expected = [("encoder", "hedgehog"), ("encoder", "linformer"), ("decoder", "hedgehog")]
    assert [(row["model"], row["attention"]) for row in rows] == expected
    assert all(row["forward_passes"]["rounds"] >= 3 for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_shapes")
def test_all_about_a_gpu_in_small_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randint", lambda low, high, size: torch.ones(size, dtype=torch.long))
    monkeypatch.setattr(gpu, "TESTED_TOKENS", 90)
    names, few = ("window", "elu"), {"lengths": (16, 24), "contexts": (16,), "tokens": 24, "seconds": 0.001}
    options = {**SMALL, **few, "mechanisms": names, "dtypes": ("float32",), "model": "decoder", "device": "cpu"}
    rows = rows_of("gpu", tmp_path / "out", **options)
    parts = {part: [row for row in rows if row["part"] == part] for part in ("kernels", "conversion", "attention")}
    assert not [row for row in rows if "failure" in row]
    assert {(row["attention"], row["direction"]) for row in parts["kernels"]} == {
        (name, direction) for name in names for direction in ("causal", "bidirectional")
    }
    for row in parts["kernels"]:
        assert row["backends"] in ("native", "torch")
        errors = [row[key] for key in row if key.endswith("_error")]
        assert len(errors) == 2 + (row["direction"] == "causal")
        assert all(error < 1e-4 for error in errors)
    assert [row["attention"] for row in parts["conversion"]] == ["window"]
    copied = next(row["bytes_per_second"] for row in rows if row["part"] == "memory")
    for row in parts["attention"]:
        moved = {"forward": 4, "forward+backward": 11}[row["pass"]] * 2 * row["length"] * 8 * 4
        assert row["share_of_limit"] == pytest.approx(moved / copied / row["seconds"]["median"])
    assert {row["attention"] for row in rows if row["part"] == "decoding"} == {"sdpa", *names}


def test_a_part_that_fails_or_comes_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(gpu, "_compare", broken)
    monkeypatch.setattr(gpu, "transfer_cost", lambda *_: iter(()))
    monkeypatch.setattr(gpu, "attention", lambda *_, **__: iter(()))
    monkeypatch.setattr(gpu, "decoding", lambda *_, **__: iter(()))
    options: dict[str, Any] = {**SMALL, "mechanisms": ("elu",), "seconds": 0.001, "device": "cpu"}
    rows = rows_of("gpu", tmp_path / "out", **options)
    assert [row.get("failure") for row in rows] == [None, *["RuntimeError: an illegal memory access"] * 4]
    assert [row["part"] for row in rows_of("gpu", tmp_path / "late", **options, minutes=-1.0)] == ["memory"]


@pytest.mark.slow
def test_kernels_are_compiled_by_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = attention.Setting(True, "float32", True, 2, 2, 8, 0, "cpu")
    seen: list[Any] = []
    monkeypatch.setattr(futures.Future, "exception", lambda self, timeout=None: seen.append(self.result()))
    assert gpu._compile([("elu", setting)])[0]["seconds"] > 0
    assert seen[0][0]["output_error"] < 1e-4


@pytest.mark.long
@pytest.mark.usefixtures("tiny_shapes")
@pytest.mark.parametrize(
    ("runtime", "package"),
    [("PyTorch, bfloat16", "torch"), ("ONNX Runtime", "onnxruntime"), ("OpenVINO", "openvino")],
)
def test_models_under_several_runtimes(runtime: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"needs {package}, from the extra 'export' or 'openvino'")
    options: dict[str, Any] = {"shapes": ("encoder", "decoder"), "attention": ("exact", "elu"), "lengths": (16, 32)}
    rows = rows_of("runtimes", tmp_path / "out", runtime=(runtime,), **options, rounds=1)
    assert [(row["model"], row["attention"], row["length"]) for row in rows] == [
        (model, name, length) for model in ("encoder", "decoder") for name in ("exact", "elu") for length in (16, 32)
    ]
    assert all(row["seconds"] > 0 and row["megabytes"] > 100 for row in rows)
    assert all(("token_seconds" in row) is (row["model"] == "decoder") for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of the resident set takes Linux")
def test_memory_of_attention(tmp_path: Path) -> None:
    options: dict[str, Any] = {"heads": 4, "head_dim": 32, "backend": ("torch",), "directions": ("causal",)}
    rows = rows_of("memory", tmp_path / "out", **options, attention=("elu",), lengths=(2048,), passes=("forward",))
    peaks = {row["attention"]: row["bytes"] for row in rows}
    weights = 4 * 2048 * 2048 * 4
    assert peaks["eager"] > 1.5 * weights
    assert peaks["elu"] < 0.5 * weights
    assert set(peaks) == {"sdpa", "eager", "elu"}


def test_eager_attention_beyond_the_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "free_memory", lambda device: 10.1 * 4 * 2 * 64**2)
    setting = attention.Setting(True, "float32", True, batch=1, heads=2, head_dim=8, seed=0)
    assert attention._fits(setting, 64)
    assert not attention._fits(setting, 65)


# --------------------------------------------------------------------------------------------------------------------
# Parts


@every_mechanism(causal=False)
def test_bidirectional_mechanisms_build(name: str) -> None:
    _builds(name, False)


@every_mechanism(causal=True)
def test_causal_mechanisms_build(name: str) -> None:
    _builds(name, True)


def _builds(name: str, causal: bool) -> None:
    module = workloads.build(name, heads=2, head_dim=8, longest=192, causal=causal, seed=0)
    gradients: Any = small_inputs(192).call(workloads.attend(module, causal), True, module)()
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)


def test_supported_backends() -> None:
    elu = workloads.build("elu", heads=2, head_dim=8, longest=16, causal=False, seed=0, dtype=torch.float64)
    call = small_inputs(16, "float64").call(workloads.attend(elu, False), False)
    assert workloads.backends_of(call, ("native", "torch")) == ["torch"]
    linformer = workloads.build("linformer", heads=2, head_dim=8, longest=16, causal=False, seed=0)
    assert workloads.backends_of(small_inputs(16).call(workloads.attend(linformer, False), False)) == [""]


@pytest.mark.parametrize("causal", [False, True])
def test_eager_is_exact_attention(causal: bool) -> None:
    inputs = small_inputs(16, "float64")
    exact: Any = inputs.call(workloads.sdpa(causal), False)()
    assert relative_error(workloads.eager(causal)(inputs.query, inputs.key, inputs.value), exact) < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_products_count_as_stated(causal: bool) -> None:
    key = value = torch.zeros(1, 2, 256, 8)
    features, chunk = 24, attention.CHUNK
    expected = 2 * 256 * (2 * chunk * (features + 8) + 4 * features * 8 if causal else 4 * features * 8)
    with FlopCounterMode(display=False) as counter:
        attention.products(key, value, features, causal)()
    assert counter.get_total_flops() == expected
    call, flops = attention.reference_product(key, value)
    with FlopCounterMode(display=False) as counter:
        call()
    assert counter.get_total_flops() == flops == 2 * 2 * 256 * 8 * 8


@pytest.mark.parametrize("name", attention.PEERS)
def test_peers_run_where_they_are_installed(name: str) -> None:
    setting = attention.Setting(True, "float32", False, batch=1, heads=2, head_dim=8, seed=0)
    if (name, "") not in setting.supported((), None, peers=True):
        pytest.skip(f"{name.partition(':')[0]} is not installed, or does not run on a CPU")
    out: Any = setting.call((name, ""), 64)()
    assert out.shape == setting.inputs(64).query.shape


@pytest.mark.slow
def test_requests_of_all_kinds_are_neither_lost_nor_wrong(tmp_path: Path) -> None:
    (row,) = rows_of("serving-endurance", tmp_path / "out", requests=24, clients=4, longest=200)
    assert (row["lost"], row["wrong"], row["rows_left"], row["state_bytes_left"]) == (0, 0, 0, 0)
    assert sum(row["kinds"].values()) == 24
    assert row["prefix_hits"] > 0


def test_the_profile_of_serving_has_the_parts_of_answers(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    save_checkpoint(tmp_path / "tiny", "llama", AutoModelForCausalLM)
    (tmp_path / "plan.json").write_text('{"default": {"attention": "window", "exact_heads": [1]}}', encoding="utf-8")
    options = {"model": str(tmp_path / "tiny"), "plan": str(tmp_path / "plan.json"), "context": 8, "rows": (1, 2)}
    rows = rows_of("serving-profile", tmp_path / "out", **options, steps=1)
    assert [(row["server"], row["tokens"]) for row in rows] == [("exact", 8), ("converted", 8)]
    assert all(row[f"{part}_cpu_seconds"] > 0 for row in rows for part in ("prompt", "step_of_1", "step_of_2"))

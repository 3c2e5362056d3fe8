"""The benchmark: small runs, taken up again and compared; its timing, limits, tables. No timing is asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_linear_attn.study.records import RECORDS_FILE, Records
from recipes.benchmarks import limits, peers, workloads
from recipes.benchmarks.__main__ import main
from recipes.benchmarks.compare import compare, load_report
from recipes.benchmarks.options import BenchmarkOptions
from recipes.benchmarks.tables import times
from recipes.benchmarks.timing import InContext, ratio, sample_interleaved
from recipes.benchmarks.workloads import Inputs
from tests.cases import every_mechanism
from tests.comparing import relative_error
from tests.recipes.benchmark_runs import run


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    folder = tmp_path_factory.mktemp("benchmark") / "out"
    report, screen, code = run(folder, section=("ops",), backend=("torch",))
    assert code == 0
    return report, screen, folder


# --------------------------------------------------------------------------------------------------------------------
# Attention by itself


def test_ops_rows(ops: tuple[dict[str, Any], str, Path]) -> None:
    report, screen, folder = ops
    assert json.loads((folder / "benchmark.json").read_text(encoding="utf-8")) == report
    rows = report["sections"]["ops"]
    measured = {(row["name"], row["direction"], row["pass"], row["length"]) for row in rows}
    expected = {
        (name, direction, what, length)
        for direction in ("bidirectional", "causal")
        for name in ("sdpa", "elu [torch]", *(["linformer"] if direction == "bidirectional" else []))
        for what in ("forward", "forward+backward")
        for length in (16, 24)
    }
    assert measured == expected
    for row in rows:
        assert row["seconds"]["p20"] <= row["seconds"]["median"] <= row["seconds"]["p80"]
        assert row["speedup"]["median"] > 0
        assert ("over_limit" in row) is (row["name"] != "sdpa")
    limit = {row["name"]: row.get("limit") for row in rows}
    assert limit == {"sdpa": None, "elu [torch]": "products", "linformer": "operations"}
    assert "Speedup over sdpa: causal, float32, forward + backward (1×2×8)" in screen
    assert "| elu [torch] |" in (folder / "benchmark.md").read_text(encoding="utf-8")
    assert (folder / "benchmark.csv").read_text(encoding="utf-8").startswith("id,")


def test_what_is_known_is_not_measured_again(ops: tuple[dict[str, Any], str, Path]) -> None:
    report, _, folder = ops
    before = (folder / RECORDS_FILE).read_bytes()
    again, screen, _ = run(folder, section=("ops",), backend=("torch",), append=True)
    assert again["sections"] == report["sections"]
    assert (folder / RECORDS_FILE).read_bytes() == before
    assert "resuming" in screen


def test_a_killed_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Records.add

    def stop(self: Records, *args: Any, **kwargs: Any) -> Any:
        if len(self) == 3:
            raise KeyboardInterrupt
        return add(self, *args, **kwargs)

    chosen: dict[str, Any] = {"section": ("ops",), "backend": ("torch",), "direction": ("causal",), "backward": False}
    monkeypatch.setattr(Records, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", **chosen)
    monkeypatch.undo()
    store = Records(tmp_path / "out" / RECORDS_FILE)
    assert len(store) == 3
    report, _, _ = run(tmp_path / "out", append=True, **chosen)
    ids = {row["measurement"] for row in report["sections"]["ops"]}
    assert {one.id for one in store} <= ids
    assert len(ids) == 4


def test_a_narrow_screen_shows_all_columns(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"section": ("ops",), "attention": ("elu",), "direction": ("causal",), "backward": False}
    lengths = tuple(range(16, 28))
    _, screen, _ = run(tmp_path / "out", width=60, lengths=lengths, backend=("torch",), **chosen)
    assert all(len(line) <= 60 for line in screen.splitlines() if "Written" not in line)
    for length in lengths:
        assert f" {length}" in screen


@every_mechanism(causal=False)
def test_bidirectional_mechanisms_build(name: str) -> None:
    _builds(name, False)


@every_mechanism(causal=True)
def test_causal_mechanisms_build(name: str) -> None:
    _builds(name, True)


def _builds(name: str, causal: bool) -> None:
    module = workloads.build(name, heads=2, head_dim=8, longest=192, causal=causal, seed=0)
    inputs = Inputs.make(1, 2, 192, 8, torch.float32, torch.device("cpu"), 0)
    gradients: Any = workloads.timed_call(module, inputs, causal, True)()
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)


def test_supported_and_unsupported_backends() -> None:
    inputs = Inputs.make(1, 2, 16, 8, torch.float64, torch.device("cpu"), 0)
    elu = workloads.build("elu", heads=2, head_dim=8, longest=16, causal=False, seed=0, dtype=torch.float64)
    supported, unsupported = workloads.backends_of(workloads.forward(elu, inputs, False), ("native", "torch"))
    assert supported == ["torch"]
    assert "float64" in unsupported["native"]
    linformer = workloads.build("linformer", heads=2, head_dim=8, longest=16, causal=False, seed=0)
    inputs = Inputs.make(1, 2, 16, 8, torch.float32, torch.device("cpu"), 0)
    assert workloads.backends_of(workloads.forward(linformer, inputs, False), None) == ([workloads.OWN], {})


def test_eager_is_exact_attention() -> None:
    inputs = Inputs.make(1, 2, 16, 8, torch.float64, torch.device("cpu"), 0)
    for causal in (False, True):
        exact: Any = workloads.exact_call(inputs, causal, False)()
        assert relative_error(workloads.eager(inputs, causal), exact) < 1e-12


# --------------------------------------------------------------------------------------------------------------------
# Limits, peers, turns


@pytest.mark.parametrize("causal", [False, True])
def test_products_count_as_stated(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    key = value = torch.zeros(1, 2, 256, 8)
    features, chunk = 24, limits.CHUNK
    expected = 2 * 256 * (2 * chunk * (features + 8) + 4 * features * 8 if causal else 4 * features * 8)
    for most in (limits.MOST_FEATURES, 1):
        monkeypatch.setattr(limits, "MOST_FEATURES", most)
        with FlopCounterMode(display=False) as counter:
            limits.products(key, value, features, causal)()
        assert counter.get_total_flops() == expected


def test_reference_product_counts_as_stated() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for length in (4, 32):
        call, flops = limits.reference_product(torch.zeros(1, 2, length, 8), torch.zeros(1, 2, length, 8))
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == flops == 2 * 2 * length * 8 * 8


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.package)
def test_peers_run_or_say_why_not(peer: peers.Peer) -> None:
    reason = peer.missing()
    if reason is not None:
        pytest.skip(f"{peer.package}: {reason}")
    for causal in (False, True):
        if peer.refuses(causal, "float32", torch.device("cpu")) is None:
            inputs = Inputs.make(1, 2, 64, 8, torch.float32, torch.device("cpu"), 0)
            out = peer.build(inputs, causal)(inputs.query, inputs.key, inputs.value)
            assert out.shape == inputs.query.shape


def test_a_peer_that_is_missing_is_named() -> None:
    missing = peers.Peer("no-such", "no_such_module", "elu", True, True, ("cpu",), ("float32",), peers.performer)
    assert missing.missing() == "it is not installed"
    assert missing.refuses(True, "bfloat16", torch.device("cpu")) == "it takes float32 only"


def test_slow_calls_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"fast": 0, "slow": 0}
    clock = [0.0]

    def call(name: str, seconds: float) -> None:
        counts[name] += 1
        clock[0] += seconds

    monkeypatch.setattr("recipes.benchmarks.timing.device_clock", lambda _: lambda: clock[0])
    samples = sample_interleaved({"fast": lambda: call("fast", 0.01), "slow": lambda: call("slow", 2.0)}, seconds=0.05)
    assert counts == {"fast": 7, "slow": 1}
    assert samples["slow"] == [2.0]
    assert len(samples["fast"]) == 5


def test_contexts_are_entered_once_per_sample() -> None:
    entered: list[str] = []
    calls = []

    @contextmanager
    def around(name: str) -> Iterator[None]:
        entered.append(name)
        yield
        entered.append(f"left {name}")

    call = InContext(
        InContext(lambda: calls.append(torch.is_grad_enabled()), torch.no_grad), partial(around, "backend")
    )
    call()
    assert (entered, calls) == (["backend", "left backend"], [False])
    samples = sample_interleaved({"one": call}, seconds=0.001)
    assert len(calls) > 10 * len(samples["one"])
    assert len(entered) == 2 * (1 + 2 + len(samples["one"]))
    assert not any(calls)
    assert torch.is_grad_enabled()


def test_ratio_pairs_rounds() -> None:
    result = ratio([2.0, 4.0, 8.0], [1.0])
    assert (result["median"], result["rounds"]) == (4.0, 1)
    assert ratio([2.0, 4.0], [1.0, 2.0])["median"] == 2.0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0432, "0.043"), (0.432, "0.43"), (4.32, "4.3"), (43.2, "43"), (99.7, "100"), (4321.0, "4,300")],
)
def test_two_digits(value: float, text: str) -> None:
    assert times(value) == text


# --------------------------------------------------------------------------------------------------------------------
# Comparing


def test_comparing_with_itself_finds_nothing(ops: tuple[dict[str, Any], str, Path]) -> None:
    _, _, folder = ops
    chosen: dict[str, Any] = {"section": ("ops",), "backend": ("torch",), "append": True}
    _, screen, code = run(folder, compare=str(folder / "benchmark.json"), **chosen)
    assert code == 0
    assert "Nothing became worse" in screen


def test_what_became_worse_is_named(ops: tuple[dict[str, Any], str, Path], tmp_path: Path) -> None:
    report, _, folder = ops
    before = json.loads(json.dumps(report))
    changed = next(entry for entry in before["ratios"] if entry["ratio"] == "over_limit")
    for name in ("median", "p20", "p80"):
        changed[name] /= 100
    (tmp_path / "before.json").write_text(json.dumps(before), encoding="utf-8")
    chosen: dict[str, Any] = {"section": ("ops",), "backend": ("torch",), "append": True}
    _, screen, code = run(folder, compare=str(tmp_path / "before.json"), **chosen)
    assert code == 1
    assert "Worse" in screen
    assert "% worse" in screen


def entry(median: float, spread: float = 0.01, rounds: int = 9, lower: bool = True, name: str = "x") -> dict[str, Any]:
    return {
        "id": name,
        "ratio": "over_limit" if lower else "speedup",
        "lower_is_better": lower,
        "median": median,
        "p20": median * (1 - spread),
        "p80": median * (1 + spread),
        "rounds": rounds,
    }


@pytest.mark.parametrize(
    ("first", "second", "worse", "better"),
    [
        (entry(1.0), entry(1.3), 1, 0),
        (entry(1.0), entry(0.7), 0, 1),
        (entry(1.0, lower=False), entry(0.7, lower=False), 1, 0),
        (entry(1.0), entry(1.05), 0, 0),  # within the tolerance
        (entry(1.0, spread=0.2), entry(1.3, spread=0.2), 0, 0),  # within the noise
        (entry(1.0, rounds=1), entry(1.13), 0, 0),  # too few rounds to tell
        (entry(1.0), entry(9.0, name="y"), 0, 0),  # not the same thing
    ],
)
def test_noise(first: dict[str, Any], second: dict[str, Any], worse: int, better: int) -> None:
    comparison = compare({"ratios": [first]}, {"ratios": [second]}, 0.1)
    assert (len(comparison.worse), len(comparison.better)) == (worse, better)


# --------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"section": ("opps",)}, "Unknown section 'opps'"),
        ({"dtypes": ("float8",)}, "Unknown dtypes 'float8'"),
        ({"lengths": (0,)}, "lengths must be a whole number of at least 2, got 0"),
        ({"lengths": (16, 16)}, "different things"),
        ({"seconds": 0.0}, "seconds must be positive"),
        ({"tolerance": 1.0}, "tolerance must be"),
        ({"again": True}, "again goes with append"),
    ],
)
def test_bad_options(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        BenchmarkOptions(**changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "eluu"], "Unknown attention mechanism 'eluu'. Did you mean 'elu'"),
        (["--attention", "softmax"], "Leave it out"),
        (["--backend", "natve"], "Did you mean 'native'"),
        (["--device", "warp"], "The device 'warp' cannot be used"),
        (["--compare", "nowhere.json"], "There is no file 'nowhere.json'"),
    ],
)
def test_errors_name_the_value(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_folders_and_files_are_checked(tmp_path: Path, ops: tuple[dict[str, Any], str, Path]) -> None:
    with pytest.raises(ValueError, match="Pass --append"):
        run(ops[2], section=("ops",))
    (tmp_path / "thing").write_text("{}")
    with pytest.raises(ValueError, match="holds other files"):
        run(tmp_path, section=("ops",))
    with pytest.raises(NotADirectoryError, match="is a file"):
        run(tmp_path / "thing", section=("ops",))
    with pytest.raises(ValueError, match=r"is no benchmark\.json"):
        load_report(str(tmp_path / "thing"))


def test_help_tells_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--section", "--compare", "Sections:", "exit code is 1", "--memory_lengths"):
        assert word in text

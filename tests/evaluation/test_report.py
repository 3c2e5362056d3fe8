"""The page, the files, the words: on made-up numbers."""

from __future__ import annotations

import io
import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hf_linear_attn.evaluation.formats import fixed, format_bytes, format_rate, format_seconds
from hf_linear_attn.evaluation.measurements import plain
from hf_linear_attn.evaluation.plots import draw_plots
from hf_linear_attn.evaluation.plots_quality import heat_map_of
from hf_linear_attn.evaluation.pointers import resolve
from hf_linear_attn.evaluation.report import PLOTS, REPEATED, render_page, write_report
from hf_linear_attn.evaluation.screen import show
from hf_linear_attn.evaluation.summary import change, crossover_words, shown_places, summarise_report
from hf_linear_attn.evaluation.verdicts import conclude, verdicts
from tests.evaluation.made_up import made_up_evaluation, made_up_report, made_up_tasks

kinds = pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])

VOID = {"meta", "img", "br", "link", "hr", "input"}


class Page(HTMLParser):
    """What a page loads, and whether its tags are balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        loading = ("src", "href", "xlink:href", "srcset", "data", "action")
        self.loads += [value or "" for name, value in attributes if name in loading]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def made_up(kind: str) -> dict[str, Any]:
    if kind == "several tasks":
        return made_up_tasks()
    return made_up_report(kind == "demo of a decoder") if kind.startswith("demo") else made_up_evaluation(kind)


every_report = pytest.mark.parametrize(
    "kind", ["demo of an encoder", "demo of a decoder", "classifier", "decoder", "encoder", "several tasks"]
)


@every_report
def test_page_is_whole_and_loads_nothing(kind: str) -> None:
    report = made_up(kind)
    plots = draw_plots(report)
    page = render_page(report, plots)
    parsed = Page(page)
    assert parsed.open == []
    assert all(held.startswith(("#", "data:image/png;base64,")) for held in parsed.loads)  # heat maps are images
    assert parsed.tags.count("figure") == parsed.tags.count("figcaption") == len(plots)
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert not {"script", "link", "iframe", "object", "img", "metadata"} & set(parsed.tags)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "@media print" in page
    for table in re.findall(r"<(?:div|section)[^>]*>\s*<table", page):
        assert "scroll" in table
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(set(ids)) == len(ids)
    named = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page))
    assert {first or second for first, second in named} <= set(ids)


@every_report
def test_every_number_leads_to_the_report(kind: str) -> None:
    """Pointers on the page lead to values, and the text is that value in digits."""
    report = made_up(kind)
    page = render_page(report, draw_plots(report))
    found = re.findall(r'<span data-source="([^"]+)" title="report.json \1">([^<]+)</span>', page)
    assert page.count("data-source=") == len(found) > 60
    for source, text in found:
        value = resolve(report, source)
        digits = re.findall(r"[0-9][0-9.,]*", text)
        assert digits or text in ("never", "–"), (source, text)
        if digits and isinstance(value, float) and re.fullmatch(r"-?[0-9.]+", text):
            places = len(text.partition(".")[2])
            assert float(text) == pytest.approx(value, abs=0.51 * 10**-places), source
    for held in report.get("advice", {"verdicts": []})["verdicts"]:
        assert resolve(report, held["sources"]["score"]) == held["score"]
        assert resolve(report, held["sources"]["speedup"]) == held["speedup"]


@kinds
def test_page_shows_the_numbers_of_the_data(decoder: bool) -> None:
    report = made_up_report(decoder)
    report["speed"]["model"]["rows"]["hedgehog"][2]["speedup"] = 7.77
    report["speed"]["model"]["ceiling"][1] = 4.56
    text = Page(render_page(report, {})).text
    assert text.count("7.77×") == 2  # the summary and the table
    assert text.count("4.56×") == 2
    for line in report["verdicts"]:
        assert line in text
    assert "2030-01-02 at 03:04:05 UTC" in text
    assert format_seconds(report["seconds"]) in text


def test_page_of_an_evaluation_shows_all_that_was_measured() -> None:
    report = made_up_evaluation("classifier")
    text = Page(render_page(report, {})).text
    assert "Is it worth it at 512 tokens?" in text
    assert "0.710 ± 0.010" in text
    assert "softmax (tuned)" in text
    assert "GFLOP" in text
    assert "40 measurements of 2 runs in measurements.jsonl" in text
    assert "not shown here: 2" in text
    for folder in ("run0", "run1", "run2"):
        assert folder in text
    assert "Throughput: 8 sequences at once" in text
    assert "Not timed, for want of memory: 8,192 tokens (made up)." in text
    assert "Tokens a second with 8 sequences of 2,048 at once: sdpa 64,000, elu 384,000 (6.00×)" in text


def test_page_of_several_tasks_shows_each_and_their_mean() -> None:
    report = made_up_tasks()
    text = Page(render_page(report, draw_plots(report))).text
    for told in (
        "By sst2 accuracy",
        "By rte accuracy",
        "kept, mean of 2 tasks",
        "a model for rte",
        "bfloat16 (quality",
    ):
        assert told in text, told
    share = 0.71 / 0.8
    assert f"{share:.1%}" in text
    assert f"{0.9 * share:.1%}" in text
    (row,) = [row for row in summarise_report(report).rows if row[0] == "hedgehog (converted)"]
    assert f"{0.95 * share:.1%} ± {0.95 * 0.01 / 0.8:.1%}" in row
    assert f"{0.95 * 0.95 / 0.8:.1%} kept on average of 2 tasks" in report["verdicts"][0]  # of hedgehog, the best


def test_a_report_without_the_further_task_removes_its_plots(tmp_path: Path) -> None:
    (tmp_path / "task-of-mine.txt").write_text("kept", encoding="utf-8")
    write_report(made_up_tasks(), tmp_path)
    assert (tmp_path / "pareto-task-rte.png").exists()
    written = write_report(made_up_evaluation("classifier"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*written, "task-of-mine.txt"])


def test_page_of_a_decoder_shows_prefill_and_streams() -> None:
    report = made_up_evaluation("decoder")
    text = Page(render_page(report, {})).text
    assert "Prefill: the prompt, batch 1" in text
    assert "Decoding: 8 streams at once" in text
    titles = [column.title for column in summarise_report(report).columns]
    assert {"tokens/s, 8 at once, at 512", "prefill at 512", "decode at 2,048"} <= set(titles)
    assert [len(row) for row in summarise_report(report).rows] == [len(titles)] * 7


@every_report
def test_page_escapes_what_comes_from_outside(kind: str) -> None:
    evil = "<script>alert('x')</script>$x_1$"
    report = made_up(kind)
    report["model"].update(name=evil, source=evil, repr=repr(evil), **{"class": evil})
    report["text"]["source"] = evil
    held = report["mechanisms"][0]
    held["description"] = evil
    for table in (report["speed"].get(part) for part in ("model", "layer", "training", "throughput")):
        for part in ("rows", "crossover"):
            if table and held["name"] in table[part]:
                table[part][evil] = table[part].pop(held["name"])
    if report["decode"]:
        report["decode"]["rows"][evil] = report["decode"]["rows"].pop(held["name"])
    held["name"] = evil
    conclude(report)
    page = render_page(report, draw_plots(report))
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6


@every_report
def test_plots_are_png_of_the_width_of_a_phone_at_double_density(kind: str) -> None:
    plots = draw_plots(made_up(kind))
    assert {name for name in plots if not REPEATED.fullmatch(name)} <= set(PLOTS)
    assert {"fidelity.png", "heatmap.png", "errors.png", "transfer.png", "time.png", "speedup.png"} <= set(plots)
    extra = {
        "demo of an encoder": {"sentences.png", "layer.png"},
        "demo of a decoder": {"perplexity.png", "positions.png", "decode.png", "cache.png", "layer.png"},
        "classifier": {"task.png", "pareto.png", "memory.png", "training.png", "throughput.png"},
        "decoder": {"perplexity.png", "positions.png", "decode.png", "cache.png", "pareto.png", "prefill.png"},
        "encoder": {"sts.png", "sentences.png", "pareto.png", "memory.png"},
        "several tasks": {"task.png", "pareto.png", "task-rte.png", "pareto-task-rte.png"},
    }
    assert extra[kind] <= set(plots)
    for name, drawing in plots.items():
        assert drawing.png.startswith(b"\x89PNG"), name
        width, height = struct.unpack(">II", drawing.png[16:24])
        assert 800 <= width <= 1000, name
        assert 300 <= height <= 1500, name
        assert drawing.svg.startswith("<svg")
        assert "viewBox" in drawing.svg[:200]


def test_plots_of_a_report_without_anything_learned_or_timed() -> None:
    report = made_up_report()
    report["mechanisms"] = report["mechanisms"][:1]
    for part in ("model", "layer"):
        report["speed"][part].update(lengths=[], rows={}, crossover={})
    report["speed"]["model"].update(ceiling=[], attention_share=[])
    conclude(report)
    assert set(draw_plots(report)) == {"fidelity.png", "heatmap.png", "sentences.png", "errors.png"}
    assert "elu" in Page(render_page(report, {})).text


def test_heat_map_shows_the_default_mechanism() -> None:
    report = made_up_report()
    chosen = heat_map_of(report)
    assert chosen is not None
    assert chosen["name"] == "hedgehog"  # the first that learned
    report["mechanisms"].append({**chosen, "name": "window"})
    assert heat_map_of(report)["name"] == "window"
    report["mechanisms"] = report["mechanisms"][2:3]
    assert heat_map_of(report) is None


def test_a_mechanism_that_is_exact_here_is_named_and_not_drawn() -> None:
    report = made_up_report()
    for quality in (report["mechanisms"][1][key] for key in ("untrained", "trained")):
        quality.update(kl=0.0, output_error=1e-7)
    said = " ".join(verdicts(report))
    assert "hedgehog is exact here only because the sequences (up to 64 tokens) fit" in said
    chosen = heat_map_of(report)
    assert chosen is not None
    assert chosen["name"] == "elu"
    draw_plots(report)


# --------------------------------------------------------------------------------------------------------------------
# Files


def test_files_are_written_whole_and_others_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept", encoding="utf-8")
    (tmp_path / "decode.png").write_bytes(b"not from a report")
    report = made_up_report()
    written = write_report(report, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*written, "mine.txt", "decode.png"])
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == json.loads(json.dumps(report))
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "kept"
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == (tmp_path / "mine.txt").stat().st_mode & 0o777


def test_a_second_report_replaces_the_first_and_its_plots(tmp_path: Path) -> None:
    write_report(made_up_report(decoder=True), tmp_path)
    assert (tmp_path / "cache.png").exists()
    written = write_report(made_up_report(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == written


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_report(made_up_report(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_infinities_become_null() -> None:
    assert plain({"a": (1, float("inf")), 3: [float("nan"), "x"]}) == {"a": [1, None], "3": [None, "x"]}


# --------------------------------------------------------------------------------------------------------------------
# Words


@kinds
def test_summary_rows_fit_their_columns(decoder: bool) -> None:
    summary = summarise_report(made_up_report(decoder))
    assert summary.kinds == ["exact", "mechanism", "mechanism", "mechanism", "control"]
    assert {len(row) for row in summary.rows} == {len(summary.columns)}
    assert [row[0] for row in summary.rows] == ["sdpa (exact)", "elu", "hedgehog", "linformer", "no attention"]
    titles = [column.title for column in summary.columns]
    hedgehog = dict(zip(titles, summary.rows[2], strict=True))
    assert hedgehog["KL, nats"] == "0.50→0.10"
    assert hedgehog["learned params"] == "1,234"
    assert hedgehog["speed at 2,048"] == "3.20×"
    assert hedgehog["faster from"] == "~ 640"  # the speedup grows like the length: 512 / 0.8
    assert dict(zip(titles, summary.rows[3], strict=True))["KL, nats"] == "–"


@kinds
def test_verdicts_say_what_went_wrong(decoder: bool) -> None:
    said = " ".join(made_up_report(decoder)["verdicts"])
    assert "Nearest to the exact model: hedgehog, after 4 steps of attention transfer" in said
    assert "Worse than no attention at all, as converted so far: elu." in said
    assert "linformer: 4 steps of transfer made it worse" in said
    assert "elu at every measured length (128 and more), hedgehog from about" in said
    assert "Not faster than sdpa at 2,048 tokens, the longest measured: linformer." in said


def test_verdict_on_short_inputs_names_the_ceiling() -> None:
    report = made_up_report()
    report["speed"]["model"]["ceiling"] = [1.1, 1.3, 4.0]
    report["speed"]["model"]["attention_share"] = [0.09, 0.23, 0.75]
    said = " ".join(verdicts(report))
    assert "Short inputs cannot gain: at 512 tokens attention is 23% of the model's time" in said
    assert "would give 1.30×. Slower than sdpa there: hedgehog and linformer." in said


def test_verdict_on_noise() -> None:
    report = made_up_report()
    assert "noisy" not in " ".join(verdicts(report))
    report["speed"]["model"]["rows"]["sdpa"][0].update(p20=1.0, p80=2.5)
    report["hardware"]["load_average_at_start"] = 3.0
    said = verdicts(report)[-1]
    assert "sdpa itself varied by a factor of 2.5" in said
    assert "3.0 programs were already running on 2 CPUs" in said


def test_shown_lengths() -> None:
    lengths = [128, 256, 512, 1024, 2048, 4096, 8192]
    assert [lengths[place] for place in shown_places(lengths)] == [128, 512, 2048, 8192]
    assert shown_places([]) == []
    assert shown_places([74]) == [0]


def test_cells() -> None:
    assert change(1.0666, 0.55, 2) == "1.07→0.55"
    assert change(1.0666, None, 2) == "1.07"
    assert change(None, None, 2) == "–"
    assert crossover_words({"length": 1234.5, "relation": "at"}) == "~ 1,200"
    assert crossover_words({"length": 128.0, "relation": "at or under"}) == "≤ 128"
    assert crossover_words({"length": None, "relation": "none"}) == "never"
    assert [format_seconds(value) for value in (2.0, 0.0351, 8.04e-5)] == ["2 s", "35.1 ms", "80.4 µs"]
    assert [fixed(value, 2) for value in (-0.001, 1.005, -1.0)] == ["0.00", "1.00", "-1.00"]
    assert [format_rate(value) for value in (12345.6, 10.0, 3.44)] == ["12,346", "10", "3.4"]
    assert [format_bytes(value) for value in (640, 12_300, 3.1e6, 2e9)] == ["640 B", "12.3 kB", "3.1 MB", "2 GB"]


@kinds
@pytest.mark.parametrize("width", [52, 60, 80, 100, 160, 200])
def test_no_number_is_lost_on_a_narrow_screen(decoder: bool, width: int) -> None:
    """Every cell of the summary stands whole on the screen, whatever its width."""
    report = made_up_report(decoder)
    report["verdicts"] = []
    stream = io.StringIO()
    show(Console(file=stream, width=width), report, Path("out"), list(PLOTS))
    lines = stream.getvalue().splitlines()
    assert max(len(line) for line in lines if not line.startswith("Report:")) <= width
    for row in summarise_report(report).rows:
        mine = " ".join(line for line in lines if line.strip().startswith(f"{row[0]} "))
        for cell in row:
            assert f" {cell} " in f" {mine} ", (row[0], cell)

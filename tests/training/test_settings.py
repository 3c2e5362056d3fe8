"""Settings from YAML and from dotted flags: types, precedence, messages, and out again."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from hf_linear_attn.training.options import (
    ConvertSettings,
    DataSettings,
    DistillSettings,
    FinetuneSettings,
    ModelSettings,
    RunSettings,
)
from hf_linear_attn.training.settings import as_mapping, build, describe, flat, read_arguments, read_settings, read_yaml


@dataclass(frozen=True)
class Inner:
    name: str = field(default="n", metadata={"help": "a name"})
    title: str | None = field(default=None, metadata={"help": "a title"})
    count: int = field(default=1, metadata={"help": "a count"})
    most: int | None = field(default=7, metadata={"help": "at most"})
    rate: float = field(default=0.5, metadata={"help": "a rate, 100 %"})
    limit: float | None = field(default=None, metadata={"help": "a limit"})
    quick: bool = field(default=False, metadata={"help": "quick"})
    mode: Literal["no", "a", "b"] = field(default="a", metadata={"help": "a mode"})
    lengths: tuple[int, ...] = field(default=(1, 2), metadata={"help": "lengths"})
    words: tuple[str, ...] | None = field(default=None, metadata={"help": "words"})
    options: dict[str, Any] = field(default_factory=dict, metadata={"help": "options"})


@dataclass(frozen=True)
class Outer:
    part: Inner = field(default_factory=Inner)
    other: Inner = field(default_factory=lambda: Inner(count=5))


@dataclass(frozen=True)
class Needing:
    part: NeedsOne


@dataclass(frozen=True)
class NeedsOne:
    seed: int = field(metadata={"help": "where it begins"})


def written(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def given(name: str, text: str) -> Any:
    """A setting of `part` as the command line gives it."""
    return getattr(read_settings(Outer, None, {f"part.{name}": text}).part, name)


def held(folder: Path, name: str, text: str) -> Any:
    """A setting of `part` as a file gives it."""
    return getattr(read_settings(Outer, written(folder, f"part:\n  {name}: {text}\n")).part, name)


GOOD = [
    ("name", "plain", "plain"),
    ("name", "'null'", "null"),
    ("title", "null", None),
    ("title", "made up", "made up"),
    ("count", "-3", -3),
    ("most", "null", None),
    ("most", "12", 12),
    ("rate", "1e-3", 1e-3),
    ("rate", "1.0e-3", 1e-3),
    ("rate", "3", 3.0),
    ("rate", "-2.5", -2.5),
    ("limit", "null", None),
    ("limit", "5e4", 5e4),
    ("quick", "true", True),
    ("quick", "no", False),
    ("mode", "b", "b"),
    ("mode", "no", "no"),
    ("lengths", "[]", ()),
    ("lengths", "[4, 5]", (4, 5)),
    ("lengths", "4,5", (4, 5)),
    ("lengths", "4 5", (4, 5)),
    ("lengths", "4", (4,)),
    ("words", "null", None),
    ("words", "[my column]", ("my column",)),
    ("options", "{}", {}),
    ("options", "{seed: 1, deep: {a: [1, 2]}}", {"seed": 1, "deep": {"a": [1, 2]}}),
]


@pytest.mark.parametrize(("name", "text", "expected"), GOOD)
def test_every_type_from_file_and_command_line(tmp_path, name, text, expected):
    found = held(tmp_path, name, text)
    assert found == expected
    assert type(found) is type(expected)
    if not text.startswith("'"):  # the command line knows no quotes: the shell has taken them
        found = given(name, text)
        assert found == expected
        assert type(found) is type(expected)


def test_the_command_line_may_leave_a_list_empty():
    assert given("lengths", "") == ()


BAD = [
    ("count", "1.5", "part.count must be a whole number"),
    ("count", "true", "part.count must be a whole number, got "),
    ("count", "1e3", "part.count must be a whole number"),
    ("count", "[1]", "part.count must be a whole number"),
    ("most", "many", "part.most must be a whole number, got 'many'"),
    ("rate", "fast", "part.rate must be a finite number, got 'fast'"),
    ("rate", "true", "part.rate must be a finite number"),
    ("rate", ".nan", "part.rate must be a finite number"),
    ("rate", "inf", "part.rate must be a finite number, got 'inf'"),
    ("rate", "[1]", "part.rate must be a finite number"),
    ("quick", "1", "part.quick must be true or false"),
    ("quick", "maybe", "part.quick must be true or false, got 'maybe'"),
    ("mode", "c", "part.mode must be one of 'no', 'a', 'b', got 'c'"),
    ("mode", "yes", "part.mode must be one of"),
    ("lengths", "[1, x]", "part.lengths must be a whole number, got 'x'"),
    ("lengths", "1,x", "part.lengths must be a whole number, got 'x'"),
    ("options", "5", "part.options must be a mapping such as"),
    ("options", "[a]", "part.options must be a mapping such as"),
    ("options", "{1: 2}", "part.options must be a mapping such as"),
    ("options", "'{a'", "part.options must be a mapping such as"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_bad_values_name_themselves(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        held(tmp_path, name, text)
    with pytest.raises(ValueError, match=f"part.{name} must be"):
        given(name, text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        # What YAML has taken for something else is gone: 1.10 is 1.1, no is False.
        ("name", "1.10", r"part.name must be text, got 1.1. Put it into quotation marks"),
        ("name", "no", "part.name must be text, got False"),
        ("name", "[a]", "part.name must be text"),
        ("name", "{a: 1}", "part.name must be text"),
        ("title", "2026-01-01", "part.title must be text"),
        ("words", "[a, 1]", "part.words must be text, got 1"),
        ("lengths", "{a: 1}", r"part.lengths must be a list such as '\[a, b\]'"),
        ("lengths", "null", "part.lengths must be a list, got nothing"),
        ("count", "null", "part.count must be a whole number, got nothing"),
        ("rate", "", "part.rate must be a finite number, got nothing"),
        ("count", "!!python/object/apply:os.getcwd []", "is no YAML file"),
        ("count", "2026-13-45", "is no YAML file .*month"),
    ],
)
def test_bad_values_of_a_file(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        held(tmp_path, name, text)


def test_a_date_that_is_none_is_told_on_the_command_line_too():
    with pytest.raises(ValueError, match=r"part.rate must be a finite number, got '2026-13-45'"):
        given("rate", "2026-13-45")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"part": {"cuont": 1}}, r"Unknown setting 'part.cuont'. Did you mean 'part.count'\?"),
        ({"prat": {}}, r"Unknown setting 'prat'. Did you mean 'part'\?"),
        ({"part": {"zzz": 1}}, "Unknown setting 'part.zzz'. Known here: part.name, part.title"),
        ({"zzz": 1}, "Unknown setting 'zzz'. Known here: part, other"),
        ({5: 1}, "Unknown setting '5'"),
        ({"part": 5}, "'part' is a section: give its settings by name, got 5"),
        ({"part": [1]}, "'part' is a section"),
    ],
)
def test_unknown_keys_and_sections(values, message):
    with pytest.raises(ValueError, match=message):
        build(Outer, values)


def test_unknown_keys_of_the_command_line():
    with pytest.raises(ValueError, match=r"Unknown setting 'data.tsak'. Did you mean 'data.task'"):
        read_settings(ConvertSettings, None, read_arguments(["--data.tsak", "rte"]))
    with pytest.raises(ValueError, match=r"Unknown setting 'distil'. Did you mean 'distill'"):
        read_settings(ConvertSettings, None, read_arguments(["--distil.epochs", "1"]))


def test_command_line_beats_file_beats_defaults(tmp_path):
    file = written(tmp_path, "part:\n  count: 3\n  rate: 2\n  options: {a: 1, b: 2}\nother:\n")
    words = [
        "--part.count",
        "4",
        "--part.options.b",
        "5",
        "--part.options.c-d=1e-3",
        "--part.quick",
        "--other.name=x=y",
    ]
    found = read_settings(Outer, file, read_arguments(words))
    assert found.part == Inner(count=4, rate=2.0, quick=True, options={"a": 1, "b": 5, "c_d": "1e-3"})
    # An empty section keeps the defaults that the outer class chose, and so does one that changes something else.
    assert found.other == Inner(name="x=y", count=5)
    assert read_settings(Outer, file).other == Inner(count=5)


def test_sections_keep_the_defaults_of_their_recipe():
    assert read_settings(FinetuneSettings, None, {"model.source": "x"}).model.attention is None
    assert read_settings(ConvertSettings, None, {"model.source": "x"}).model.attention == "window"
    assert read_settings(ConvertSettings, None, {"teacher.lr": "1"}).teacher.epochs == 0


def test_keys_with_dashes(tmp_path):
    file = written(tmp_path, "data:\n  max-length: 64\n")
    assert read_settings(ConvertSettings, file).data.max_length == 64
    assert read_settings(ConvertSettings, file, read_arguments(["--data.max-length", "32"])).data.max_length == 32


def test_free_mappings_from_the_command_line():
    both = {"part.options": "{a: 1}", "part.options.b": "2"}
    assert read_settings(Outer, None, both).part.options == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match=r"part.options.b has no place: part.options is 5 already"):
        read_settings(Outer, None, {"part.options": "5", "part.options.b": "2"})
    with pytest.raises(ValueError, match=r"part.name must be text, got {'x': 1}"):
        read_settings(Outer, None, {"part.name.x": "1"})
    with pytest.raises(ValueError, match=r"part.name has no place: part is 5 already"):
        read_settings(Outer, None, {"part": "5", "part.name": "x"})


def test_what_has_no_default_is_asked_for():
    with pytest.raises(ValueError, match=r"'part.seed' is needed: where it begins"):
        build(Needing, {})
    assert build(Needing, {"part": {"seed": 3}}).part.seed == 3


def test_arguments():
    words = ["--a.b", "1", "--c.d=2", "--e-f.g", "--h.i", "-3", "--j.k=", "--a.b", "9"]
    assert read_arguments(words) == {"a.b": "9", "c.d": "2", "e_f.g": "true", "h.i": "-3", "j.k": ""}
    assert read_arguments([]) == {}
    with pytest.raises(ValueError, match=r"Expected a setting such as --data.task sst2, got 'rte'"):
        read_arguments(["--a.b", "1", "rte"])


# --------------------------------------------------------------------------------------------------------------------
# Files


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no settings file .*none.yaml"):
        read_yaml(str(tmp_path / "none.yaml"))
    with pytest.raises(FileNotFoundError, match="There is no settings file"):
        read_yaml(str(tmp_path))
    with pytest.raises(ValueError, match="is no YAML file"):
        read_yaml(written(tmp_path, "a: [1"))
    with pytest.raises(ValueError, match=r"holds a list. It must hold sections such as 'model:'"):
        read_yaml(written(tmp_path, "- a\n- b\n"))
    with pytest.raises(ValueError, match="holds a str"):
        read_yaml(written(tmp_path, "model"))
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ValueError, match="is no YAML file"):
        read_yaml(str(tmp_path / "bytes.yaml"))
    assert read_yaml(written(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!python/object/new:pathlib.Path", "!!python/name:"]
)
def test_nothing_but_plain_data_is_built(tmp_path, tag):
    marker = tmp_path / "made"
    with pytest.raises(ValueError, match="is no YAML file"):
        read_yaml(written(tmp_path, f"model: {tag} ['touch {marker}']\n"))
    with pytest.raises(ValueError, match="must be a mapping"):
        given("options", f"{tag} ['touch {marker}']")
    assert not marker.exists()


# --------------------------------------------------------------------------------------------------------------------
# Out again

FULL = ConvertSettings(
    model=ModelSettings(source="tiny", options={"num_features": 8, "deep": {"a": 1e-3}}, layers=(0, -1)),
    data=DataSettings(source="rows.csv", text=("a b", "c"), metrics=("accuracy",)),
    distill=replace(DistillSettings(), clip=None, lr=1e-5, lora_targets=("query",)),
    run=RunSettings(output="out", precision="no", speed_lengths=(), trackers=("tensorboard", "wandb")),
)


@pytest.mark.parametrize("settings", [FULL, ConvertSettings(), FinetuneSettings()], ids=["full", "convert", "finetune"])
def test_round_trip_through_yaml_and_json(tmp_path, settings):
    mapping = as_mapping(settings)
    assert build(type(settings), json.loads(json.dumps(mapping))) == settings
    file = written(tmp_path, yaml.safe_dump(mapping, sort_keys=False))
    assert read_settings(type(settings), file) == settings


def test_plain_data():
    made = ModelSettings(options={"sizes": (1, 2), "deep": {"a": (3,)}})
    mapping = as_mapping(made)
    assert mapping["options"] == {"sizes": [1, 2], "deep": {"a": [3]}}
    mapping["options"]["deep"]["a"] = 5
    assert made.options["deep"] == {"a": (3,)}


def test_flat_names_every_setting():
    found = flat(FULL)
    assert found["kind"] == "classification"
    assert found["model.options.num_features"] == 8
    assert found["model.options.deep.a"] == 1e-3
    assert "model.options" not in found
    assert found["model.overrides"] == {}
    assert found["run.speed_lengths"] == []
    assert found["distill.clip"] is None
    assert flat(FULL.model, "m.")["m.source"] == "tiny"


def test_help_texts_may_hold_percent_signs():
    parser = argparse.ArgumentParser()
    describe(parser, Outer)
    shown = " ".join(parser.format_help().split())
    assert "a rate, 100 % (default: 0.5)" in shown
    assert "--part.mode {no,a,b}" in shown
    assert "--part.lengths INT,…" in shown
    assert "lengths (default: 1,2)" in shown
    assert "--other.count INT a count (default: 5)" in shown


def test_refusals_reach_whoever_reads_a_file(tmp_path):
    with pytest.raises(ValueError, match=r"^distill.lr must be positive, got -1.0"):
        read_settings(ConvertSettings, written(tmp_path, "distill: {lr: -1}"))

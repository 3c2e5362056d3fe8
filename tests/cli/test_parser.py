"""Configs from YAML and from flags: types, precedence, messages, and back to YAML."""

from __future__ import annotations

import json
from argparse import ArgumentError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from hf_linear_attn.cli.parser import parse_config
from hf_linear_attn.cli.running import exit_code
from hf_linear_attn.utils.options import OptionError, check_options, flatten, option, to_dict


@dataclass(frozen=True)
class Section:
    name: str = option("n", "a name")
    title: str | None = option(None, "a title")
    count: int = option(1, "a count", least=1)
    most: int | None = option(7, "at most")
    rate: float = option(0.5, "a rate, 100 %", least=0)
    limit: float | None = option(None, "a limit")
    quick: bool = option(False, "quick")
    learning_rate: float = option(0.1, "learning rate")
    mode: Literal["a", "b"] = option("a", "a mode")
    lengths: tuple[int, ...] = option((1, 2), "lengths")
    columns: tuple[str, ...] | None = option(None, "columns")
    options: dict[str, Any] = option(factory=dict, help="options")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Config:
    model: str | None = option(None, "the model")
    part: Section = option(factory=Section)
    other: Section = option(factory=lambda: Section(count=5), help="more of the same", brief=True)

    def __post_init__(self) -> None:
        if self.part.quick and self.part.title:
            raise OptionError("part.title", "is not for quick.")


@dataclass(frozen=True)
class Required:
    model: str = option(help="the model")
    seed: int = option(help="where it begins")


def parse(*arguments: str, config_class: type = Config) -> Any:
    return parse_config(config_class, arguments, program="command", positionals=("model",))


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "options.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


VALUES = [
    ("name", "plain", "plain"),
    ("title", "null", None),
    ("title", "made up", "made up"),
    ("count", "3", 3),
    ("most", "null", None),
    ("rate", "1e-3", 1e-3),
    ("rate", "3", 3.0),
    ("limit", "-2.5", -2.5),
    ("limit", "null", None),
    ("quick", "true", True),
    ("mode", "b", "b"),
    ("options", "{}", {}),
    ("options", "{seed: 1, deep: {a: [1, 2]}}", {"seed": 1, "deep": {"a": [1, 2]}}),
]


@pytest.mark.parametrize(("name", "text", "expected"), VALUES)
def test_every_type_from_file_and_flag(tmp_path, name, text, expected):
    file = yaml_file(tmp_path, f"part:\n  {name}: {text}\n")
    for config in (parse("--config", file), parse(f"--part.{name}", text)):
        value = getattr(config.part, name)
        assert value == expected
        assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "text", "flags", "expected"),
    [
        ("lengths", "[]", [], ()),
        ("lengths", "[4, -5]", ["4", "-5"], (4, -5)),
        ("columns", "[my column, '1']", ["my column", "1"], ("my column", "1")),
    ],
)
def test_lists(tmp_path, name, text, flags, expected):
    file = yaml_file(tmp_path, f"part:\n  {name}: {text}\n")
    written = [] if name == "columns" else [parse(f"--part.{name}", text)]
    for config in (parse("--config", file), parse(f"--part.{name}", *flags), *written):
        assert getattr(config.part, name) == expected


def test_forms_of_flags():
    assert parse("--part.lengths", "4", "--part.lengths=6").part.lengths == (6,)
    assert parse("--part.quick", "--part.count=2").part == Section(quick=True, count=2)
    assert parse("--part.quick", "false").part.quick is False
    assert parse("m", "--part.name", "x=y").part.name == "x=y"
    assert parse("--part.name", "z", "m").model == "m"
    assert parse("--part.options.num-features", "3", "--part.options.kind", "b").part.options == {
        "num_features": 3,
        "kind": "b",
    }
    assert parse("--part.options", "{a: 1}", "--part.options.b", "2").part.options == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("count", "1.5"),
        ("count", "true"),
        ("count", "[1]"),
        ("count", "null"),
        ("most", "many"),
        ("rate", "fast"),
        ("rate", ".nan"),
        ("rate", ".inf"),
        ("quick", "maybe"),
        ("mode", "c"),
        ("lengths", "[1, x]"),
        ("options", "5"),
    ],
)
def test_bad_values_name_the_option(tmp_path, name, text):
    with pytest.raises((ArgumentError, OptionError), match=f"part.{name}"):
        parse("--config", yaml_file(tmp_path, f"part: {{{name}: {text}}}\n"))
    with pytest.raises((ArgumentError, OptionError), match=f"part.{name}"):
        parse(f"--part.{name}={text}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("part: {name: 1.10}", "Expected a <class 'str'>"),
        ("part: {cuont: 1}", "part.cuont: unknown option. Did you mean '--part.count'"),
        ("count: 1", "count: unknown option. Did you mean '--part.count' or '--other.count'"),
        ("part: 5", "part: is a section: give its options by name, got 5"),
        ("- a", "Unexpected config: - a"),
        ("a: [1", "Problems parsing config"),
        ("part: {count: !!python/object/apply:os.getcwd []}", "Problems parsing config"),
    ],
)
def test_bad_files(tmp_path, text, message):
    with pytest.raises((ArgumentError, OptionError)) as caught:
        parse("--config", yaml_file(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part.cuont", "1"], "part.cuont: unknown option. Did you mean '--part.count'"),
        (["--prat.count", "1"], "prat.count: unknown option. Did you mean '--part.count'"),
        (["--xyz-xyz", "1"], "xyz_xyz: unknown option. See --help."),
        (["--part.count"], "argument --part.count: expected one argument"),
        (["a", "b"], "unrecognized arguments: b"),
        (["--config", "none.yaml"], "File does not exist: "),
    ],
)
def test_bad_flags(arguments, message):
    with pytest.raises((ArgumentError, OptionError)) as caught:
        parse(*arguments)
    assert message in str(caught.value)


def test_required_options():
    assert parse("m", "--seed", "3", config_class=Required) == Required("m", 3)
    with pytest.raises(ArgumentError, match="arguments are required: model"):
        parse("--seed", "3", config_class=Required)
    with pytest.raises(ArgumentError, match="arguments are required: seed"):
        parse("m", config_class=Required)


def test_flags_override_files_which_override_defaults(tmp_path):
    file = yaml_file(tmp_path, "part:\n  count: 3\n  rate: 2\n  options: {a: 1, b: 2}\nother:\n")
    config = parse("--config", file, "--part.count", "4", "--part.options.b", "5", "--other.name", "x")
    assert config.part == Section(count=4, rate=2.0, options={"a": 1, "b": 5})
    # A section keeps the defaults that its parent chose.
    assert config.other == Section(name="x", count=5)
    assert parse("--config", file).other == Section(count=5)


def test_configs_check_themselves():
    with pytest.raises(OptionError, match=r"^part.count: must be a whole number of at least 1, got -1"):
        parse("--part.count", "-1")
    with pytest.raises(OptionError, match=r"^part.title: is not for quick"):
        parse("--part.quick", "--part.title", "t")


@pytest.mark.parametrize(
    "config", [Config(), Config("m", Section(title="t", lengths=(), options={"a": {"b": 1e-3}}, columns=("a b", "c")))]
)
def test_round_trip_through_yaml_and_json(tmp_path, config):
    file = yaml_file(tmp_path, yaml.safe_dump(json.loads(json.dumps(to_dict(config))), sort_keys=False))
    assert parse("--config", file) == config


def test_flatten():
    flat = flatten(to_dict(Config(part=Section(options={"deep": {"a": (3,)}}))))
    assert flat["part.options.deep.a"] == [3]
    assert flat["other.options"] == {}
    assert flat["other.count"] == 5


def test_print_config_and_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--part.count", "4", "--print_config")
    assert stopped.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["part"]["count"] == 4
    with pytest.raises(SystemExit):
        parse("--help")
    texts = " ".join(capsys.readouterr().out.split())
    assert "a rate, 100 % (default: 0.5)" in texts
    assert "--part.count INT a count (default: 1)" in texts
    assert "--other.OPTION VALUE: more of the same: name, title, count," in texts
    assert "--other.count" not in texts


def test_exit_codes(capsys):
    def fail(error):
        raise error

    assert exit_code(lambda: 3) == 3
    assert exit_code(lambda: fail(ValueError("two\nlines"))) == 1
    assert capsys.readouterr().err == "error: two lines\n"
    assert exit_code(lambda: fail(OptionError("x", "y"))) == 2
    assert capsys.readouterr().err == "error: --x: y\n"
    assert exit_code(lambda: fail(NotImplementedError("x"))) == 1
    assert exit_code(lambda: fail(KeyboardInterrupt())) == 130
    with pytest.raises(ValueError, match="x"):
        exit_code(lambda: fail(ValueError("x")), traceback=True)
    with pytest.raises(RuntimeError):
        exit_code(lambda: fail(RuntimeError("a defect")))

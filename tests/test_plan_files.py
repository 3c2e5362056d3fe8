"""Plans in files: JSON and YAML, what they say, and what is wrong with them."""

import json

import pytest
import yaml

from hf_linear_attn import LinearAttentionConfig
from tests.subprocesses import run_python

PLAN = {"default": "hedgehog", "0": "softmax", "-1": {"attention": "window", "window_size": 8}}
YAML = "default: hedgehog\n0: softmax\n-1:\n  attention: window\n  window_size: 8\n"


@pytest.fixture
def write(tmp_path):
    def written(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return written


@pytest.mark.parametrize(
    ("name", "text"), [("p.json", json.dumps(PLAN)), ("p.yaml", YAML), ("p.yml", YAML), ("p.YAML", json.dumps(PLAN))]
)
def test_a_file_says_what_the_dict_says(write, name, text):
    path = write(name, text)
    assert LinearAttentionConfig.from_file(path) == LinearAttentionConfig.parse(PLAN)
    assert LinearAttentionConfig.from_file(str(path)) == LinearAttentionConfig.parse(PLAN)


@pytest.mark.parametrize(("name", "dump"), [("p.json", json.dumps), ("p.yaml", yaml.safe_dump)])
def test_the_saved_form(write, name, dump):
    saved = LinearAttentionConfig.parse(PLAN).to_dict()
    assert LinearAttentionConfig.from_file(write(name, dump(saved))).to_dict() == saved


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("p.json", "{", "is not JSON"),
        ("p.yaml", "a: [", "is not YAML"),
        ("p.yaml", "!!python/object/apply:os.getcwd []", "is not YAML"),
        ("p.json", "[]", "must contain an object .* got list"),
        ("p.yaml", "hedgehog", "must contain an object .* got str"),
        ("p.yaml", "", "must contain an object .* got NoneType"),
        ("p.json", "{}", "is empty"),
        ("p.json", '{"0": "elu", "0": "favor+"}', "'0' is named twice"),
        ("p.yaml", "0: elu\n'0': favor+\n", "'0' is named twice"),
        ("p.yaml", "0: {attention: favor+, seed: 1, seed: 2}", "'seed' is named twice"),
        ("p.yaml", "default: hedghog", "Did you mean 'hedgehog'"),
        ("p.yaml", "default: {attention: elu, alpa: 1.0}", "Did you mean 'alpha'"),
        ("p.yaml", "0: 3", "must be a name or a dict"),
        ("p.json", '{"format_version": 99}', "format 99"),
        ("p.toml", "", "ends in .json, .yaml, .yml"),
    ],
)
def test_errors_name_the_file_and_what_is_wrong(write, name, text, complaint):
    path = write(name, text)
    with pytest.raises(ValueError, match=complaint) as caught:
        LinearAttentionConfig.from_file(path)
    assert str(path) in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.yaml.*no such file"):
        LinearAttentionConfig.from_file(tmp_path / "none.yaml")


@pytest.mark.slow
def test_a_plan_is_read_before_anything_else_of_the_package(write):
    path = write("p.yaml", YAML)
    code = f"import hf_linear_attn as hla; print(hla.LinearAttentionConfig.from_file({str(path)!r}).default.attention)"
    result = run_python("-c", code)
    assert (result.stdout, result.returncode) == ("hedgehog\n", 0), result.stderr

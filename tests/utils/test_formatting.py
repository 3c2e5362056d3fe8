"""Text for terminals."""

import pytest

from hf_linear_attn.utils.formatting import format_bytes, format_flops, format_seconds, printable


def test_old_terminals_get_replacements() -> None:
    assert printable("2 → 3 (1.5×)", "ascii") == "2 -> 3 (1.5x)"
    assert printable("2 → 3", "utf-8") == "2 → 3"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_seconds(0.0352), "35.2 ms"),
        (format_seconds(0.9994), "999 ms"),
        (format_seconds(0.9996), "1 s"),
        (format_seconds(999.7), "1,000 s"),
        (format_seconds(5234.6), "5,235 s"),
        (format_seconds(0.0), "0 µs"),
        (format_bytes(640), "640 B"),
        (format_bytes(999_700), "1 MB"),
        (format_bytes(1.5e12), "1,500 GB"),
        (format_flops(999.8e9), "1 TFLOP"),
    ],
)
def test_numbers_with_units_never_have_an_exponent(text: str, expected: str) -> None:
    assert text == expected

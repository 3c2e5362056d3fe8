"""Text for terminals."""

from hf_linear_attn.utils.formatting import printable


def test_old_terminals_get_replacements() -> None:
    assert printable("2 → 3 (1.5×)", "ascii") == "2 -> 3 (1.5x)"
    assert printable("2 → 3", "utf-8") == "2 → 3"

"""Numbers and suggestions as text, the same on the screen, on pages and in plots."""

import difflib
from collections.abc import Iterable
from functools import partial

#: Characters that old terminals lack, and what is shown instead.
ASCII = str.maketrans({"★": "*", "→": "->", "×": "x", "•": "-", "≤": "<=", "–": "-", "µ": "u", "±": "+-", "…": "..."})


def near_matches(name: str, names: Iterable[str]) -> str:
    """Return a sentence that suggests similar names, with a space before it, or an empty string."""
    matches = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def fixed(value: float, digits: int) -> str:
    """Format a number with a fixed count of decimals, and never as `-0.00`."""
    return f"{value:z.{digits}f}"


def _with_unit(units: dict[str, float], value: float) -> str:
    """Format three digits, in the first unit that the rounded value reaches, or else in the last; no exponent above."""
    rounded = float(f"{value:.3g}")
    unit = next((unit for unit, size in units.items() if rounded >= size), list(units)[-1])
    number = value / units[unit]
    return f"{number:,.0f} {unit}" if rounded >= 1000 * units[unit] else f"{number:.3g} {unit}"


#: Seconds as text: `1.2 s`, `35 ms`, `80 µs`.
format_seconds = partial(_with_unit, {"s": 1.0, "ms": 1e-3, "µs": 1e-6})
#: Bytes as text, in powers of 1000: `640 B`, `12 kB`, `3.1 MB`.
format_bytes = partial(_with_unit, {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})
#: Floating-point operations as text, in powers of 1000: `640 FLOP`, `12.3 MFLOP`, `3.1 GFLOP`, `1.2 TFLOP`.
format_flops = partial(_with_unit, {"TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6, "kFLOP": 1e3, "FLOP": 1.0})


def format_rate(value: float) -> str:
    """Format a number per second: `12,345`, and below ten `3.4`."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def printable(text: str, encoding: str) -> str:
    """Return the text with replacements for what the terminal's encoding lacks."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(ASCII).encode(encoding, "replace").decode(encoding)
    return text

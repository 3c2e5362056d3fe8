"""What `hf-linear-attn benchmark` can be asked for. Light: reading flags loads neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SECTIONS = ("ops", "decode", "model", "memory")
DTYPES = ("float32", "bfloat16", "float16")
DIRECTIONS = ("bidirectional", "causal")

#: The row of a model whose attention is switched off.
FREE = "no attention"

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CONTEXTS = (128, 1024, 4096, 16384, 32768)
MODEL_LENGTHS = (512, 1024, 2048, 4096, 8192)
MEMORY_LENGTHS = (1024, 4096, 16384, 100_000)
#: What whole models and memory are measured with: there every mechanism costs seconds.
FEW = ("elu", "favor+", "hedgehog", "window")

QUICK = {
    "attention": FEW,
    "lengths": (64, 512, 2048),
    "contexts": (128, 1024),
    "model_lengths": (512,),
    "memory_lengths": (1024, 4096),
    "dtypes": ("float32",),
    "batches": (1,),
    "seconds": 0.03,
    "longest": 20.0,
}
FULL = {
    "attention": None,
    "lengths": LENGTHS,
    "contexts": CONTEXTS,
    "model_lengths": MODEL_LENGTHS,
    "memory_lengths": MEMORY_LENGTHS,
    "dtypes": ("float32", "bfloat16"),
    "batches": (1, 8),
    "seconds": 0.1,
    "longest": 60.0,
}


def help_text(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True)
class BenchmarkOptions:
    """What to measure, and how thoroughly. None: the full set, or with `quick` a small one."""

    section: tuple[str, ...] = field(
        default=SECTIONS, metadata=help_text("what to measure: ops, decode, model, memory (default: all)")
    )
    attention: tuple[str, ...] | None = field(
        default=None,
        metadata=help_text(
            "mechanisms (default: all in ops and in the decoding step; elu, favor+, hedgehog and window elsewhere)"
        ),
    )
    backend: tuple[str, ...] | None = field(
        default=None, metadata=help_text("backends of kernelized attention: torch, native, … (default: all there are)")
    )
    direction: tuple[str, ...] = field(
        default=DIRECTIONS, metadata=help_text("bidirectional, causal (default: both; ops and memory)")
    )
    dtypes: tuple[str, ...] | None = field(
        default=None, metadata=help_text("float32, bfloat16, float16 (default: float32 bfloat16; quick: float32)")
    )
    lengths: tuple[int, ...] | None = field(
        default=None, metadata=help_text("lengths of ops, in tokens (default: 64 to 16384; quick: 64 512 2048)")
    )
    contexts: tuple[int, ...] | None = field(
        default=None, metadata=help_text("contexts of decoding, in tokens (default: 128 to 32768; quick: 128 1024)")
    )
    model_lengths: tuple[int, ...] | None = field(
        default=None, metadata=help_text("lengths of whole models (default: 512 to 8192; quick: 512)")
    )
    memory_lengths: tuple[int, ...] | None = field(
        default=None, metadata=help_text("lengths of memory (default: 1024 to 100000; quick: 1024 4096)")
    )
    batch: int = field(default=1, metadata=help_text("batch size of ops and memory"))
    heads: int = field(default=12, metadata=help_text("heads of ops, decoding step and memory"))
    head_dim: int = field(default=64, metadata=help_text("head size of ops, decoding step and memory"))
    batches: tuple[int, ...] | None = field(
        default=None, metadata=help_text("batch sizes of the decoding step (default: 1 8; quick: 1)")
    )
    backward: bool = field(
        default=True, metadata=help_text("also forward and backward together, as in training (ops and memory)")
    )
    peers: bool = field(
        default=True, metadata=help_text("other packages too, where they are installed (those that are not are named)")
    )
    headlines: bool = field(
        default=True, metadata=help_text("the comparisons that others published, on their shapes (not with --quick)")
    )
    seconds: float | None = field(
        default=None, metadata=help_text("time to spend on each thing timed (default: 0.1; quick: 0.03)")
    )
    longest: float | None = field(
        default=None,
        metadata=help_text(
            "leave out what would take longer than this for one call; of ops, exact attention, and mechanisms from a "
            "twentieth of it on (default: 60; quick: 20)"
        ),
    )
    quick: bool = field(default=False, metadata=help_text("less of everything, for a first look"))
    threads: int = field(default=1, metadata=help_text("CPU threads, for all alike"))
    device: str = field(default="cpu", metadata=help_text("torch device to run on: cpu, cuda, …"))
    seed: int = field(default=0, metadata=help_text("seed of inputs, random weights and random features"))
    output: str = field(default="benchmark", metadata=help_text("folder for tables and measurements"))
    append: bool = field(
        default=False, metadata=help_text("add to the measurements in the folder, or go on where a run was stopped")
    )
    again: bool = field(
        default=False,
        metadata=help_text("measure anew what is there; both are kept, the newer is shown (with --append)"),
    )
    compare: str | None = field(
        default=None,
        metadata=help_text(
            "an earlier benchmark.json: say which ratios became worse by more than the noise; exit code 1"
        ),
    )
    tolerance: float = field(
        default=0.1, metadata=help_text("smallest change of a ratio that counts as worse, beside the noise (0.1: 10 %)")
    )

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("heads", 1), ("head_dim", 2), ("threads", 1), ("seed", 0)):
            _check_whole(name, getattr(self, name), least)
        for name, least in (
            ("lengths", 2),
            ("contexts", 2),
            ("model_lengths", 16),
            ("memory_lengths", 16),
            ("batches", 1),
        ):
            for value in getattr(self, name) or ():
                _check_whole(name, value, least)
        for name, known in (("section", SECTIONS), ("direction", DIRECTIONS), ("dtypes", DTYPES)):
            _check_known(name, getattr(self, name), known)
        for name in (*_LISTS, "section", "direction"):
            value = getattr(self, name)
            if value is not None and (not value or len(set(value)) < len(value)):
                text = ", ".join(map(str, value)) or "nothing"
                raise ValueError(f"{name} must name different things, at least one; got {text}.")
        for name in ("seconds", "longest"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}.")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must be at least 0 and below 1, got {self.tolerance!r}.")
        if self.again and not self.append:
            raise ValueError("again goes with append: it measures anew what a folder holds already.")

    def chosen(self, name: str) -> object:
        """An option, or what it stands for where it was left open."""
        value = getattr(self, name)
        if value is not None:
            return tuple(sorted(value)) if name in _SORTED else value
        return (QUICK if self.quick else FULL)[name]

    def numbers(self, name: str) -> tuple[int, ...]:
        """`chosen` for lengths, contexts and batch sizes, ascending."""
        values = self.chosen(name)
        assert isinstance(values, tuple)
        return values

    def number(self, name: str) -> float:
        value = self.chosen(name)
        assert isinstance(value, (int, float))
        return float(value)

    def names(self, name: str) -> tuple[str, ...]:
        values = self.chosen(name)
        assert isinstance(values, tuple)
        return values


_SORTED = ("lengths", "contexts", "model_lengths", "memory_lengths", "batches")
_LISTS = (*_SORTED, "attention", "backend", "dtypes")


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def _check_known(name: str, values: Sequence[str] | None, known: Sequence[str]) -> None:
    for value in values or ():
        if value not in known:
            raise ValueError(f"Unknown {name} {value!r}. There are: {', '.join(known)}.")

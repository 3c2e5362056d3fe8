"""Saving of patched checkpoints with the files that belong to them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import CONFIG_NAME, logging

from .integration.models import all_configs
from .integration.positions import EXTENDED_FROM, position_limit
from .utils.files import atomic_folder, check_output
from .utils.gguf import split_source

#: What belongs to a checkpoint besides config and weights: tokenizer, processor, chat template, sentence-transformers.
COMPANION_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[0-9]_*/*",
)

#: Files among them that limit the number of tokens, and under which key.
TOKEN_LIMITS = (("tokenizer_config.json", "model_max_length"), ("sentence_*_config.json", "max_seq_length"))


def save_checkpoint(
    model: PreTrainedModel, source: str, output: str, *, revision: str | None = None, overwrite: bool = False
) -> None:
    """Save a patched model with the tokenizer files of the checkpoint that it was made from, atomically.

    Args:
        model: The patched model.
        source: A local folder or a repository on the Hub.
        output: The folder to write. It appears completely or not at all.
        revision: Branch, tag or commit of the repository.
        overwrite: Whether a checkpoint in the folder may be replaced.

    Raises:
        ValueError, OSError: As `utils.files.check_output`; the folder cannot be written.
    """
    with atomic_folder(Path(output).absolute()) as temporary:
        with progress_bars_on_terminals():
            model.save_pretrained(temporary)
        _copy_companions(source, temporary, revision)
        if any(hasattr(part, EXTENDED_FROM) for part in all_configs(model)):
            _raise_token_limits(temporary, position_limit(model) or 0)
        # The folder may have been filled in the meantime.
        check_output(output, [CONFIG_NAME], overwrite=overwrite, source=source)


@contextmanager
def progress_bars_on_terminals() -> Iterator[None]:
    """Context manager that hides Transformers' progress bars in logs."""
    hide = not sys.stderr.isatty() and logging.is_progress_bar_enabled()
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            logging.enable_progress_bar()


def _copy_companions(source: str, target: Path, revision: str | None) -> None:
    """Copy tokenizer and processor files, byte for byte, where `save_pretrained` has not written its own."""
    name, gguf_file = split_source(source)
    if gguf_file:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", **gguf_file)
        tokenizer.save_pretrained(target)
        return
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(source, revision=revision, allow_patterns=list(COMPANION_FILES)))
    for pattern in COMPANION_FILES:
        for path in sorted(folder.glob(pattern)):
            copied = target / path.relative_to(folder)
            if path.is_file() and not copied.exists():
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copied)


def _raise_token_limits(folder: Path, max_length: int) -> None:
    """Let the tokenizer (and sentence-transformers) keep as many tokens as the extended positions allow."""
    for pattern, key in TOKEN_LIMITS:
        for path in sorted(folder.glob(pattern)):
            settings = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(settings.get(key), int) and settings[key] < max_length:
                settings[key] = max_length
                path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

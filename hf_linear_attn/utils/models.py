"""Model copies, inputs, batches, quiet loading and devices."""

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel
from transformers.utils import logging

#: Transformers' arguments that describe a packed batch. Models take them among their `**kwargs`.
BOUNDARY_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

#: Tokens that an image or a sound is taken for, in the number of those of some batches.
TOKENS_OF_OTHERS = 256

Batch = Mapping[str, Any]
"""What a model is called with: tensors by their names, `input_ids` `[B, L]`, perhaps `labels`. A tokenizer or a
collator makes it."""


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that can be patched independently and shares the model's parameters and buffers, uncopied."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def accepted(model: Any, **arguments: Any) -> dict[str, Any]:
    """Return those of the arguments that a model's forward pass takes."""
    parameters = inspect.signature(model.forward).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def model_inputs(model: Any, batch: Batch) -> dict[str, Any]:
    """Return what a model's forward pass takes of a batch, on its device, without labels and without a cache.

    Where the inputs of a decoder are made of the labels (in an encoder-decoder), they are made here.
    """
    moved = BatchEncoding(dict(batch)).to(model.device)
    labels = moved.pop("labels", None)
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if labels is not None and make is not None and "decoder_input_ids" not in moved:
        moved["decoder_input_ids"] = make(labels=labels)
    boundaries = {name: moved[name] for name in BOUNDARY_ARGUMENTS if name in moved}
    return {**accepted(model, **moved, use_cache=False), **boundaries}


def mean_pooling(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the mean over real tokens of hidden states `[B, L, D]`, float32 `[B, D]`: the sentence embeddings."""
    if attention_mask is None:
        return hidden.float().mean(1)
    mask = attention_mask.to(hidden.device).unsqueeze(-1).float()
    return (hidden.float() * mask).sum(1) / mask.sum(1)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Context manager: the model in evaluation mode, and afterwards every module as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """Context manager in which a model has no gradients, dropout or cache. Its flags and modes are restored.

    (With a cache Transformers does not look for packed documents, and every layer keeps its keys and values.)
    """
    required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    candidates: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    caches = [(config, config.use_cache) for config in candidates if hasattr(config, "use_cache")]
    try:
        model.requires_grad_(False)
        for config, _ in caches:
            config.use_cache = False
        with evaluation_mode(model):
            yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(required[name])
        for config, use_cache in caches:
            config.use_cache = use_cache


@contextmanager
def hidden_progress_bars(hide: bool = True) -> Iterator[None]:
    """Context manager that hides Transformers' progress bars, optionally."""
    hide = hide and logging.is_progress_bar_enabled()
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            logging.enable_progress_bar()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context manager that hides Transformers' progress bars and its report of a loaded checkpoint."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with hidden_progress_bars():
            yield
    finally:
        logging.set_verbosity(level)


def refuse_single_batch(batches: Any, name: str = "batches") -> None:
    """Raise a TypeError that names the argument if it is one batch instead of an iterable of batches."""
    if isinstance(batches, Mapping | Tensor):
        raise TypeError(f"{name} is one batch alone. Pass an iterable of batches, such as [batch].")


def leading_batches(batches: Iterable[Batch], tokens: int) -> list[Batch]:
    """Return the first batches, until they have so many tokens together."""
    chosen: list[Batch] = []
    for batch in batches:
        chosen.append(batch)
        rows = next(iter(batch.values()))
        tokens -= batch["input_ids"].numel() if "input_ids" in batch else len(rows) * TOKENS_OF_OTHERS
        if tokens <= 0:
            break
    return chosen


def torch_device(name: str) -> Any:
    """Return the torch device of a name such as `"cpu"` or `"cuda:0"`; a ValueError if there is no such device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        message = str(error).strip().splitlines()[0]
        raise ValueError(f"device {name!r} is unknown ({message}). Use cpu, or cuda on a GPU.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: torch finds no GPU here. Use cpu.")
    return device

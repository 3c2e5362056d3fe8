"""Packed batches: several documents in one row, each computed as if it were a row of its own, in linear time.

`cu_seq_lens_q` (Transformers' name for the first token of each document, and the end) says where documents lie. It
travels as a keyword argument to every attention layer, through gradient checkpointing and from device to device.
`before_model` adds it where `position_ids` begin again. Some models keep it from their layers, so the masks that they
make meanwhile carry the boundaries too; `after_model` objects if no layer was reached.

A layer gathers documents of similar length into small batches, runs its attention on these, and scatters the outputs
back: no mechanism needs to know.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from . import source_guards
from .cache import FILLED_CACHE, replace_static_layers, self_attention_cache
from .context import InterfaceCall, ModelRun, forward_context, is_patched, layer_context
from .discovery import AttentionLayer, config_value
from .models import checkpoints_gradients, parent_names
from .positions import check_positions, find_tables

#: The argument with the boundaries: `[n + 1]`, the first token of each document and the end.
BOUNDARIES = "cu_seq_lens_q"
#: Name of the attribute of a model around patched layers that is its `ModelContext`.
MODEL_CONTEXT = "_linear_attention_model_context"

BOUNDARIES_LOST = (
    "{} does not hand cu_seq_lens_q to its attention, so that packed documents would see each other. Pass padded rows "
    "with an attention_mask."
)
STATE_LOST = (
    "{} goes on from its state by one token only, and {} tokens would begin anew. Pass one token at a time after the "
    "first call (chunk_length=1 in read_stream, no prefill_chunk_size in generate)."
)
#: Method of models (Gemma 4) that cuts masks to the last queries, all as if they were 4D, unless `logits_to_keep` is
#: None.
KEEPS_LAST_QUERIES = "_maybe_slice_kv_shared_inputs"
#: Attribute of a mask: the boundaries of the packed batch that it belongs to.
MASK_BOUNDARIES = "_linear_attention_boundaries"
#: Attribute of a padding mask, or else of the boundaries: the `Documents` that the first layer has made of them.
DOCUMENTS = "_linear_attention_documents"

#: Documents go into one batch if the shortest lacks at most this share of the longest, or so many tokens.
MAX_PADDING_SHARE, MAX_PADDING_TOKENS = 1 / 8, 16

Attend = Callable[[InterfaceCall], tuple[Tensor, Tensor | None]]
"""One call of attention -> the output `[n, L, H, e]` and the weights `[n, H, L, L]` or None."""


# ------------------------------------------------------------------------------------------------ Where documents begin


@torch.compiler.disable
def find_documents(position_ids: Tensor, *, any_jump: bool = False) -> Tensor | None:
    """Return the boundaries `[n + 1]` of the documents in position ids `[B, S]`; None where each row is one document.

    A document is a run of positions that go up by one, and all begin with the same one (0; 2 in RoBERTa), or anywhere
    with `any_jump`. Anything else says nothing about documents: permuted, repeated or skipped positions.
    """
    first = torch.ones_like(position_ids[:, :1], dtype=torch.bool)
    begins = torch.cat([first, position_ids.diff(dim=1) != 1], dim=1)
    starts = begins.flatten().nonzero().squeeze(1)
    if len(starts) == len(position_ids):
        return None
    if not any_jump:
        values = position_ids.reshape(-1)[starts]
        if len(starts) == position_ids.numel() or bool((values != values[0]).any()):
            return None
    end = torch.tensor([position_ids.numel()], device=starts.device)
    return torch.cat([starts, end]).to(torch.int32)


@dataclass(frozen=True)
class ModelContext:
    """What the hooks must know of a model around patched layers."""

    #: Names of the arguments of its `forward`, in order.
    arguments: tuple[str, ...]
    takes_any_argument: bool
    #: Whether keyword arguments reach its attention, as far as the source says.
    passes_arguments_on: bool
    #: Whether a decoder's own masks begin a document at every jump of the positions, where there can be no cache.
    splits_at_jumps: bool
    causal: bool
    #: A part that mixes tokens without attention (see `token_mixer`), or "".
    token_mixer: str
    #: A part that several tokens after a cache make begin anew (see `restarting_mixer`), or "".
    restarting_mixer: str
    #: The names of its learned tables of positions.
    position_tables: tuple[str, ...]
    #: The attention implementation of its config before it was patched.
    exact_implementation: str
    #: The names of its self-attention modules.
    attention: tuple[str, ...]


def model_context(module: nn.Module) -> ModelContext | None:
    """Return the context of a model around patched layers; None for any other module."""
    return getattr(module, MODEL_CONTEXT, None)


def token_mixer(model: nn.Module, attention: Sequence[str]) -> str:
    """Return name and class of a part of a model that mixes tokens without regard to boundaries of documents; or "".

    That is a convolution over the sequence, or a layer without one of these attention modules in a stack of layers.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not any(layer.startswith(f"{name}.") for layer in attention):
            continue
        for number, part in enumerate(module):
            path = f"{name}.{number}"
            has_attention = any(layer.startswith(f"{path}.") for layer in attention)
            convolves = any(isinstance(m, nn.Conv1d) and m.kernel_size[0] > 1 for m in part.modules())
            if has_attention and not convolves:
                continue
            if not any(BOUNDARIES in source_guards.forward_source(kind) for kind in map(type, part.modules())):
                return f"{path} ({type(part).__name__})"
    return ""


def restarting_mixer(model: nn.Module) -> str:
    """Return name and class of a part of a model whose recurrent state goes on by one token only; or ""."""
    restarting = ((name, type(part)) for name, part in model.named_modules())
    return next((f"{name} ({cls.__name__})" for name, cls in restarting if source_guards.restarts_its_state(cls)), "")


def boundaries_of(kwargs: dict[str, Any], mask: Tensor | None) -> Tensor | None:
    """Return the boundaries `[n + 1]` that a layer received, as an argument or with its mask; or None."""
    boundaries = kwargs.get(BOUNDARIES)
    if boundaries is None and mask is not None:
        boundaries = getattr(mask, MASK_BOUNDARIES, None)
    if boundaries is not None and forward_context.runs:
        forward_context.runs[-1].layers_reached += 1
    return boundaries


def _is_packed(inputs: dict[str, Any]) -> bool:
    """Return whether the arguments of a call say where documents begin."""
    positions = inputs.get("position_ids")
    if inputs.get(BOUNDARIES) is not None:
        return True
    if not isinstance(positions, Tensor) or positions.dim() != 2 or inputs.get("attention_mask") is not None:
        return False
    return find_documents(positions) is not None


def check_exact_packing(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Raise where an exact model would run the packed documents of a batch into each other, without a word.

    Of those that call no flash attention, only models that make masks by their positions keep documents apart.
    """
    packed = _is_packed(inputs)
    masked = inputs.get("attention_mask") is not None
    makes_masks = not masked and any(source_guards.makes_masks_by_positions(type(part)) for part in model.modules())
    implementation = str(config_value(model, "_attn_implementation"))
    if packed and not makes_masks and "flash" not in implementation and not is_patched(model):
        raise NotImplementedError(
            f"{type(model).__name__} is exact and would run packed documents (position_ids that begin again, or "
            f"{BOUNDARIES}) into each other. Pass padded rows."
        )


# ---------------------------------------------------------------------------------------------------------------- Hooks


def add_model_hooks(model: nn.Module, layers: Sequence[AttentionLayer]) -> list[Any]:
    """Put the hooks on every model around these self-attention layers, the nearest `PreTrainedModel` of each.

    Returns those that had none yet.
    """
    modules = {layer.module for layer in layers}
    added: list[Any] = []
    for layer in layers:
        parent = layer.around
        if model_context(parent) is not None:
            continue
        inside = [name for name, module in parent.named_modules() if module in modules]
        path = [type(parent.get_submodule(part)) for part in (inside[0], *parent_names(inside[0]))]
        calls = [cls for cls in path if not issubclass(cls, nn.ModuleList)]
        names, kwargs = source_guards.argument_names(type(parent))
        context = ModelContext(
            arguments=names,
            takes_any_argument=kwargs is not None,
            passes_arguments_on=all(map(source_guards.passes_keyword_arguments_on, calls)),
            splits_at_jumps=layer.causal and source_guards.makes_masks_by_positions(type(parent)),
            causal=layer.causal,
            token_mixer=token_mixer(parent, inside),
            restarting_mixer=restarting_mixer(parent),
            position_tables=tuple(table.name for table in find_tables(parent) if table.owner is parent),
            exact_implementation=parent.config._attn_implementation or "eager",
            attention=tuple(inside),
        )
        setattr(parent, MODEL_CONTEXT, context)
        parent.register_forward_pre_hook(before_model, with_kwargs=True)
        parent.register_forward_hook(after_model, always_call=True)
        added.append(parent)
    if added and model not in added and source_guards.drops_arguments(type(model)):
        model.register_forward_pre_hook(refuse_packing, with_kwargs=True)
    return added


def refuse_packing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on packed documents: forward pre-hook of a model that drops what says where they begin."""
    if torch.compiler.is_compiling() or not _is_packed(kwargs):
        return
    if kwargs.get("position_ids") is None or "position_ids" not in source_guards.argument_names(type(module))[0]:
        raise NotImplementedError(BOUNDARIES_LOST.format(type(module).__name__))


def remove_hooks(module: nn.Module, *others: Callable[..., Any]) -> None:
    """Remove the hooks of a model around patched layers, and others, from a module, where it has them."""
    vars(module).pop(MODEL_CONTEXT, None)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, hook in hooks.items() if hook in (before_model, after_model, *others)]:
            for table in (hooks, module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called):
                table.pop(number, None)


def before_model(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hand boundaries on where position ids begin again: forward pre-hook of a model around patched layers.

    The mask of ones that is added with them keeps Transformers from making a mask `[B, 1, L, L]` of the same documents.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        forward_context.runs.append(ModelRun(module))
    context = model_context(module)
    assert context is not None
    positional = dict(zip(context.arguments, args, strict=False))
    inputs = {**positional, **kwargs}
    tokens = _tokens(inputs)
    if (cache := self_attention_cache(inputs.values())) is not None:
        replace_static_layers(cache, module.config)
    if hasattr(module, KEEPS_LAST_QUERIES):
        kwargs = {**kwargs, "logits_to_keep": None}
    if not compiling:
        _check_cache_and_length(module, context, inputs, tokens)
        if tokens is not None and tokens.shape[1] > 1:
            _check_layers(module, context)
    boundaries = inputs.get(BOUNDARIES)
    if boundaries is None:
        boundaries = _boundaries_from_positions(module, context, inputs)
    if boundaries is None or tokens is None:
        return args, kwargs
    _check_packed_inputs(module, context, inputs)
    added: dict[str, Any] = {}
    if inputs.get(BOUNDARIES) is None and context.takes_any_argument:
        added = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    if inputs.get("attention_mask") is None and "attention_mask" in context.arguments:
        added["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if not compiling:
        forward_context.runs[-1] = ModelRun(module, boundaries, (tokens.shape[0], tokens.shape[1]))
    if set(positional) & set(added):  # An explicit None was passed by position.
        args = tuple(added.pop(name, value) for name, value in positional.items())
    return args, {**kwargs, **added}


def after_model(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Raise if no layer has seen the boundaries: forward hook of a model around patched layers."""
    if forward_context.runs:  # There is none where the model is compiled as a whole.
        _end_run(module, output)


@torch.compiler.disable
def _end_run(module: nn.Module, output: Any) -> None:
    if forward_context.runs[-1].module is not module:
        return
    run = forward_context.runs.pop()
    if run.boundaries is not None and output is not None and not run.layers_reached:
        raise NotImplementedError(BOUNDARIES_LOST.format(type(module).__name__))


def _check_cache_and_length(
    module: nn.Module, context: ModelContext, inputs: dict[str, Any], tokens: Tensor | None
) -> None:
    """Raise where gradient checkpointing would keep a cache from the layers, where a part would not go on from it, or
    positions end before the input."""
    needed = module.training or context.position_tables or context.restarting_mixer
    cache = self_attention_cache(inputs.values()) if needed else None
    seen = 0 if cache is None else int(cache.get_seq_length())
    if seen and context.restarting_mixer and tokens is not None and tokens.shape[1] > 1:
        raise NotImplementedError(STATE_LOST.format(context.restarting_mixer, tokens.shape[1]))
    if seen and checkpoints_gradients(module):
        raise ValueError(
            f"Gradient checkpointing keeps the cache from the layers of {type(module).__name__} in training mode, and "
            f"with it the {seen} tokens that it holds. Call model.eval() or model.gradient_checkpointing_disable(), or "
            "pass no cache (PEFT's prefix tuning makes one)."
        )
    if tokens is not None and context.position_tables:
        check_positions(module, context.position_tables, inputs, seen + tokens.shape[1])


def _check_layers(module: nn.Module, context: ModelContext) -> None:
    """Raise where a layer was put in afterwards that is exact: it reads masks that this model does not make."""
    for name in context.attention:
        try:
            part = module.get_submodule(name)
        except AttributeError:  # pruned since
            continue
        if layer_context(part) is None and source_guards.calls_interface(type(part)):
            raise ValueError(
                f"The layer {name!r} of {type(module).__name__} was put in after it was patched, and is exact: the "
                "patched model makes no masks for it. Put it in before patch_model (after unpatch_model), and name the "
                "layers to patch with layers=."
            )


def _check_packed_inputs(module: nn.Module, context: ModelContext, inputs: dict[str, Any]) -> None:
    kind = type(module).__name__
    if "position_ids" in context.arguments and inputs.get("position_ids") is None:
        raise ValueError(
            f"{BOUNDARIES} needs position_ids that begin again with each document: without them {kind} counts "
            "positions over all documents. DataCollatorWithFlattening makes both."
        )
    if context.token_mixer:
        raise NotImplementedError(
            f"Packed documents (position_ids that begin again, or {BOUNDARIES}) would run into each other in {kind}: "
            f"{context.token_mixer} mixes tokens without attention and knows no boundaries. Pass padded rows."
        )
    if torch.compiler.is_compiling() and not context.passes_arguments_on:  # Elsewhere the masks carry the boundaries.
        raise NotImplementedError(BOUNDARIES_LOST.format(kind))
    cache = self_attention_cache(inputs.values())
    if cache is not None and int(cache.get_seq_length()):
        raise NotImplementedError(FILLED_CACHE)


def _boundaries_from_positions(module: nn.Module, context: ModelContext, inputs: dict[str, Any]) -> Tensor | None:
    """Return the boundaries of the documents that positions describe; None where each row is one document."""
    positions = inputs.get("position_ids")
    tokens = _tokens(inputs)
    if not isinstance(positions, Tensor) or inputs.get("attention_mask") is not None or tokens is None:
        return None
    if positions.dim() != 2 or positions.shape[1] < 2:
        return None
    use_cache = inputs.get("use_cache")
    if use_cache is None:
        use_cache = config_value(module, "use_cache", False)
    cache = self_attention_cache(inputs.values())
    if context.causal and torch.compiler.is_compiling() and (cache is not None or not use_cache):
        # Without a cache Transformers makes a full mask of these positions, which stays in the graph; generate(), which
        # hands a cache over, continues single sequences.
        return None
    # This is Transformers' own rule where there can be no cache; with one it takes positions for positions.
    any_jump = context.splits_at_jumps and cache is None and not use_cache
    return find_documents(positions.expand(tokens.shape[0], -1), any_jump=any_jump)


def _tokens(inputs: dict[str, Any]) -> Tensor | None:
    return next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)


# ------------------------------------------------------------------------------------------------------------ Documents


@dataclass(frozen=True)
class Group:
    """Documents of similar length, as one batch `[n, L]`."""

    #: The tokens of the documents in the flattened batch.
    index: Tensor
    #: Which of them are real, or None where all are.
    mask: Tensor | None

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the part of `[B, H, S, d]` that belongs to the group, `[n, H, L, d]`."""
        flat = tensor.transpose(1, 2).reshape(-1, tensor.shape[1], tensor.shape[3])
        return flat[self.index].transpose(1, 2)


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to, or None for tensors of the inference mode, which do not count."""
    return None if tensor.is_inference() else tensor._version


class Documents:
    """The documents of a batch `[B, S]`, in groups of similar length.

    The elements of all groups are at most 8/7 of the tokens, or 16 a document more; there are at most some 8 groups for
    each doubling of the length, so that the number of calls does not grow with the number of documents. Where `padding`
    `[B, S]` is False a token is in no document, and its output is zero.
    """

    def __init__(self, boundaries: Tensor, shape: tuple[int, int], padding: Tensor | None = None) -> None:
        self.shape = shape
        originals = [boundaries] if padding is None else [boundaries, padding]
        # The last one carries the documents: with a reference to itself it would stay until garbage is collected.
        self._boundaries = boundaries if padding is not None else None
        self._values = [tensor.clone() for tensor in originals]
        self._versions = list(map(_version, originals))
        device = boundaries.device
        edges: list[int] = boundaries.tolist()
        _check_edges(edges, shape)
        if padding is None or bool(padding.all()):
            self._tokens = torch.arange(edges[-1], device=device)
        else:
            real = padding.reshape(-1).to(device)
            self._tokens = real.nonzero().squeeze(1)
            real_before = torch.nn.functional.pad(real.cumsum(0), (1, 0))
            edges = real_before[torch.tensor(edges, device=device)].tolist()
        self.lengths = [stop - start for start, stop in pairwise(edges) if stop > start]
        self._starts = [0, *accumulate(self.lengths)]
        self.groups = [self.group(numbers) for numbers in _group_by_length(self.lengths)]

    def are_of(self, shape: tuple[int, int], *tensors: Tensor) -> bool:
        """Return whether these are the documents of a batch of this shape, with these boundaries (and padding)."""
        if self.shape != shape or [tensor.device for tensor in tensors] != [value.device for value in self._values]:
            return False
        is_same = len(tensors) == 1 or tensors[0] is self._boundaries
        versions = list(map(_version, tensors))
        # Values are compared only where the tensors do not tell: on a GPU that would wait for it, in each layer.
        if is_same and None not in versions and versions == self._versions:
            return True
        return all(map(torch.equal, tensors, self._values))

    def group(self, numbers: Sequence[int]) -> Group:
        """Return some of the documents as one padded batch, in this order."""
        device = self._tokens.device
        sizes = [self.lengths[number] for number in numbers]
        starts = torch.tensor([self._starts[number] for number in numbers], device=device)[:, None]
        lengths = torch.tensor(sizes, device=device)[:, None]
        column = torch.arange(max(sizes), device=device)
        # Padding repeats the last token of its document, so that it is finite; it is masked.
        index = self._tokens[starts + torch.minimum(column, lengths - 1)]
        return Group(index, None if min(sizes) == max(sizes) else column < lengths)


def document_numbers(boundaries: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the number of the document that each token of a batch lies in, `[B, S]`."""
    tokens = torch.arange(shape[0] * shape[1], device=boundaries.device)
    return torch.searchsorted(boundaries[1:].contiguous(), tokens, right=True).view(shape)


def _check_edges(edges: list[int], shape: tuple[int, int]) -> None:
    batch, length = shape
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != batch * length or edges != sorted(edges):
        raise ValueError(
            f"{BOUNDARIES} must go up from 0 to the {batch * length} tokens of the batch ({batch} x {length}), got "
            f"{edges[:6]}{'…' if len(edges) > 6 else ''} with {edges[-1:]} at the end."
        )
    crossed = {row * length for row in range(batch)} - set(edges)
    if crossed:
        raise ValueError(
            f"A document of {BOUNDARIES} lies over two rows of the batch (at token {min(crossed)} of {batch} x "
            f"{length}): each row must begin a document."
        )


def _group_by_length(lengths: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not groups or longest - lengths[number] > max(longest * MAX_PADDING_SHARE, MAX_PADDING_TOKENS):
            longest = lengths[number]
            groups.append([])
        groups[-1].append(number)
    return groups


def documents_of(boundaries: Tensor, shape: tuple[int, int], padding: Tensor | None) -> Documents:
    """Return the documents of an attention call, which the first layer computes and the others take from its tensors.

    (Where these have moved to another device, or were written over, they are computed again.)
    """
    tensors = (boundaries,) if padding is None else (boundaries, padding)
    documents: Documents | None = getattr(tensors[-1], DOCUMENTS, None)
    if documents is None or not documents.are_of(shape, *tensors):
        documents = Documents(boundaries, shape, padding)
        setattr(tensors[-1], DOCUMENTS, documents)
    return documents


@torch.compiler.disable
def run_packed(attend: Attend, call: InterfaceCall, documents: Documents) -> tuple[Tensor, Tensor | None]:
    """Run attention on every group of documents; for an observer on all of them, in a single padded batch.

    Returns:
        The output `[B, S, H, e]`, and the weights `[B, H, S, S]` if `attend` returns any.
    """
    count = len(documents.lengths)
    groups = [documents.group(range(count))] if call.context.observer and count else documents.groups
    batch, length = documents.shape
    indices, outputs = [], []
    weights: list[tuple[Group, Tensor]] = []
    for group in groups:
        q, k, v = (group.gather(tensor) for tensor in (call.query, call.key, call.value))
        part = replace(call, query=q, key=k, value=v, mask=group.mask, first_call=group is groups[0])
        out, group_weights = attend(part)
        if group_weights is not None:
            weights.append((group, group_weights))
        flat, index = out.flatten(0, 1), group.index.flatten()
        if group.mask is not None:
            real = group.mask.flatten().nonzero().squeeze(1)
            flat, index = flat[real], index[real]
        outputs.append(flat)
        indices.append(index)
    if not outputs:
        return call.value.new_zeros(batch, length, call.query.shape[1], call.value.shape[3]), None
    joined = torch.cat(outputs)
    scattered = joined.new_zeros(batch * length, *joined.shape[1:]).index_copy(0, torch.cat(indices), joined)
    return scattered.unflatten(0, (batch, length)), _scatter_weights(documents.shape, weights) if weights else None


def _scatter_weights(shape: tuple[int, int], weights: list[tuple[Group, Tensor]]) -> Tensor:
    """Return the weights of the documents as blocks of `[B, H, S, S]`; 0 between documents."""
    batch, length = shape
    first = weights[0][1]
    scattered = first.new_zeros(batch, first.shape[1], length, length)
    for group, group_weights in weights:
        for number, index in enumerate(group.index):
            index = index if group.mask is None else index[group.mask[number]]
            row, columns = int(index[0]) // length, index % length
            scattered[row][:, columns[:, None], columns] = group_weights[number, :, : len(index), : len(index)]
    return scattered

"""Longer inputs for models that look their positions up in a learned table: BERT, RoBERTa, GPT-2, OPT, BART, …

A table `[reserved + L, D]` holds a vector for each of L positions, behind rows that stand for no position (padding).
What else depends on L in a model is found by building it twice, with the present and with the new limit in its config
and without memory for its parameters: buffers are taken from there, and other parameters of another shape are refused.
"""

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import LinearAttentionConfig
from ..utils.formatting import near_matches
from .context import attention_modules, mechanism_of
from .discovery import config_value, longest_input
from .models import all_configs, base_class, check_model, model_around, outermost_models, unshare_configs

#: Field of a config whose positions `patch_model` has extended: the limit that `unpatch_model` restores.
EXTENDED_FROM = "linear_attention_extended_from"

#: What a table of positions is called in its module.
TABLE = re.compile(r"wpe|pos_emb|positions_embed|embed_positions|(\w+_)?position_embeddings?")
#: How far keys may be from a rotation of earlier ones, relative to how far they were turned: by rounding.
LARGEST_ROTATION_ERROR = 0.1
#: Config fields that a table may take its size from; models and tables copy some of them onto themselves.
LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions")
COPIED_LIMITS = ("max_position_embeddings", "max_source_positions", "max_target_positions", "max_length")


def _tile(table: Tensor, length: int) -> Tensor:
    """Row i is row i mod L of the old table. (Of a shorter table than the old one, these are its first rows.)"""
    return table.repeat(-(-length // table.shape[0]), 1)[:length]


def _interpolate(table: Tensor, length: int) -> Tensor:
    """Row i lies at i·(L - 1)/(N - 1) of the old table, between its two neighbours; the ends stay."""
    columns = table.T[None].double()
    return nn.functional.interpolate(columns, length, mode="linear", align_corners=True)[0].T.to(table.dtype)


#: `how` -> (old positions `[L, D]`, N) -> `[N, D]`.
METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {"tile": _tile, "interpolate": _interpolate}


def extend_positions(
    model: PreTrainedModel, max_length: int, how: str = "tile", *, tokenizer: Any = None
) -> PreTrainedModel:
    """Extend the learned absolute positions of a model to `max_length` tokens, in place, and return the model.

    Tables, the buffers beside them and the config change together, so that it saves and loads as before. Rows that
    stand for no position (RoBERTa's first two, OPT's and BART's offset) stay. Patched models and exact ones are served
    alike; these positions stay when the model is unpatched. The new positions were never trained: fine-tune with
    long inputs. Make optimizers afterwards: the tables are new parameters.

    Args:
        model: BERT, RoBERTa, ELECTRA, ALBERT, DistilBERT, GPT-2, OPT, BART, ESM or another with such a table.
        max_length: N, the longest input in tokens; every shorter table of the model grows to it.
        how: `"tile"` repeats the table (Beltagy et al. 2020, arXiv:2004.05150): inputs that fitted before give
            bit-equal outputs. `"interpolate"` stretches it linearly: neighbours come closer, and all outputs change.
        tokenizer: its `model_max_length` becomes `max_length` too.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: `how` is unknown, or the model takes more tokens already.
        NotImplementedError: Positions are rotary, computed or absent, or belong to image patches (the message names the
            remedy), or something else in the model depends on their number. Nothing is changed then.
    """
    check_model(model)
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        raise TypeError(f"tokenizer must be a tokenizer of Transformers, got {type(tokenizer).__name__}.")
    roots = outermost_models(model)
    change = plan_extension(model, max_length, roots, how)
    unshare_configs(*roots)
    change.apply(model)
    if tokenizer is not None:
        tokenizer.model_max_length = max_length
    return model


@dataclass(frozen=True)
class PositionTable:
    """A learned table of positions, and the model that its config belongs to."""

    name: str
    module: nn.Embedding
    owner: PreTrainedModel
    #: The field of the owner's config that says how many positions there are.
    field: str

    @property
    def limit(self) -> int:
        """The longest input in tokens."""
        return self.module.num_embeddings - _reserved(self.module)


class LimitChange(NamedTuple):
    """A new value for the field of a model's config that states a limit of positions."""

    owner: PreTrainedModel
    field: str
    present: int
    value: int
    #: The present limit in tokens, without the rows that stand for no position.
    tokens: int


@dataclass
class PositionChange:
    """New tensors and limits for a model, all computed; applying them cannot fail half-way."""

    tensors: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    limits: list[LimitChange] = field(default_factory=list)

    @property
    def added(self) -> int:
        """Tokens that the longest input of the model grows by."""
        return min((limit.value - limit.present for limit in self.limits), default=0)

    def apply(self, model: PreTrainedModel, *, record: bool = False) -> None:
        """Assign the new tensors and limits to a model that owns its configs (see `unshare_configs`).

        With `record` the configs record the present limits, so that `unpatch_model` can restore them; otherwise the
        new positions are the model's own, and no config has such a record any more.
        """
        owner_configs = {id(table.owner.config) for table in find_tables(model)}
        other_configs = [config for config in all_configs(model) if id(config) not in owner_configs]
        for module, name, tensor in self.tensors:
            old = module._parameters.get(name)
            if old is not None:
                module.register_parameter(name, nn.Parameter(tensor, requires_grad=old.requires_grad))
                setattr(module, "num_embeddings", tensor.shape[0])  # noqa: B010  (of an nn.Embedding)
            else:
                setattr(module, name, tensor)
        for limit in self.limits:
            self._apply_limit(limit)
            # Parts may hold copies of the config that is saved (ProphetNet).
            same_class = [config for config in other_configs if type(config) is type(limit.owner.config)]
            copies = [config for config in same_class if getattr(config, limit.field) == limit.present]
            for config in (limit.owner.config, *copies):
                setattr(config, limit.field, limit.value)
                if record:
                    setattr(config, EXTENDED_FROM, limit.tokens)
        if not record:
            for config in all_configs(model):
                vars(config).pop(EXTENDED_FROM, None)

    def _apply_limit(self, limit: LimitChange) -> None:
        """Change what modules have copied of a limit."""
        tables = [module for module, attribute, _ in self.tensors if attribute == "weight"]
        for module, attribute in product((limit.owner, *tables), COPIED_LIMITS):
            if vars(module).get(attribute) == limit.present:
                setattr(module, attribute, limit.value)


def find_tables(model: PreTrainedModel) -> list[PositionTable]:
    """Return the learned tables of positions whose size a config states."""
    modules = dict(model.named_modules())
    tables = []
    for name, module in modules.items():
        if not isinstance(module, nn.Embedding) or not TABLE.fullmatch(name.rpartition(".")[2]):
            continue
        if "Sinusoid" in type(module).__name__:
            continue
        owner = modules[model_around(name, modules)]
        size = module.num_embeddings - _offset(module)
        stated = [limit for limit in LIMITS if config_value(owner, limit) == size]
        if stated:
            tables.append(PositionTable(name, module, owner, stated[0]))
    return tables


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the longest input in tokens that the model's learned positions allow; None without such positions."""
    return min((table.limit for table in find_tables(model)), default=None)


def first_position(model: PreTrainedModel) -> int:
    """Return the position of the first token, which models with rows for padding (RoBERTa) do not count from 0."""
    return max((_reserved(table.module) - _offset(table.module) for table in find_tables(model)), default=0)


def length_limit(model: PreTrainedModel) -> int | None:
    """Return the longest input in tokens that both the positions of a model and its mechanisms allow; None: any."""
    options = [vars(mechanism_of(module).options) for module in attention_modules(model)]
    limits = [position_limit(model) or longest_input(model), *(values.get("max_length") for values in options)]
    return min((limit for limit in limits if limit is not None), default=None)


def has_position_table(model: PreTrainedModel) -> bool:
    """Return whether positions are looked up in a table of limited size. Rotary positions are computed instead."""
    config = model.config.get_text_config(decoder=False)
    return not rotary_scaling(config) and longest_input(model) is not None


def rotary_scaling(config: Any) -> dict[str, Any] | None:
    """Return the parameters of rotary positions in the config of a text model; None where it has none."""
    return getattr(config, "rope_parameters", None)


def check_positions(model: nn.Module, tables: Sequence[str], inputs: Mapping[str, Any], total: int) -> None:
    """Raise a ValueError where a call would read beyond a learned table of positions.

    Args:
        model: The model that runs.
        tables: The names of its tables.
        inputs: The arguments of its `forward`, by name.
        total: The tokens of the input, with those of its cache.
    """
    for name in tables:
        table: Any = model.get_submodule(name)
        limit = table.num_embeddings - _reserved(table)
        if total > limit and _reads_beyond(table, limit, inputs):
            kind = base_class(type(model)).__name__
            raise ValueError(
                f"This {kind} has positions for {limit} tokens, and the input has {total}. Shorten it (in the "
                f"tokenizer: truncation=True, max_length={limit}), or extend the positions: "
                f"patch_model(model, …, max_length={total}), or extend_positions(model, {total}) where it is patched."
            )


def _reads_beyond(table: nn.Embedding, limit: int, inputs: Mapping[str, Any]) -> bool:
    """Return whether an input of more than `limit` tokens reads beyond a table: its padding may have no positions."""
    positions, ids, mask = (inputs.get(name) for name in ("position_ids", "input_ids", "attention_mask"))
    if positions is not None:
        return int(positions.max()) >= (limit if _offset(table) else table.num_embeddings)
    if _offset(table) and "attention_mask" in inspect.signature(table.forward).parameters:  # OPT counts real tokens
        return mask is None or mask.dim() != 2 or int(mask.sum(dim=1).max()) > limit
    if table.padding_idx is not None and ids is not None:  # so does RoBERTa
        return int((ids != table.padding_idx).sum(dim=1).max()) > limit
    return True


def check_max_length(max_length: object) -> int:
    """Raise a TypeError or ValueError unless it is a positive integer."""
    if isinstance(max_length, bool) or not isinstance(max_length, int):
        raise TypeError(f"max_length must be a positive integer, got {max_length!r} ({type(max_length).__name__}).")
    if max_length < 1:
        raise ValueError(f"max_length must be a positive integer, got {max_length!r}.")
    return max_length


def plan_extension(
    model: PreTrainedModel, max_length: int, roots: Sequence[PreTrainedModel], how: str = "tile"
) -> PositionChange:
    """Compute what `extend_positions` would assign in a part of these models; it raises the same errors."""
    check_max_length(max_length)
    if how not in METHODS:
        raise ValueError(
            f"Unknown how {how!r}.{near_matches(str(how), list(METHODS))} Available: {', '.join(METHODS)}."
        )
    tables = find_tables(model)
    if not tables:
        raise NotImplementedError(
            f"{base_class(type(model)).__name__} cannot be extended: its {no_table_reason(model)}."
        )
    limit = min(table.limit for table in tables)
    if max_length < limit:
        raise ValueError(
            f"max_length={max_length} is less than the {limit} tokens that this {type(model).__name__} takes already. "
            "Positions are only extended; to shorten inputs, truncate them in the tokenizer."
        )
    extended = [table for table in tables if table.limit < max_length]
    _check_part(model, extended, roots)
    return _resize(dict.fromkeys(extended, max_length), METHODS[how])


def plan_length(
    model: PreTrainedModel, config: LinearAttentionConfig, max_length: int, roots: Sequence[PreTrainedModel]
) -> tuple[LinearAttentionConfig, PositionChange]:
    """Return what `max_length=` makes of a plan and of the positions; a ValueError where that is nothing at all."""
    limit = position_limit(model)
    filled = config.with_default("max_length", max_length)
    if check_max_length(max_length) > (limit or max_length):
        return filled, plan_extension(model, max_length, roots)
    if max_length != limit and filled == config:
        reason = f"its {no_table_reason(model)}" if limit is None else f"it takes {limit} already"
        raise ValueError(
            f"max_length={max_length} would change nothing: no mechanism given lacks a value for its 'max_length', and "
            f"this {type(model).__name__} has no positions to extend to {max_length} tokens ({reason}). Leave it out."
        )
    return filled, PositionChange()


def _check_part(model: PreTrainedModel, extended: Iterable[PositionTable], roots: Sequence[PreTrainedModel]) -> None:
    """Raise where a model is a part of one that has other tables of the same config, which has one limit for both."""
    inside = {id(module) for module in model.modules()}
    limits = {(id(table.owner.config), table.field) for table in extended}
    for root in roots:
        for table in find_tables(root):
            if id(table.module) not in inside and (id(table.owner.config), table.field) in limits:
                raise NotImplementedError(
                    f"The positions of this {base_class(type(model)).__name__} cannot be extended alone: the "
                    f"{base_class(type(root)).__name__} around it has others ({table.name}) of the same "
                    f"{table.field} in its config. Extend those of the whole model: extend_positions(model, …)."
                )


def plan_restoration(model: PreTrainedModel) -> PositionChange:
    """Compute what removes the positions that `patch_model` has added; the others stay as they are by now."""
    limits = {table: vars(table.owner.config).get(EXTENDED_FROM) for table in find_tables(model)}
    return _resize({table: limit for table, limit in limits.items() if limit is not None}, _tile)


def no_table_reason(model: PreTrainedModel) -> str:
    """Say why there is no learned table of positions, and what to do instead."""
    kinds = " ".join(type(module).__name__ for module in model.modules())
    if "Sinusoid" in kinds or _has_table(model.named_buffers()):
        return "positions are computed sinusoids, not learned. Load it anew with a larger limit in its config"
    if hasattr(model.config.get_text_config(decoder=False), "image_size"):
        return (
            "positions belong to a grid of image patches, not to a length. Pass interpolate_pos_encoding=True to "
            "forward() where it is taken: it interpolates the grid (not the class tokens) to the size of each image"
        )
    if "Rotary" in kinds or "RoPE" in kinds:
        return (
            "positions are rotary: they are computed, and go on beyond any limit by themselves. To scale them for "
            "lengths that it was not trained on, set Transformers' rope_parameters in its config before loading"
        )
    if _has_table(model.named_parameters()):
        return "learned positions are in a table whose size no known field of its config states"
    return "positions are in no learned table with a limit: nothing keeps it from longer inputs"


@torch.no_grad()
def _resize(lengths: Mapping[PositionTable, int], method: Callable[[Tensor, int], Tensor]) -> PositionChange:
    """Compute new tensors for the tables, by their new lengths, and for all that depends on their size."""
    change = PositionChange()
    for table, length in lengths.items():
        owner, name = table.owner, table.field
        if any(limit.owner is owner and limit.field == name for limit in change.limits):
            continue  # All that depends on the field was resized with its first table.
        present: Any = config_value(owner, name)
        added = length - table.limit
        change.limits.append(LimitChange(owner, name, present, present + added, table.limit))
        before = _twin_tensors(owner, name, present)
        after = _twin_tensors(owner, name, present + added)
        for path, twin in after.items():
            if path in before and before[path].shape == twin.shape:
                continue
            module_path, _, tensor_name = path.rpartition(".")
            module = owner.get_submodule(module_path)
            old: Tensor = getattr(module, tensor_name)
            if twin.is_meta and isinstance(module, nn.Embedding) and len(twin) == len(old) + added:
                reserved = _reserved(module)
                new = torch.cat([old[:reserved], method(old[reserved:], len(old) - reserved + added)])
            elif not twin.is_meta and (old.is_meta or torch.equal(before[path].to(old), old)):
                new = twin.to(old)
            else:
                raise NotImplementedError(
                    f"The positions of {base_class(type(owner)).__name__} cannot be extended: {path} (of shape "
                    f"{tuple(old.shape)}) depends on their number too, in a way that is not known."
                )
            change.tensors.append((module, tensor_name, new))
    return change


def _twin_tensors(owner: PreTrainedModel, name: str, limit: int) -> dict[str, Tensor]:
    """Return the parameters, without memory, and the buffers of the model built anew with this limit in its config."""
    config = copy.deepcopy(owner.config)
    setattr(config, name, limit)
    with torch.device("cpu"), init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[]):
        twin: nn.Module = base_class(type(owner))(config)
    return {**dict(twin.named_parameters()), **dict(twin.named_buffers())}


def _offset(module: nn.Module) -> int:
    """Return how many rows a table (OPT, BART) has more than its config says."""
    offset = getattr(module, "offset", 0)
    return offset if isinstance(offset, int) else 0


def _reserved(module: nn.Embedding) -> int:
    """Return the rows before that of the first position: an offset, or those up to the padding's (RoBERTa, ESM)."""
    return _offset(module) or (0 if module.padding_idx is None else module.padding_idx + 1)


def _has_table(tensors: Iterable[tuple[str, Tensor]]) -> bool:
    names = (name.split(".")[-2:] for name, _ in tensors)
    return any(map(TABLE.fullmatch, chain.from_iterable(names)))


# --------------------------------------------------------------------------------------------------- Rotary positions


def rotary_buffers(model: nn.Module) -> list[Tensor]:
    """Return the frequencies ω `[r/2]` by which a model's rotary positions turn pairs of coordinates, of every kind."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]


def rotary_frequencies(model: nn.Module, keys: Tensor, later: Tensor, distance: int) -> Tensor | None:
    """Return the frequency ω of each coordinate of a layer's keys, `[d]`, by which of the model's rotations fits them.

    Pairs of coordinates lie half a rotation's width apart or side by side, in the first or the last coordinates; those
    outside have ω = 0.

    Args:
        model: The model, with its buffers of frequencies.
        keys: Keys of some tokens, `[..., d]`.
        later: Keys of the same tokens `distance` positions later.
        distance: How many positions.

    Returns:
        ω, or None where keys do not differ, or no rotation explains how they do.
    """
    width, candidates = keys.shape[-1], []
    for buffer in rotary_buffers(model):
        frequencies, size = buffer.to(keys), 2 * len(buffer)
        if size > width:
            continue
        cos = (distance * frequencies).cos()
        sin = (distance * frequencies).sin()
        columns = torch.arange(size, device=keys.device)
        for pairs in (columns.view(2, -1), columns.view(-1, 2).T):  # half a width apart, side by side
            for first, second in (pairs, pairs + width - size):
                rotated = keys.clone()
                candidate = keys.new_zeros(width)
                rotated[..., first] = keys[..., first] * cos - keys[..., second] * sin
                rotated[..., second] = keys[..., second] * cos + keys[..., first] * sin
                candidate[first] = candidate[second] = frequencies
                candidates.append((float((rotated - later).norm()), candidate))
    difference, candidate = min(candidates, key=itemgetter(0), default=(math.inf, keys))
    return candidate if difference <= LARGEST_ROTATION_ERROR * float((later - keys).norm()) else None

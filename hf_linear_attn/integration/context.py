"""What the hooks and functions of a patched model share: one object per layer, and one per thread.

All that we know of a layer hangs on its attention module, in one attribute (`LayerContext`); all that must travel
during a forward pass beside the arguments is in `ForwardContext`. Gradient checkpointing calls the layers again when
that is gone: only what is an argument of the layer, such as a mark of `packing` on a mask, still arrives.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from ..config import LayerConfig
from ..ops.calls import AttentionInputs
from ..ops.common import ACCELERATE_HOOK
from ..ops.ranks import Ranks
from ..ops.terms import Terms, no_terms

#: Name of our attention implementation, in Transformers' interface and in the `config.json` of patched checkpoints.
IMPLEMENTATION = "hf_linear_attn"
#: Name of the submodule of a patched attention module. (List it in PEFT's `modules_to_save`.)
SUBMODULE = "linear_attention"
#: Name of the attribute of an attention module that is its `LayerContext`.
LAYER_CONTEXT = "_linear_attention_context"
#: Name of the attribute of a mechanism that is set where its parameters are shards with the heads of this process.
SHARDED_HEADS = "_linear_attention_sharded_heads"
#: Name of the small module beside the weights of a patched checkpoint.
CODE_MODULE = "modeling_hf_linear_attn"
#: Field that the config of a patched model carries into `config.json`, beside `CONFIG_FIELD`.
IMPLEMENTATION_FIELD = "attn_implementation"


@dataclass
class LayerContext:
    """What a patched model knows of one attention module: a patched layer, an exact one, or cross-attention."""

    name: str
    exact_implementation: str
    #: None in cross-attention, where the module's flag counts.
    causal: bool | None
    #: The `discovery.Direction` that the module declared when it was patched.
    declared: tuple[bool, bool] | None = None
    #: Whether its model makes causal masks for it, though it is bidirectional by its flag (see `AttentionLayer`).
    masks_causal: bool = False
    runs_exactly: bool = False
    #: The mechanism of the layer with its options; None where it is exact.
    layer_config: LayerConfig | None = None
    #: What is called with the inputs and the exact outputs of each call while `runs_exactly`.
    observer: Callable[[Any], Tensor | None] | None = None
    #: The processes of context parallelism, inside of `context_parallel`.
    ranks: Ranks | None = None


@dataclass(slots=True)
class InterfaceCall:
    """The arguments of one call of the attention interface, and what our function has worked out of them.

    Shapes, `scaling`, `causal` and `first_call` are those of `AttentionInputs`; `is_causal` is the caller's own. The
    mask may be a full one `[B | 1, H | 1, L, S]`.
    """

    module: nn.Module
    context: LayerContext
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    scaling: float
    causal: bool
    is_causal: bool | None
    kwargs: dict[str, Any]
    first_call: bool = True
    terms: Terms = field(default_factory=no_terms)

    @property
    def label(self) -> str:
        """The layer as error messages name it."""
        kind = type(self.module).__name__
        return f"{kind} ({self.context.name})" if self.context.name else kind

    def visible(self) -> Tensor:
        """Return which keys each query may see, `[B | 1, H | 1, L, S]`; a full mask as it is."""
        return self.inputs(self.mask).visible()

    def inputs(self, mask: Tensor | None) -> AttentionInputs:
        """Return the call without a cache, with this mask, as mechanisms receive it."""
        tensors = (self.query, self.key, self.value)
        return AttentionInputs(*tensors, self.scaling, self.causal, mask, terms=self.terms)


@dataclass
class ModelRun:
    """A model around patched layers that is running, with the boundaries `[n + 1]` and sizes B, S of a packed batch."""

    module: nn.Module
    boundaries: Tensor | None = None
    shape: tuple[int, int] = (0, 0)
    #: The number of layers that have seen the boundaries so far.
    layers_reached: int = 0


class ForwardContext(threading.local):
    """What travels during a forward pass in one thread (a model may run in several) beside our arguments."""

    def __init__(self) -> None:
        #: The models around patched layers that are running, the innermost last. The mask function, which gets neither
        #: the model nor its position ids, reads the boundaries of a packed batch here.
        self.runs: list[ModelRun] = []
        #: The state layer whose `update` an attention module has just called (it does not pass it to the attention), if
        #: any. A list that is changed in place: where a compiled graph breaks, Dynamo forgets what was assigned to an
        #: attribute of a `threading.local` (torch 2.13), and the attention would run without its state.
        self.cache_layers: list[CacheLayerMixin] = []
        #: Whether weights that are requested are those of cross-attention, which no state stands for.
        self.only_cross_weights = False
        #: The masks of an earlier call and of this one that a state layer has last compared.
        self.compared_masks: tuple[Tensor | None, Tensor | None] = (None, None)

    def take_cache_layer(self) -> Any:
        """Return the state layer of the present attention call and forget it; None if the call uses no cache."""
        return self.cache_layers.pop() if self.cache_layers else None

    def packed_run(self) -> ModelRun | None:
        """Return the innermost running model if it runs on a packed batch."""
        run = self.runs[-1] if self.runs else None
        return None if run is None or run.boundaries is None else run


forward_context = ForwardContext()


def layer_context(module: nn.Module) -> LayerContext | None:
    """Return the context of an attention module of a patched model; None for any other module."""
    return getattr(module, LAYER_CONTEXT, None)


def mechanism_of(module: nn.Module) -> Any:
    """Return the linear attention of an attention module; None where it has none."""
    return module._modules.get(SUBMODULE)


def attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the attention modules of a patched model that have a linear attention."""
    for module in model.modules():
        if layer_context(module) is not None and mechanism_of(module) is not None:
            yield module


def is_learned(name: str) -> bool:
    """Return whether the name of a parameter or a buffer is that of a linear attention."""
    return f".{SUBMODULE}." in f".{name}"


def saved_tensors(model: nn.Module, which: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """Return the parameters and the saved buffers, each once, whose names match (None: all)."""
    saved = model.state_dict()
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in tensors if name in saved and (which is None or which(name))}


def is_patched(model: nn.Module) -> bool:
    """Return whether `patch_model` has been applied to this model, to a part of it, or to a model around it."""
    return next(attention_modules(model), None) is not None


# -------------------------------------------------------------------------------- Weights that are elsewhere, or shards


def in_memory(mechanism: nn.Module) -> AbstractContextManager[Any]:
    """Context manager inside of which the mechanism and its parts have the weights of the heads that they see.

    accelerate's hooks (`device_map` with "cpu" or "disk", `cpu_offload`) surround `forward` only, and other methods of
    a mechanism and of its parts read weights as well. Under tensor parallelism the weights are this process's
    own shards. Without either this costs next to nothing.
    """
    if SHARDED_HEADS in mechanism.__dict__:
        return _sharded_heads(mechanism)
    hooked = [module for module in mechanism.modules() if ACCELERATE_HOOK in module.__dict__]
    if not hooked or torch.compiler.is_compiling():
        return nullcontext()
    with ExitStack() as stack:
        for module in hooked:
            hook: Any = module.__dict__[ACCELERATE_HOOK]
            hook.pre_forward(module)
            stack.callback(hook.post_forward, module, None)
        return stack.pop_all()


@contextmanager
def _sharded_heads(mechanism: nn.Module) -> Iterator[None]:
    shards: list[tuple[nn.Module, dict[str, Any]]] = [(part, dict(part._parameters)) for part in mechanism.modules()]
    for module, parameters in shards:
        module._parameters.update({name: shard.to_local() for name, shard in parameters.items() if shard is not None})
    try:
        yield
    finally:
        for module, parameters in shards:
            module._parameters.update(parameters)

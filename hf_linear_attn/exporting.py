"""A patched checkpoint as a graph of ONNX or OpenVINO, or as a program of `torch.export`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .utils.options import check_options, make_config, option

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What the exporters write: the file that says how a folder is loaded.
RESULT = "export.json"

#: Format -> the extra with the packages that it needs, these packages, and what Transformers calls it.
FORMATS = {
    "onnx": ("export", ("onnx", "onnxscript", "onnxruntime"), "onnx"),
    "openvino": ("openvino", ("openvino",), "openvino"),
    "torch": ("export", (), "dynamo"),
}

#: Largest difference from the model's outputs, relative to their largest number.
TOLERANCE = 1e-4

#: The same with caches in int8, where a number next to the middle of two may be rounded either way.
INT8_TOLERANCE = 0.05

#: Lengths of the rows of a batch that is traced, and of those that the graph is checked with.
TRACED_LENGTHS = (9, 23)
CHECKED_LENGTHS = ((64, 33), (7,), (65, 2, 40))


@dataclass(frozen=True)
class ExportConfig:
    """Options of `export`."""

    model: str = option(help="a folder of a patched checkpoint, or a repository on the Hub")
    output: str = option(help="the folder to write")
    format: Literal["onnx", "openvino", "torch"] = option(
        "onnx", "ONNX, OpenVINO's .xml and .bin, or torch.export's .pt2"
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option(
        "float32", "precision of the weights (auto: as saved)"
    )
    overwrite: bool = option(False, "replace an earlier result in the output folder")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ExportResult:
    """What `export` wrote."""

    output: str
    components: tuple[str, ...]  #: The graphs.
    #: Of the outputs from the model's, at most, relative to the largest of them; None for decoders in other formats
    #: than ONNX.
    difference: float | None

    def __str__(self) -> str:
        checked = (
            "" if self.difference is None else f"; outputs differ from the model's by {self.difference:.0e} at most"
        )
        return f"Exported to {self.output}: {', '.join(self.components)}{checked}"


def export(config: ExportConfig | None = None, **options: Any) -> ExportResult:
    """Export a patched checkpoint with a free batch and length, to a folder that appears completely or not at all.

        export(model="out", output="out-onnx")

    A model that generates becomes two graphs: `prefill`, and `decode` with the states as inputs and outputs, or as
    variables in OpenVINO. The folder has the tokenizer's files too;
    `transformers.exporters.base.ExportedModel.from_pretrained(folder)` loads it, a .pt2 with `trust_remote_code=True`,
    since it holds pickles.

    Args:
        config: All options at once.
        **options: Fields of `ExportConfig`, which override those of `config`.

    Returns:
        The names of the graphs, and how far their outputs are from the model's.

    Raises:
        ImportError: Packages of the extra `export`, or `openvino`, are missing.
        ValueError: The checkpoint is not patched, or the folder must not be replaced.
        NotImplementedError: An encoder-decoder, a mechanism that cannot be exported with a free length, a decoder in
            half precision, or bfloat16 to ONNX.
        RuntimeError: The exported graph computes something else than the model.
    """
    from .checkpoints import copy_companions, load_pretrained
    from .utils.extras import require_packages
    from .utils.files import atomic_folder, check_output

    config = make_config(ExportConfig, config, options)
    check_output(config.output, [RESULT], overwrite=config.overwrite, source=config.model)
    extra, packages, _ = FORMATS[config.format]
    require_packages("transformers.exporters", *packages, extra=extra, purpose="The export")
    model = load_pretrained(config.model, dtype=config.dtype).eval()
    exported, difference = export_model(model, config.format)
    with atomic_folder(Path(config.output).absolute()) as temporary:
        exported.save_pretrained(temporary)
        copy_companions(config.model, temporary, None)
        check_output(config.output, [RESULT], overwrite=config.overwrite, source=config.model)
    return ExportResult(config.output, tuple(exported.components), difference)


def export_model(model: PreTrainedModel, format: str) -> tuple[Any, float | None]:
    """Return Transformers' `ExportedModel`, and how far its outputs are from the model's (`ExportResult`)."""
    from torch.export import Dim
    from transformers.exporters.auto import get_exporter_class

    from .integration.positions import length_limit
    from .integration.repeated_calls import tracing_once
    from .ops.graph_nodes import placing_nodes

    _check_exportable(model, format)
    exporter: Any = get_exporter_class(FORMATS[format][2])()
    # Of torch.onnx's optimisations one rewrite rule takes longer than all else: it goes through the graph once a node.
    settings = partial(exporter.config_class, **({"optimize": False} if format == "onnx" else {}))
    limit = length_limit(model)
    inputs = padded_inputs(model, [min(length, limit or length) for length in TRACED_LENGTHS])
    nodes = ExitStack()
    if format == "onnx":
        nodes.enter_context(placing_nodes())
        nodes.enter_context(tracing_once(model))
    if model.can_generate():
        config = settings(dynamic=True)
        if format == "openvino":  # the states are outputs of the first graph, and variables of the second
            config = {"prefill": settings(dynamic=True, stateful=False), "decode": config}
        if format == "onnx":
            free = _free_sizes(model, inputs, limit)
            config = {name: settings(dynamic_shapes=shapes) for name, shapes in free.items()}
        try:
            with nodes:
                exported = simplified(exporter.export_for_generation(model, inputs, config))
        except RuntimeError as error:  # which names the graph only
            if isinstance(error.__cause__, NotImplementedError):
                raise error.__cause__ from None
            raise
        if format == "openvino":
            _link_states(exported)
        is_checked = format == "onnx" and "prefill" in exported.components
        return exported, _difference_of_tokens(model, exported, limit) if is_checked else None
    sizes = {0: Dim("batch", min=1, max=65536), 1: Dim("length", min=2, max=limit or 1 << 20)}
    shapes = dict.fromkeys(inputs, sizes)
    with nodes:
        exported = simplified(exporter.export(model, dict(inputs), settings(dynamic_shapes=shapes)))
    if format == "openvino":  # which computes in bfloat16 by default where the processor can
        exported.to("cpu", config={"INFERENCE_PRECISION_HINT": "f32"})
    return exported, _difference(model, exported, limit)


def _free_sizes(model: PreTrainedModel, inputs: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Return which sizes of the inputs of a decoder's graphs are free, as `torch.export` reads it, by graph.

    They are those that differ between two batches. Were all sizes free, each state would have symbols of its own, which
    torch finds out to be constants one by one.
    """
    import torch
    from torch.export import Dim
    from torch.utils._pytree import tree_leaves
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model
    from transformers.exporters.utils import apply_patches, decompose_for_generation, prepare_for_export

    def free(first: Any, second: Any) -> Any:
        if not isinstance(first, torch.Tensor):  # a cache
            return [free(*pair) for pair in zip(tree_leaves(first), tree_leaves(second), strict=True)]
        sizes = enumerate(zip(first.shape, second.shape, strict=True))
        return {axis: Dim.AUTO for axis, (size, other) in sizes if size != other}

    def captured(batch: dict[str, Any]) -> dict[str, Any]:
        graphs = decompose_for_generation(model, batch)
        return {name: prepare_for_export(*graph)[1] for name, graph in graphs.items()}

    register_cache_pytrees_for_model(model)
    lengths = [min(length + 1, limit or length + 1) for length in (*TRACED_LENGTHS, 1)]
    with apply_patches("dynamo"):  # a graph keeps the keys of sliding layers from before the window
        first, second = captured(inputs), captured(padded_inputs(model, lengths))
    return {
        name: {key: free(value, second[name][key]) for key, value in values.items()} for name, values in first.items()
    }


def _check_exportable(model: PreTrainedModel, format: str) -> None:
    """Raise a NotImplementedError on a model that cannot be exported to a format."""
    import torch

    if model.config.is_encoder_decoder:
        raise NotImplementedError("Encoder-decoders are not tested. Use Transformers' exporters, and compare outputs.")
    reason = None
    if model.can_generate() and model.dtype in (torch.float16, torch.bfloat16):
        reason = "its states are float32, and Transformers' exporters trace them in the precision of the model"
    elif format == "onnx" and model.dtype == torch.bfloat16:
        reason = "ONNX Runtime has no bfloat16 on the CPU, where the graph is compared with the model"
    if reason is not None:
        name = str(model.dtype).removeprefix("torch.")
        raise NotImplementedError(f"This model cannot be exported in {name}: {reason}. Export with dtype='float32'.")


def _difference(model: PreTrainedModel, exported: Any, limit: int | None) -> float:
    """Return the largest difference of an encoder's graph from the model, relative to the largest of its outputs.

    A RuntimeError where it is more than rounding. `limit` is the longest input in tokens.
    """
    import torch

    differences = []
    for inputs in _checked_inputs(model, limit):
        real = inputs["attention_mask"].bool()
        with torch.no_grad():
            expected = model(**inputs)[0]
            actual = exported(**inputs)[0].to(model.device)
        if expected.shape[:2] == real.shape:  # one output a token
            expected, actual = expected[real], actual[real]
        differences.append(_relative(expected, actual))
    return _checked(differences, TOLERANCE if model.dtype == torch.float32 else sys.float_info.max)


def _difference_of_tokens(model: PreTrainedModel, exported: Any, limit: int | None) -> float:
    """Return the largest difference of the logits of a decoder's graphs, of a prompt and of tokens after it."""
    import onnxruntime
    import torch
    from transformers import DynamicCache

    from .integration.cache import LinearStateLayer, state_layer
    from .integration.cache_argument import cache_argument, output_cache
    from .utils.models import accepted

    settings = onnxruntime.SessionOptions()  # optimising takes longer than these short inputs
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    runners = copy(exported).to("cpu", session_options=settings).runners
    differences = []
    rounds = False
    for inputs in _checked_inputs(model, limit):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        known: Any = None
        cache: Any = DynamicCache(config=model.config.get_text_config())
        length = ids.shape[1]
        start = 0
        for stop in (length - 2, length - 1, length):
            tokens = accepted(model, input_ids=ids[:, start:stop], position_ids=positions[:, start:stop])
            tokens["attention_mask"] = mask[:, :stop]
            with torch.no_grad():
                expected = model(**tokens, **cache_argument(model, known), use_cache=True)
            known = output_cache(expected)
            if start == 0:  # a graph takes the empty states of linear layers
                for index, layer in enumerate(known.layers):
                    if isinstance(layer, LinearStateLayer):
                        state_layer(cache, index)
            actual = runners["decode" if start else "prefill"](**tokens, **cache_argument(model, cache))
            cache = output_cache(actual)
            real = mask[:, stop - 1].bool()
            differences.append(_relative(expected.logits[real, -1], actual.logits[real, -1].to(model.device)))
            start = stop
        states = [layer.state or {} for layer in known.layers if isinstance(layer, LinearStateLayer)]
        rounds |= any(any(tensor.dtype == torch.int8 for tensor in state.values()) for state in states)
    return _checked(differences, INT8_TOLERANCE if rounds else TOLERANCE)


def _checked_inputs(model: PreTrainedModel, limit: int | None) -> Iterator[dict[str, Any]]:
    for lengths in CHECKED_LENGTHS:
        yield padded_inputs(model, [min(length, limit or length) for length in lengths])


def _relative(expected: Any, actual: Any) -> Any:
    """Return the largest difference from what is expected, relative to the largest number there."""
    import torch

    size = expected.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return ((expected - actual).abs().max() / size).cpu()


def _checked(differences: list[Any], tolerance: float) -> float:
    """Return the largest difference. A RuntimeError where it is more than the tolerance, or no number."""
    import torch

    worst = float(torch.stack(differences).max())  # keeps NaN
    if not worst <= tolerance:
        raise RuntimeError(
            f"The exported graph's outputs differ from the model's by {worst:.1e} of the largest, more than rounding. "
            "Please report it, with the model's config."
        )
    return worst


def simplified(exported: Any) -> Any:
    """Fold the constants of the ONNX graphs of an `ExportedModel`, join what is equal in them, and return it.

    Layers of one length then share their masks and positions. The rest of optimising is ONNX Runtime's, as it loads.
    """
    if exported.export_format != "onnx":
        return exported
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass
    from onnxscript import optimizer

    from .integration.repeated_calls import expand_calls
    from .ops.graph_nodes import DOMAIN
    from .ops.onnx_functions import replace_nodes

    for component in exported.components.values():
        expand_calls(component.program)
        optimizer.inline(component.program)
        replace_nodes(component.program)
        optimizer.inline(component.program)
        component.program.opset_imports.pop(DOMAIN, None)
        optimizer.fold_constants(component.program)
        CommonSubexpressionEliminationPass()(component.program)
        optimizer.remove_unused_nodes(component.program)
        _hide_weights_of_heads(component.program.graph)
    return exported


def _hide_weights_of_heads(graph: Any) -> None:
    """Let ONNX Runtime's quantization leave products with a weight a head as they are.

    It takes all weights for those of linear layers, and could not run these with one scale a channel.
    """
    import onnx_ir as ir

    for node in list(graph):
        if node.op_type != "MatMul" or not node.inputs[1].is_initializer() or len(node.inputs[1].shape) < 3:
            continue
        hidden = ir.node("Identity", [node.inputs[1]])
        graph.insert_before(node, hidden)
        node.replace_input_with(1, hidden.outputs[0])


def _link_states(exported: Any) -> None:
    """Make the states that OpenVINO's first graph returns those that the second one begins with.

    They get the names and the types of its variables. Inputs and variables that are never read go: OpenVINO could not
    load such a variable. (That is the number of earlier tokens, where the mask says it.)
    """
    from openvino.preprocess import PrePostProcessor

    prefill, decode = (exported.components[name].program for name in ("prefill", "decode"))
    for parameter in prefill.get_parameters():
        if not parameter.output(0).get_target_inputs():
            prefill.remove_parameter(parameter)
    states = {node.get_variable_id(): node for node in decode.get_ops() if node.get_type_name() == "ReadValue"}
    for sink in decode.get_sinks():
        name = sink.get_variable_id()
        reordered = [target.get_node() for target in states[name].output(0).get_target_inputs()]  # by beam_idx
        if not any(node.output(0).get_target_inputs() for node in reordered):
            decode.remove_sink(sink)
            decode.remove_variable(decode.get_variable_by_id(name))
    types = {variable.info.variable_id: variable.info.data_type for variable in decode.get_variables()}
    paths = ((port.any_name.removeprefix("output."), port) for port in prefill.outputs)
    names = {f"input.{path}output.{path}": port for path, port in paths}
    processor = PrePostProcessor(prefill)
    for name, type in types.items():
        processor.output(names[name].any_name).tensor().set_element_type(type)
    exported.components["prefill"].program = processor.build()
    for name in types:
        names[name].get_tensor().set_names({name})


def padded_inputs(model: PreTrainedModel, lengths: Any) -> dict[str, Any]:
    """Return a batch of rows of these lengths, padded on the left where the model generates."""
    import torch

    from .measure.speed import synthetic_inputs

    inputs = synthetic_inputs(model, range(5, 5 + min(40, model.config.get_text_config().vocab_size - 5)), max(lengths))
    inputs = {name: tensor.repeat(len(lengths), 1) for name, tensor in inputs.items()}
    column = torch.arange(max(lengths))
    size = torch.tensor(lengths)[:, None]
    real = (column >= max(lengths) - size if model.can_generate() else column < size).to(model.device)
    # The head of a decoder reads the last token that is no padding, and finds it by the token.
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    ids = inputs["input_ids"] if pad is None else inputs["input_ids"].masked_fill(~real, pad)
    return {**inputs, "input_ids": ids, "attention_mask": real.long()}

"""One of several processes on a CPU (gloo) that compare a model on several devices with the same model on one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import output_cache
from tests.comparing import GRADIENT_FACTOR, TOLERANCE
from tests.small import SMALL_OPTIONS, open_far_part
from tests.tiny_models import VOCABULARY, tiny_model

BATCH, LENGTH = 3, 40
#: Where slices of 2 and of 4 processes begin and end: some are shorter than a window.
CUTS = {2: [0, 13, 40], 4: [0, 3, 17, 30, 40]}


def build(architecture: str, name: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class = AutoModelForMaskedLM if architecture == "bert" else None
    return randomise(hla.patch_model(tiny_model(architecture, model_class), name, **options))


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Heads differ, and nothing learned is at its start: what is outside of the windows counts."""
    open_far_part(model)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "linear_attention" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def tokens(padding: str, length: int = LENGTH) -> dict[str, Tensor]:
    """Rows of a batch, one of them with fewer tokens than a window."""
    ids = torch.randint(2, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    positions = torch.arange(length).expand(BATCH, -1)
    if padding == "right":
        mask[0, length - 3 :], mask[1, 3:], mask[2, 29:] = 0, 0, 0
    elif padding == "left":
        mask[0, :5], mask[1, : length - 3], mask[2, :23] = 0, 0, 0
        positions = (mask.cumsum(1) - 1).clamp_min(0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def assert_close(actual: Tensor, expected: Tensor, factor: float = 1.0, label: str = "") -> None:
    error = float((actual - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1e-6))
    assert error < factor * TOLERANCE[torch.float32], f"{label}: {error:.1e}"


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return grads


def slices_equal_the_whole(architecture: str, name: str, **options: Any) -> None:
    """Prefill, and the gradients of a training step, with and without padding."""
    model = build(architecture, name, **options)
    cuts = CUTS[distributed.get_world_size()]
    piece = slice(*cuts[distributed.get_rank() :][:2])
    for padding in ("none", "right", "left"):
        batch = tokens(padding)
        real = batch["attention_mask"].unsqueeze(-1)
        factors = real * torch.randn(BATCH, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(2))
        expected = model(**batch).logits
        (expected * factors).sum().backward()
        full = gradients(model)
        part = {key: value[:, piece] for key, value in batch.items()}
        with hla.context_parallel(model, distributed.group.WORLD):
            with torch.no_grad():
                prefill = model(**part).logits
            out = model(**part).logits
            (out * factors[:, piece]).sum().backward()
        for logits in (prefill, out):
            assert_close(logits * real[:, piece], (expected * real)[:, piece], label=f"{name} {padding}")
        for key, gradient in gradients(model).items():
            distributed.all_reduce(gradient)
            assert_close(gradient, full[key], GRADIENT_FACTOR, f"{name} {padding} {key}")


def bytes_sent(model: PreTrainedModel, length: int, backward: bool = False) -> int:
    """Bytes that this process hands to collectives in one pass over its slice of a sequence."""
    sent = 0

    def count(original: Any) -> Any:
        def collective(first: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += args[0].nbytes if isinstance(first, list) else first.nbytes
            return original(first, *args, **kwargs)

        return collective

    size, rank = distributed.get_world_size(), distributed.get_rank()
    part = {key: value.chunk(size, dim=1)[rank] for key, value in tokens("none", length).items()}
    with pytest.MonkeyPatch.context() as patch, hla.context_parallel(model, distributed.group.WORLD):
        for name in ("all_gather", "all_reduce"):
            patch.setattr(distributed, name, count(getattr(distributed, name)))
        with torch.set_grad_enabled(backward):
            model(**part)
    return sent


def communication_does_not_grow() -> None:
    layers, groups, head, features = 2, 2, 8, 256
    state_size = groups * features * (head + 1)
    causal, bidirectional = (build(architecture, "hedgehog") for architecture in ("llama", "bert"))
    options = {"window_size": 4, "sink_tokens": 2}
    decoder, encoder = (build(architecture, "window", **options) for architecture in ("llama", "bert"))
    for length in (32, 96):
        assert bytes_sent(causal, length) == 4 * layers * BATCH * state_size
        assert bytes_sent(bidirectional, length) == 4 * layers * BATCH * 2 * state_size  # of 4 heads
        edges = 4 + 2  # of a window and sinks
        codes = groups * 128 * (head + 1)  # outside of the windows
        sent = 4 * (codes + groups * edges * 2 * head) + 8 * (2 + 2 * edges)
        assert bytes_sent(decoder, length) == layers * BATCH * sent
        edges, rows = 2 * (3 + 2), 4 * 2 * 2  # borders and sinks of both ends; queries of sinks in 4 heads
        sent = 4 * (2 * codes + 4 * edges * 2 * head + rows * (head + head + 2)) + 8 * (2 + 2 * edges)
        assert bytes_sent(encoder, length) == layers * BATCH * sent


def mesh_of_accelerate() -> None:
    size = distributed.get_world_size()
    mesh = ParallelismConfig(cp_size=size).build_device_mesh("cpu")
    model = build("llama", "hedgehog")
    with hla.context_parallel(model, mesh["cp"]):
        part = {key: value.chunk(size, dim=1)[mesh.get_local_rank("cp")] for key, value in tokens("none").items()}
        out = model(**part).logits
    assert_close(out, model(**tokens("none")).logits.chunk(size, dim=1)[mesh.get_local_rank("cp")])


def refusals() -> None:
    batch = tokens("none")
    group = distributed.group.WORLD
    mixture = {"default": "window", "0": "softmax"}
    for architecture, attention in (("bert", "linformer"), ("bert", "nystrom"), ("llama", mixture)):
        model = hla.patch_model(tiny_model(architecture), attention)
        with pytest.raises(NotImplementedError, match="cannot be split over processes"):
            hla.context_parallel(model, group).__enter__()
    with pytest.raises(ValueError, match="is not patched"):
        hla.context_parallel(tiny_model("llama"), group).__enter__()
    with pytest.raises(NotImplementedError, match="saturation"):
        bytes_sent(build("bert", "window", window_size=4, saturation=8), LENGTH)
    model = build("llama", "hedgehog")
    begin_again = torch.arange(LENGTH).remainder(10).expand(BATCH, -1)
    with hla.context_parallel(model, group):
        with pytest.raises(ValueError, match="needs position_ids"):
            model(batch["input_ids"])
        with pytest.raises(ValueError, match="not those of a contiguous slice"):
            model(batch["input_ids"], position_ids=begin_again)
        with pytest.raises(NotImplementedError, match="a cache"):
            model(batch["input_ids"], position_ids=batch["position_ids"] + 1, use_cache=True)
        with pytest.raises(NotImplementedError, match="exact attention"), hla.exact_attention(model):
            model(batch["input_ids"], position_ids=batch["position_ids"] + 1)
    assert output_cache(model(batch["input_ids"])) is not None


def tensor_parallel(name: str, folder: Path, **options: Any) -> None:
    """Loading, prefill, decoding, gradients and saving of a model whose heads are split; patching one that is split."""
    size, batch = distributed.get_world_size(), tokens("none")["input_ids"]
    torch.manual_seed(0)
    exact = tiny_model("llama", num_key_value_heads=4)
    if distributed.get_rank() == 0:
        exact.save_pretrained(folder / "exact")
    model = randomise(hla.patch_model(exact, name, **options))
    if distributed.get_rank() == 0:
        model.save_pretrained(folder / name)
    distributed.barrier()
    plan: dict[str, Any] = {"distributed_config": {"tp_size": size, "tp_plan": "auto"}}
    new = AutoModelForCausalLM.from_pretrained(folder / "exact", **plan)
    hla.patch_model(new, name, **options)
    split = hla.load_pretrained(str(folder / name), **plan)
    for patched in (new, split):
        mechanism = patched.model.layers[0].self_attn.linear_attention
        assert all(parameter.to_local().shape[0] == 4 // size for parameter in mechanism.parameters())
    assert str(hla.patch_report(split)).splitlines()[0] == str(hla.patch_report(model)).splitlines()[0]
    expected = model(batch, labels=batch)
    out = split(batch, labels=batch)
    assert_close(out.logits, expected.logits)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(split.generate(batch, **settings), model.generate(batch, **settings))
    expected.loss.backward()
    out.loss.backward()
    full = gradients(model)
    for key, parameter in split.named_parameters():
        gradient: Any = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        assert_close(gradient, full[key], GRADIENT_FACTOR, key)
    split.save_pretrained(folder / f"{name}-again")
    distributed.barrier()
    again = hla.load_pretrained(str(folder / f"{name}-again")).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())
    hla.unpatch_model(split)
    assert_close(split(batch).logits, hla.unpatch_model(model)(batch).logits)
    with pytest.raises(NotImplementedError, match="exact_heads"):
        hla.patch_model(split, name, exact_heads=[0], **options)


def main(task: str, folder: Path) -> None:
    distributed.init_process_group("gloo")
    if task == "quick":
        slices_equal_the_whole("llama", "window", window_size=4, sink_tokens=2)
        slices_equal_the_whole("bert", "window", window_size=4, sink_tokens=2)
        slices_equal_the_whole("bert", "hedgehog")
        communication_does_not_grow()
        mesh_of_accelerate()
        refusals()
    elif task == "context":
        for name in ("hedgehog", "favor+", "favor")[:: distributed.get_world_size() // 2]:
            for architecture in ("llama", "bert"):
                slices_equal_the_whole(architecture, name, **({"num_features": 24} if "favor" in name else {}))
        for width, sinks, feature_map in ((1, 0, "hedgehog"), (4, 2, "favor+"), (6, 8, "elu")):
            options = {"window_size": width, "sink_tokens": sinks, "feature_map": feature_map}
            for architecture in ("llama", "bert"):
                slices_equal_the_whole(architecture, "window", **options)
    else:
        for name in ("window", "hedgehog", "gla"):
            options = {key: SMALL_OPTIONS[key] for key in ("window_size", "sink_tokens") if name == "window"}
            tensor_parallel(name, folder, **options)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

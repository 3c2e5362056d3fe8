"""The recurrent state as a cache layer, against a plain list of tokens."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

import hf_linear_attn as hla
from hf_linear_attn.integration.cache import LinearStateLayer, state_layer
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.integration.context import forward_context
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.registry import ATTENTIONS
from tests.cases import every_pair
from tests.comparing import assert_close, logits
from tests.inputs import token_ids
from tests.small import patched, randomize_learned
from tests.tiny_models import DECODERS, GPT2, LLAMA


def summed(inputs):
    """A toy state: the sum of all keys, `[B]`."""
    total = inputs.key.sum(dim=(1, 2, 3))
    return {"sum": total if inputs.state is None else inputs.state["sum"] + total}


class Pair:
    """A cache layer and the plain model of it: one list of numbers per row."""

    def __init__(self, rows):
        self.layer, self.rows, self.next = LinearStateLayer(), [[] for _ in range(rows)], 1.0

    def append(self, count):
        new = torch.arange(self.next, self.next + len(self.rows) * count).view(len(self.rows), count)
        self.next += new.numel()
        for row, tokens in zip(self.rows, new.tolist(), strict=True):
            row.extend(tokens)
        key = new[:, None, :, None].double()
        self.layer.expect_update()
        self.layer.update(key, key)
        assert forward_context.take_cache_layer() is self.layer
        inputs = AttentionInputs(key, key, key, 1.0, True, state=self.layer.state_for(key), return_state=True)
        self.layer.advance(summed(inputs), inputs, summed)

    def rearrange(self, order):
        self.rows = [list(self.rows[row]) for row in order]

    def check(self):
        if not self.rows[0]:
            assert self.layer.get_seq_length() == 0
            return
        assert self.layer.get_seq_length() == len(self.rows[0])
        assert self.layer.state["sum"].tolist() == [sum(row) for row in self.rows]
        assert self.layer.get_mask_sizes(3) == (len(self.rows[0]) + 3, 0)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "reorder", "repeat", "select", "reset", "record", "crop", "offload", "copy"]),
        st.integers(0, 5),
    ),
    max_size=14,
)


def apply(pair, recorded, operation, number):
    """One operation on both sides; returns the number of tokens that may be taken back, None where not recording."""
    layer, rows = pair.layer, len(pair.rows)
    if operation == "append" or not layer.is_initialized:
        pair.append(number + 1)
        return None if recorded is None else recorded + number + 1
    if operation == "reorder":
        order = [(row + number) % rows for row in range(rows)]
        layer.reorder_cache(torch.tensor(order))
        pair.rearrange(order)
    elif operation == "repeat" and rows < 8:
        layer.batch_repeat_interleave(2)
        pair.rearrange([row for row in range(rows) for _ in range(2)])
    elif operation == "select":
        order = [number % rows, rows - 1]
        layer.batch_select_indices(torch.tensor(order))
        pair.rearrange(order)
    elif operation == "reset":
        layer.reset()
        pair.rows = [[] for _ in pair.rows]
        return None if recorded is None else 0
    elif operation == "record":
        layer.activate_past_recording()
        return recorded or 0
    elif operation == "crop" and recorded is not None and number <= recorded:
        layer.crop(-number)
        pair.rows = [row[: len(row) - number] for row in pair.rows]
        return 0
    elif operation == "offload":
        layer.offload()
        layer.prefetch()
    elif operation == "copy":
        pair.layer = copy.deepcopy(layer)
    return recorded


@given(operations=OPERATIONS, rows=st.integers(1, 3))
def test_any_sequence_of_operations_keeps_the_tokens(operations, rows):
    pair, recorded = Pair(rows), None
    for operation, number in operations:
        recorded = apply(pair, recorded, operation, number)
        pair.check()


def test_cropping_without_a_record_is_refused():
    pair = Pair(1)
    pair.append(5)
    with pytest.raises(ValueError, match=r"Cannot remove the last 2 tokens.*activate_past_recording"):
        pair.layer.crop(-2)
    pair.check()
    pair.layer.activate_past_recording()
    pair.append(3)
    with pytest.raises(ValueError, match=r"Cannot remove the last 4 tokens.*3 tokens recorded"):
        pair.layer.crop(-4)
    with pytest.raises(ValueError, match=r"crop\(2\).*negative"):
        pair.layer.crop(2)
    pair.check()


def test_an_update_that_nobody_announced_is_refused():
    layer = LinearStateLayer()
    with pytest.raises(RuntimeError, match=r"given to one without\. Start with a new cache"):
        layer.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))


def test_adopting_keeps_what_is_ours_and_refuses_foreign_tokens():
    cache = DynamicCache()
    layer = state_layer(cache, 1)
    assert state_layer(cache, 1) is layer
    cache.layers[0].update(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, 1))
    with pytest.raises(ValueError, match="Layer 0 of this cache has 3 tokens of exact attention"):
        state_layer(cache, 0)


# --------------------------------------------------------------------------------------------------------------------
# In models


def prompt_cache(model, ids):
    with torch.no_grad():
        return output_cache(model(ids, use_cache=True))


@every_pair(DECODERS)
def test_the_state_does_not_grow_where_declared_constant(name, family):
    model = patched(name, family)
    sizes = [
        sum(layer.nbytes() for layer in prompt_cache(model, token_ids(1, length)).layers) for length in (2, 20, 80)
    ]
    if ATTENTIONS.get(name).state == "constant":
        # Shows a bug: KernelizedAttention.state_bytes leaves out log_scale, 4 bytes a key-value head (favor+).
        assert sizes[0] == sizes[1] == sizes[2] == hla.patch_report(model).state_bytes
    else:
        assert sizes[2] < sizes_of_keys_and_values(model, 80)


def sizes_of_keys_and_values(model, length):
    heads, layers = getattr(model.config, "num_key_value_heads", 4), 2
    return layers * length * heads * 2 * 8 * 4


@every_pair(DECODERS)
def test_one_prompt_two_continuations(name, family):
    model, prompt = patched(name, family), token_ids(1, 9)
    cache = prompt_cache(model, prompt)
    for seed in (1, 2):
        tail = token_ids(1, 6, seed=seed)
        out = logits(model, tail, **cache_argument(model, copy.deepcopy(cache)))
        assert_close(out, logits(model, torch.cat([prompt, tail], dim=1))[:, 9:])
    assert cache.get_seq_length() == 9


@every_pair(DECODERS)
def test_reordering_a_cache_of_a_model(name, family):
    model, ids = patched(name, family), token_ids(3, 15)
    full, cache = logits(model, ids), prompt_cache(model, ids[:, :9])
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    assert_close(logits(model, ids[order][:, 9:], **cache_argument(model, cache)), full[order][:, 9:])
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    assert cache.get_seq_length() == 15
    more = token_ids(2, 3, seed=4)
    whole = torch.cat([ids[:1].expand(2, -1), more], dim=1)
    assert_close(logits(model, more, **cache_argument(model, cache)), logits(model, whole)[:, 15:])


@every_pair(DECODERS)
def test_taking_tokens_back_after_recording(name, family):
    model, ids = patched(name, family), token_ids(2, 18)
    cache = prompt_cache(model, ids[:, :8])
    cache.activate_past_recording()
    logits(model, ids[:, 8:10], **cache_argument(model, cache))
    logits(model, token_ids(2, 5, seed=9), **cache_argument(model, cache))
    cache.crop(-6)
    assert cache.get_seq_length() == 9
    assert_close(logits(model, ids[:, 9:], **cache_argument(model, cache)), logits(model, ids)[:, 9:])


def test_a_reset_cache_starts_afresh():
    model, ids = patched("hedgehog", GPT2), token_ids(2, 9)
    cache = prompt_cache(model, token_ids(2, 5, seed=2))
    cache.reset()
    assert_close(logits(model, ids, **cache_argument(model, cache)), logits(model, ids))


@pytest.mark.parametrize("family", DECODERS, ids=str)
def test_caches_do_not_cross_between_patched_and_exact_models(family):
    model, exact = patched("hedgehog", family), family.build()
    with pytest.raises(RuntimeError, match=r"given to one without\. Start with a new cache"):
        exact(token_ids(), **cache_argument(exact, prompt_cache(model, token_ids())))
    with pytest.raises(ValueError, match="tokens of exact attention, which linear attention cannot continue"):
        model(token_ids(), **cache_argument(model, prompt_cache(exact, token_ids())))
    assert bool(torch.isfinite(logits(model, token_ids())).all())


def test_an_empty_cache_of_the_caller_is_filled_with_states():
    model, cache = patched("hedgehog", LLAMA), DynamicCache()
    logits(model, token_ids(), **cache_argument(model, cache))
    assert all(isinstance(layer, LinearStateLayer) for layer in cache.layers)
    assert cache.get_seq_length() == 21


def test_states_of_threads_do_not_mix():
    from concurrent.futures import ThreadPoolExecutor

    model = patched("hedgehog", GPT2)
    batches = [token_ids(1, 9, seed=seed) for seed in range(8)]
    expected = [logits(model, ids) for ids in batches]

    def decode(ids):
        cache = prompt_cache(model, ids[:, :4])
        return logits(model, ids[:, 4:], **cache_argument(model, cache))

    with ThreadPoolExecutor(4) as pool:
        for out, whole in zip(pool.map(decode, batches), expected, strict=True):
            assert_close(out, whole[:, 4:])


def test_an_error_in_the_middle_leaves_no_state_behind():
    model = patched("hedgehog", GPT2)
    with pytest.raises(ValueError, match="mask"):
        model(token_ids(1, 4), attention_mask=torch.ones(1, 3), **cache_argument(model, DynamicCache()))
    assert_close(logits(model, token_ids()), logits(patched_twin(model), token_ids()))


def patched_twin(model):
    return copy.deepcopy(model)


def test_taking_tokens_back_keeps_no_graph():
    """The learned maps want gradients; a crop outside of `no_grad` must not tie the state to them."""
    model = patched("hedgehog", GPT2)
    cache = prompt_cache(model, token_ids(1, 4))
    cache.activate_past_recording()
    logits(model, token_ids(1, 5), **cache_argument(model, cache))
    cache.crop(-2)
    assert not any(tensor.requires_grad for layer in cache.layers for tensor in layer.state.values())


@pytest.mark.parametrize("name", ["elu", "hedgehog", "window"])
def test_a_step_without_gradients_leaves_the_graph_of_the_prompt_as_it_is(name):
    model = patched(name, LLAMA)

    def gradient(with_steps):
        model.zero_grad()
        cache = DynamicCache(config=model.config)
        ids = token_ids(1, 12)
        model(ids[:, :6], **cache_argument(model, cache))
        continued = copy.copy(cache.layers[0].state)
        if with_steps:
            with torch.no_grad():
                for position in range(6, 9):
                    model(ids[:, position : position + 1], **cache_argument(model, cache))
        sum(entry.float().square().sum() for entry in continued.values() if entry.requires_grad).backward()
        return [entry.grad.clone() for entry in model.parameters() if entry.grad is not None]

    reference, actual = gradient(False), gradient(True)
    assert len(reference) > 1
    assert all(torch.equal(one, other) for one, other in zip(reference, actual, strict=True))


def check_graph_of_a_step(name, continue_generation):
    """Only queries learn: the graph of a step holds its state, though the state itself wants no gradient.

    go_on(step, cache): what follows, without gradients; step(first, last) runs tokens.
    """
    model = patched(name, LLAMA).requires_grad_(False)
    learned = model.model.layers[-1].self_attn.q_proj.weight.requires_grad_()
    ids = token_ids(1, 16)

    def gradient(follow):
        cache = prompt_cache(model, ids[:, :6])
        loss = model(ids[:, 6:7], **cache_argument(model, cache)).logits.square().sum()
        with torch.no_grad():
            follow(lambda first, last: model(ids[:, first:last], **cache_argument(model, cache)), cache)
        return torch.autograd.grad(loss, learned)[0]

    reference = gradient(lambda step, cache: None)
    assert reference.abs().max() > 0
    assert torch.equal(gradient(continue_generation), reference)


@pytest.mark.parametrize("name", ["elu", "hedgehog", "window"])
def test_a_step_without_gradients_leaves_the_graph_of_a_step_as_it_is(name):
    def continue_generation(step, cache):
        for position in range(7, 10):
            step(position, position + 1)

    check_graph_of_a_step(name, continue_generation)


@torch.no_grad()
@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor+", "window"])
@pytest.mark.parametrize(("before", "after"), [("double", "float"), ("float", "double"), ("double", "bfloat16")])
def test_a_model_in_another_precision_continues_from_the_state(name, before, after):
    model = getattr(patched(name, LLAMA), before)()
    ids = token_ids(1, 12)
    cache = prompt_cache(model, ids[:, :6])
    model = getattr(model, after)()
    for position in range(6, 10):
        actual = logits(model, ids[:, position : position + 1], **cache_argument(model, cache))
        assert_close(actual, logits(model, ids[:, : position + 1])[:, -1:], torch.bfloat16)


@pytest.mark.parametrize("name", ["t2r", "favor", "gated-delta"])
def test_a_state_of_inference_mode_goes_on_outside_of_it(name):
    """Kernels write over the state, and over copies of parameters, where that is no error."""
    model, ids = patched(name, LLAMA), token_ids(1, 12)
    expected, cache = logits(model, ids), DynamicCache(config=model.config)
    outputs = []
    for start, stop, mode in ((0, 4, "no"), (4, 6, "inference"), (6, 8, "no"), (8, 9, "inference"), (9, 11, "yes")):
        for position in (slice(start, stop),) if start == 0 else (slice(i, i + 1) for i in range(start, stop)):
            with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "yes"):
                outputs.append(model(ids[:, position], **cache_argument(model, cache)).logits)
    outputs[-1].sum().backward()
    assert_close(torch.cat([part.detach() for part in outputs], dim=1), expected[:, :11])


def test_weights_are_refused_before_the_state_moves_on():
    model = patched("hedgehog", LLAMA)
    ids = token_ids(1, 12)
    cache = prompt_cache(model, ids[:, :6])
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model(ids[:, 6:7], **cache_argument(model, cache), output_attentions=True)
    assert [layer.tokens for layer in cache.layers] == [6] * len(cache.layers)


@torch.no_grad()
@pytest.mark.parametrize("name", ["hedgehog", "window"])
def test_a_cache_that_another_model_continues(name):
    """The states belong to the cache, not to the model that made them."""
    first, second = patched(name, LLAMA), randomize_learned(patched(name, LLAMA))
    ids = token_ids(1, 14)

    def begun():
        cache = prompt_cache(first, ids[:, :6])
        for position in range(6, 9):
            logits(first, ids[:, position : position + 1], **cache_argument(first, cache))
        return cache

    continued, converted = begun(), begun()
    for layer in converted.layers:
        layer.state = dict(layer.state)
    for position in range(9, 12):
        token = ids[:, position : position + 1]
        actual = logits(second, token, **cache_argument(second, continued))
        assert torch.equal(actual, logits(second, token, **cache_argument(second, converted)))


@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor+", "window"])
def test_taking_tokens_back_leaves_the_graph_of_a_step_as_it_is(name):
    def continue_generation(step, cache):
        cache.activate_past_recording()
        for position in range(7, 9):
            step(position, position + 1)
            cache.crop(-1)
            step(position, position + 2)
            cache.crop(-1)
        for layer in cache.layers:
            layer.record_past = False
        for position in range(12, 14):
            step(position, position + 1)

    check_graph_of_a_step(name, continue_generation)


@torch.no_grad()
@every_pair(DECODERS)
def test_a_cache_of_other_rows_is_refused(name, family):
    model = patched(name, family)
    cache = prompt_cache(model, token_ids(1, 6))
    with pytest.raises(ValueError, match=r"states of 1 rows, and the input has 3.*batch_repeat_interleave"):
        model(token_ids(3, 1), **cache_argument(model, cache))
    cache.batch_repeat_interleave(3)
    model(token_ids(3, 1), **cache_argument(model, cache))


def test_hooks_that_compress_keys_and_values_are_told_that_there_are_none():
    """What kvpress does after each attention module: read the keys of its layer of the cache, and write fewer."""
    model, cache = patched("hedgehog", LLAMA), DynamicCache()

    def compress(module, args, kwargs, output):
        layer = cache.layers[module.layer_idx]
        layer.keys, layer.values = (tensor[:, :, ::2] for tensor in (layer.keys, layer.values))

    hook = model.model.layers[1].self_attn.register_forward_hook(compress, with_kwargs=True)
    with pytest.raises(NotImplementedError, match=r"such as kvpress\).*call unpatch_model\(model\)"):
        model(token_ids(), **cache_argument(model, cache))
    with pytest.raises(NotImplementedError, match="no keys and values of single tokens"):
        cache.layers[1].values = torch.zeros(1, 2, 3, 4)
    assert cache.layers[1].keys.numel() == 0
    with pytest.raises(NotImplementedError, match="no keys and values of single tokens"):
        torch.cat([cache.layers[1].keys, torch.zeros(1, 2, 3, 4)])
    hook.remove()
    hla.unpatch_model(model)
    cache = DynamicCache()
    model.model.layers[1].self_attn.register_forward_hook(compress, with_kwargs=True)
    model(token_ids(), **cache_argument(model, cache))
    assert cache.layers[1].keys.shape[2] == -(-cache.layers[0].keys.shape[2] // 2)

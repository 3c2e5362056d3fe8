"""Documents, packed: shared by the tests of packed batches."""

import torch
from transformers import DataCollatorWithFlattening

from tests.comparing import logits
from tests.inputs import token_ids

# Documents of one token, of equal and of like length (batched together), and far longer ones (by themselves).
LENGTHS = (5, 9, 1, 30, 22, 9)


def documents(lengths=LENGTHS):
    return [token_ids(1, length, seed=length) for length in lengths]


def positions(lengths=LENGTHS, start=0):
    return torch.cat([torch.arange(start, start + length) for length in lengths])[None]


def packed(lengths=LENGTHS):
    return {"input_ids": torch.cat(documents(lengths), dim=1), "position_ids": positions(lengths)}


def flattened(lengths=LENGTHS, **options):
    """What Transformers' collator makes of rows with labels."""
    collator = DataCollatorWithFlattening(return_tensors="pt", **options)
    rows = [{"input_ids": ids[0].tolist(), "labels": ids[0].tolist()} for ids in documents(lengths)]
    return collator(rows)


def unpacked_logits(model, lengths=LENGTHS):
    return torch.cat([logits(model, ids) for ids in documents(lengths)], dim=1)


def as_ids(inputs):
    return {"ids": inputs["input_ids"], **{key: value for key, value in inputs.items() if key != "input_ids"}}


def calls_of(model, run):
    """Sizes `[n, L]` of all calls of the mechanisms during `run`."""
    sizes = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: sizes.append((args[0].query.shape[0], args[0].query.shape[2])))
        for name, module in model.named_modules()
        if name.endswith("linear_attention")
    ]
    run()
    for hook in hooks:
        hook.remove()
    return sizes

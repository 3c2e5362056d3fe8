"""The models of these tests exercise what is outside of their windows, which weighs nothing in a decoder at first.

A check of caches, exports or several processes on a model in which it is closed compares windows alone.
"""

from __future__ import annotations

import pytest

import hf_linear_attn as hla
from tests.integration import parallel_worker
from tests.small import far_token_counts, open_far_part, patched, randomize_learned
from tests.tiny_models import GPT2, LLAMA

WINDOW = {"window_size": 4, "sink_tokens": 2}

BUILDERS = {
    "patched llama": lambda: patched("window", LLAMA),
    "patched gpt2": lambda: patched("window", GPT2),
    "int8": lambda: patched("window", LLAMA, cache_dtype="int8"),
    "randomised": lambda: randomize_learned(hla.patch_model(LLAMA.build(), "window", **WINDOW)),
    "several processes": lambda: parallel_worker.build("llama", "window", **WINDOW),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_a_token_outside_of_every_window_changes_the_last_output(build):
    assert far_token_counts(build())


def test_it_does_not_in_a_decoder_as_it_is_patched():
    model = hla.patch_model(LLAMA.build(), "window", **WINDOW)
    assert not far_token_counts(model)
    assert far_token_counts(open_far_part(model))

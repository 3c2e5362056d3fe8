"""Tasks of lm-evaluation-harness (`lm_eval`) on a decoder, exact or converted. Needs the extra `lm-eval`."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..checkpoints import load_checkpoint
from ..utils.extras import require_packages


def harness_model(model: PreTrainedModel | str, tokenizer: Any = None, *, batch_size: int = 8) -> Any:
    """Return a decoder as an `lm_eval` model, for `lm_eval.simple_evaluate(harness_model(...), tasks=[...])`.

    Args:
        model: A causal language model, patched or not, or a folder or repository of one.
        tokenizer: Its tokenizer; None: the one beside the model in its folder.
        batch_size: Rows of one forward pass.

    Raises:
        ImportError: lm_eval is not installed.
        ValueError: There is no tokenizer, or it has no end-of-sequence token.
        OSError: There is no such folder or repository.
    """
    require_packages("lm_eval", extra="lm-eval", purpose="This")
    from lm_eval.models.huggingface import HFLM

    if isinstance(model, str):
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
        model, _ = load_checkpoint(model, AutoModelForCausalLM)
    if tokenizer is None or tokenizer.eos_token_id is None:
        remedy = "give it with the model, and set its eos_token."
        raise ValueError(f"lm_eval needs a tokenizer with an end-of-sequence token: {remedy}")
    return HFLM(pretrained=model.eval(), tokenizer=tokenizer, backend="causal", batch_size=batch_size)

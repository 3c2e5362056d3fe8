"""Tasks of lm-evaluation-harness (`lm_eval`) on a decoder, exact or converted. Needs the extra `lm-eval`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..checkpoints import load_pretrained
from ..patching import CONFIG_FIELD
from ..utils.environment import json_safe
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
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        patched = getattr(config, CONFIG_FIELD, None) is not None
        auto_class = AutoModelForCausalLM
        model = load_pretrained(model, auto_class) if patched else auto_class.from_pretrained(model)
    if tokenizer is None or tokenizer.eos_token_id is None:
        raise ValueError(
            "lm_eval needs a tokenizer with an end-of-sequence token: give it with the model, and set its eos_token."
        )
    return HFLM(pretrained=model.eval(), tokenizer=tokenizer, backend="causal", batch_size=batch_size)


def run_harness(
    model: PreTrainedModel | str,
    tasks: Sequence[str],
    *,
    tokenizer: Any = None,
    folder: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Run tasks, and return the metrics of each: `{"arc_easy": {"acc": 0.41, "acc_stderr": 0.01, …}, …}`.

    Args:
        model, tokenizer, batch_size: As for `harness_model`.
        tasks: Names of tasks.
        folder: YAML files of your own tasks; only these are then known. None: the harness's, with data of the Hub.
        limit: The largest number of documents of each task.
        num_fewshot: Examples before each question (None: as the task says).

    Raises:
        ImportError, ValueError, OSError: As `harness_model`; a task is unknown.
    """
    wrapped = harness_model(model, tokenizer, batch_size=batch_size)
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if folder is None else str(folder), include_defaults=folder is None)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown or not tasks:
        known = ", ".join(sorted(manager.all_tasks)[:20])
        raise ValueError(f"Unknown tasks {', '.join(unknown) or '(none given)'}. Known: {known}, …")
    options: dict[str, Any] = {"limit": limit, "num_fewshot": num_fewshot, "bootstrap_iters": 0, "log_samples": False}
    output = lm_eval.simple_evaluate(wrapped, tasks=list(tasks), task_manager=manager, **options)
    # "acc,none" is "acc" without a filter, and of no interest are texts such as the task's alias.
    return {
        task: json_safe({name.removesuffix(",none"): one for name, one in values.items() if not isinstance(one, str)})
        for task, values in (output or {"results": {}})["results"].items()
    }

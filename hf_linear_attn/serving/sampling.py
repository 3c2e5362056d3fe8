"""How a row of a batch draws its tokens: by options of its own, and by a seed of its own."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

#: Fields of a generation config that decide about a row.
OPTIONS = (
    "max_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "sequence_bias",
    "eos_token_id",
    "stop_strings",
)

#: Fields that change no token here: how `generate` lays out a batch and a cache, and what only assistants read.
WITHOUT_EFFECT = (
    "max_length",
    "bos_token_id",
    "pad_token_id",
    "use_cache",
    "cache_implementation",
    "transformers_version",
    "early_stopping",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
)

#: `top_k` where a config does not name it, as in `generate`.
DEFAULT_TOP_K = 50


def config_of_request(
    model: PreTrainedModel, config: GenerationConfig | None, options: dict[str, Any]
) -> GenerationConfig:
    """Return the generation config of a request: one that is given or the model's, changed by options.

    Raises:
        TypeError: There is no such option.
        NotImplementedError: An option is set that a row of a changing batch cannot have, such as beams.
        ValueError: A value is out of range.
    """
    base: Any = model.generation_config if config is None else config
    chosen = copy.deepcopy(base)
    unknown = chosen.update(**options)
    if unknown:
        raise TypeError(f"Unknown options: {', '.join(unknown)}. The options are {', '.join(OPTIONS)}.")
    for name, value in chosen.to_dict().items():
        if name in OPTIONS or name in WITHOUT_EFFECT or name.startswith("_"):
            continue
        if value not in (None, False, 0, 1):
            raise NotImplementedError(f"{name}={value!r} is not served: the options are {', '.join(OPTIONS)}.")
    return chosen


class Sampler:
    """Draws the tokens of one row.

    Args:
        config: The options of the row.
        seed: The seed of what is drawn; None: another one each time.
    """

    def __init__(self, config: GenerationConfig, seed: int | None) -> None:
        self.draws = bool(config.do_sample)
        self.processors = LogitsProcessorList(_processors(config))
        #: Whether the largest logit alone decides.
        self.takes_argmax = not self.draws and not self.processors
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def draw(self, tokens: list[int], logits: Tensor) -> int:
        """Return the token after `tokens` by the logits `[V]` for it."""
        ids: Any = torch.tensor([tokens], device=logits.device)
        scores: Any = self.processors(ids, logits.float()[None])
        scores = scores[0]
        if not self.draws:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(dim=-1).cpu(), 1, generator=self.generator))


def _processors(config: GenerationConfig) -> list[Any]:
    """Return what changes the logits, in the order of `generate`. Each class checks its value."""
    processors: list[Any] = []
    if config.sequence_bias is not None:
        processors.append(SequenceBiasLogitsProcessor(config.sequence_bias))
    if config.repetition_penalty not in (None, 1.0):
        processors.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if config.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if not config.do_sample:
        return processors
    if config.temperature not in (None, 1.0):
        processors.append(TemperatureLogitsWarper(config.temperature))
    top_k = DEFAULT_TOP_K if config.top_k is None else config.top_k
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if config.top_p is not None and config.top_p < 1.0:
        processors.append(TopPLogitsWarper(config.top_p))
    if config.min_p is not None:
        processors.append(MinPLogitsWarper(config.min_p))
    return processors

"""The kinds of models: for each, the class that loads it, its metric, its pipeline, and what a budget may ask of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..data.config import DataConfig, TaskType
from ..data.task_data import TaskData
from ..measure.classification import Classification
from ..measure.embedding import EmbeddingCosine, sentence_embeddings
from ..measure.metric import Metric, in_batches
from ..measure.recall import RETRIEVAL
from ..measure.token_loss import TokenLoss
from ..training.options import TrainingRunConfig
from ..utils.models import Batch

EXAMPLE = '"The weather is nice today"'


@dataclass(frozen=True)
class Kind:
    """One kind of model."""

    task_type: TaskType
    noun: str
    auto_class: str  # of Transformers, which loads it
    metric: Callable[[TaskData, PreTrainedModel], Metric]  # from its data and the exact model
    pipeline_tag: str  # what the Hub calls it
    pipeline: str  # of Transformers; empty: there is none
    example: str  # the arguments of the pipeline on a card
    units: tuple[str, ...] = ()  # of budgets of quality that it can be given, the usual one first
    recall_task: str = ""  # of `measure_recall`, for a budget of recall
    is_causal: bool | None = None  # what its attention must be; None: either

    @property
    def is_language_model(self) -> bool:
        """Whether it predicts the tokens of a text."""
        return self.task_type in ("causal-lm", "masked-lm")

    @property
    def is_of_text(self) -> bool:
        """Whether its data are documents alone, without labels or targets."""
        return self.is_language_model or self.task_type == "embedding"

    def call(self, arguments: str) -> str:
        """Return the code of a card that calls `model` with `tokenizer`."""
        if self.pipeline:
            return f'print(pipeline("{self.pipeline}", model=model, tokenizer=tokenizer)({arguments}))'
        return f'print(tokenizer.decode(model.generate(**tokenizer({arguments}, return_tensors="pt"))[0]))'

    @property
    def model_class(self) -> Any:
        """The auto class."""
        return getattr(transformers, self.auto_class)


def task_type_of(config: Any, model: PreTrainedModel | None, data: DataConfig) -> TaskType:
    """Return the kind of a checkpoint, or of a loaded model: by the class that it was saved from, and its task."""
    name = type(model).__name__ if model is not None else (config.architectures or [""])[0]
    if data.task is not None or "ForSequenceClassification" in name:
        return "classification"
    if config.is_encoder_decoder:
        return "seq2seq-lm"
    is_masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if name == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type):
        return "causal-lm" if not is_masked or config.is_decoder else "embedding"
    is_causal = model is None and config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not is_masked
    return "causal-lm" if is_causal else "embedding"


def held_out_batches(data: TaskData) -> list[Batch]:
    """Return all held-out rows, as they are measured."""
    return in_batches([*chain.from_iterable(data.held_out.values())], data.collator)


def _next_tokens(data: TaskData, exact: PreTrainedModel) -> Metric:
    return TokenLoss(held_out_batches(data))


def _labelled_tokens(data: TaskData, exact: PreTrainedModel) -> Metric:
    return TokenLoss(held_out_batches(data), predicts_next=False)


def _answers(data: TaskData, exact: PreTrainedModel) -> Metric:
    batches = {name: in_batches([*rows], data.collator) for name, rows in data.held_out.items()}
    assert data.labels is not None
    return Classification(batches, data.metric_names, data.labels)


def _embeddings(data: TaskData, exact: PreTrainedModel) -> Metric:
    batches = held_out_batches(data)
    return EmbeddingCosine(batches, sentence_embeddings(exact, batches))


KINDS: Mapping[str, Kind] = {
    kind.task_type: kind
    for kind in (
        Kind(
            "classification",
            "a classifier",
            "AutoModelForSequenceClassification",
            _answers,
            "text-classification",
            "text-classification",
            EXAMPLE,
            units=("points",),
        ),
        Kind(
            "causal-lm",
            "a causal language model",
            "AutoModelForCausalLM",
            _next_tokens,
            "text-generation",
            "text-generation",
            f"{EXAMPLE}, max_new_tokens=8",
            units=("perplexity", "nats", "recall"),
            recall_task="niah_multikey_1",
            is_causal=True,
        ),
        Kind(
            "masked-lm",
            "a masked language model",
            "AutoModelForMaskedLM",
            _labelled_tokens,
            "fill-mask",
            "fill-mask",
            'f"The weather is {tokenizer.mask_token} today"',
            is_causal=False,
        ),
        Kind(
            "embedding",
            "an encoder of sentences",
            "AutoModel",
            _embeddings,
            "sentence-similarity",
            "feature-extraction",
            f"{EXAMPLE}, return_tensors=True",
            units=("cosine", "recall"),
            recall_task=RETRIEVAL,
            is_causal=False,
        ),
        Kind(
            "seq2seq-lm",
            "an encoder-decoder",
            "AutoModelForSeq2SeqLM",
            _labelled_tokens,
            "text2text-generation",
            "",
            EXAMPLE,
        ),
    )
}


def kind_of(config: TrainingRunConfig) -> Kind:
    """Return the kind of model of a run, whose options are complete."""
    assert config.task_type is not None
    return KINDS[config.task_type]

"""Encoders of sentence-transformers around a patched model: their model card, and the checkpoints of their trainers."""

import gc
import logging
import re
import sys
from itertools import chain
from typing import Any

from torch import nn
from transformers import PreTrainedModel, ProcessorMixin

from .context import CODE_MODULE

logger = logging.getLogger(__name__)

#: sentence-transformers puts the name of the repository, if it has one, for `sentence_transformers_model_id`.
CARD = """{metadata}# A sentence encoder with linear attention

This model was made from another one by [hf-linear-attn](https://pypi.org/project/hf-linear-attn), which replaces
self-attention by a mechanism of linear time. The card of that model describes its training and its limits.

## Usage

Install both packages: `pip install hf-linear-attn sentence-transformers`. Without `trust_remote_code=True` the model is
refused.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("sentence_transformers_model_id", trust_remote_code=True)
embeddings = model.encode(["The first sentence.", "The second one."])
```
"""


#: Attribute of an encoder whose `trust_remote_code` was set here.
TRUSTED_HERE = "_trusts_linear_attention"


def encoders_around(model: PreTrainedModel) -> list[Any]:
    """Return the encoders of sentence-transformers that a model is a part of (SentenceTransformer, CrossEncoder, …)."""
    if "sentence_transformers" not in sys.modules:
        return []
    modules: list[Any] = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    built = [module for module in modules if {"_modules", "trust_remote_code"} <= vars(module).keys()]
    encoders = [module for module in built if _is_encoder(type(module))]
    return [encoder for encoder in encoders if any(part is model for part in encoder.modules())]


def _is_encoder(cls: type) -> bool:
    return any(base.__module__.startswith("sentence_transformers.") for base in cls.__mro__)


def trust_own_checkpoints(model: PreTrainedModel) -> None:
    """Let the trainers of sentence-transformers load the checkpoints that they write of a patched model.

    To resume, and for `load_best_model_at_end`, they load a checkpoint with the encoder's `trust_remote_code`; where
    that is refused, a line in the log says so and the last weights stay. The code of such a checkpoint is ours. Where
    it would run other code too, which the encoder was loaded without, trust is left to the user.
    """
    for encoder in encoders_around(model):
        if encoder.trust_remote_code:
            continue
        if name := _other_code(encoder):
            logger.warning(
                f"The checkpoints of this {type(encoder).__name__} name code of their own ({name}), and trainers of "
                "sentence-transformers cannot load those of a patched model without running it. If you trust it, set "
                "encoder.trust_remote_code = True; otherwise do not use load_best_model_at_end, and do not resume."
            )
        else:
            encoder.trust_remote_code = True
            setattr(encoder, TRUSTED_HERE, True)


def restore_trust(model: PreTrainedModel) -> None:
    """Take back what `trust_own_checkpoints` has set."""
    for encoder in encoders_around(model):
        if vars(encoder).pop(TRUSTED_HERE, False):
            encoder.trust_remote_code = False


def _other_code(encoder: nn.Module) -> str:
    """Return the name of a class that the files of an encoder would load from elsewhere, or "".

    A tokenizer or processor keeps and saves such a name, also where it was loaded without trust.
    """
    objects = list(chain.from_iterable(vars(part).values() for part in encoder.modules()))
    processors = [value for value in objects if isinstance(value, ProcessorMixin)]
    objects += chain.from_iterable(vars(processor).values() for processor in processors)
    for value in objects:
        classes = getattr(value, "auto_map", None) or getattr(value, "init_kwargs", {}).get("auto_map")
        for name in (classes or {}).values():
            if not str(name).startswith(f"{CODE_MODULE}."):
                return str(name)
    return ""


def write_sentence_cards(model: PreTrainedModel) -> None:
    """Write anew the card that a SentenceTransformer around a patched model keeps from the exact one.

    Its code loads the exact model by name. The metadata (license, base model, tags) stay.
    """
    for encoder in encoders_around(model):
        text = getattr(encoder, "_model_card_text", None)
        if text and "hf-linear-attn" not in text:
            metadata = re.match(r"---\n.*?\n---\n+", text, re.DOTALL)
            encoder._model_card_text = CARD.format(metadata=metadata.group() if metadata else "")

"""The model card of a SentenceTransformer around a patched model, which would keep the code of the exact one."""

import gc
import re
import sys
from typing import Any

from transformers import PreTrainedModel

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


def write_sentence_cards(model: PreTrainedModel) -> None:
    """Write anew the card that a SentenceTransformer around a patched model keeps from the exact one.

    Its code loads the exact model by name. The metadata (license, base model, tags) stay.
    """
    package: Any = sys.modules.get("sentence_transformers")
    if package is None:
        return
    for encoder in (one for one in gc.get_objects() if issubclass(type(one), package.SentenceTransformer)):
        text = getattr(encoder, "_model_card_text", None)
        if text and "hf-linear-attn" not in text and any(part is model for part in encoder.modules()):
            metadata = re.match(r"---\n.*?\n---\n+", text, re.DOTALL)
            encoder._model_card_text = CARD.format(metadata=metadata.group() if metadata else "")

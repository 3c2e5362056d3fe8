"""Examples that a person can read, by the exact model and by converted ones: a search, a long document, a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from ..data.text import encode_text, packed_rows, pad_token, padded_batches, token_passages
from ..integration.discovery import longest_input
from ..measure.quality import sentence_embeddings
from ..utils.formatting import format_seconds
from ..utils.timing import time_interleaved
from .loading import ExactModel

if TYPE_CHECKING:
    import pandas

#: What somebody may look for in the documentation of Python's standard library.
QUERIES = (
    "compress a file",
    "parse command line arguments",
    "send an e-mail",
    "measure how long a piece of code runs",
    "read JSON",
    "wait for several threads",
)
PROMPT = "The lighthouse stood at the end of the island, and every evening the keeper"

#: Documents to search in, tokens of each that are read, hits that are shown; tokens that a decoder adds.
DOCUMENTS, PASSAGE, HITS, CONTINUATION = 120, 128, 3, 40

Models = Mapping[str, PreTrainedModel]


def examples(exact: ExactModel, models: Models, documents: Sequence[str]) -> dict[str, pandas.DataFrame]:
    """Return tables of examples by their titles, of the exact model and converted ones; documents are searched in."""
    if exact.kind == "decoder":
        return {f"A text continued: “{PROMPT} …”": continued_text(models, exact.tokenizer)}
    return {
        "A search: the first hits of each model": search(models, exact.tokenizer, documents),
        "A long document": long_document(models, exact.tokenizer, documents),
    }


def search(models: Models, tokenizer: object, documents: Sequence[str]) -> pandas.DataFrame:
    """Return the documents that each model finds for `QUERIES`, by their first lines, a column for each model."""
    import pandas

    documents = sorted(documents, key=len, reverse=True)[:DOCUMENTS]
    titles = [document.strip().splitlines()[0][:60] for document in documents]
    length = min(PASSAGE, longest_input(next(iter(models.values()))) or PASSAGE)
    passages, queries = (
        padded_batches([token_passages(tokenizer, [text], length)[0] for text in texts], 16, pad_token(tokenizer))
        for texts in (documents, QUERIES)
    )
    ranks = range(1, min(HITS, len(titles)) + 1)
    index = pandas.Index([f"{query} ({rank})" for query in QUERIES for rank in ranks], name="query (rank)")
    table = pandas.DataFrame(index=index)
    for label, model in models.items():
        documents_embedded, queries_embedded = (
            normalize(sentence_embeddings(model, batches), dim=-1) for batches in (passages, queries)
        )
        hits = (queries_embedded @ documents_embedded.T).topk(len(ranks), dim=-1).indices.tolist()
        table[label] = [titles[hit] for row in hits for hit in row]
    return table


def long_document(models: Models, tokenizer: object, documents: Sequence[str]) -> pandas.DataFrame:
    """Return how alike the models embed the longest input that the exact one takes, and the time each needs."""
    import pandas

    first = next(iter(models.values()))
    length = min(longest_input(first) or 2048, 2048)
    batch = padded_batches(packed_rows(tokenizer, ["\n\n".join(documents)], length)[:1], 1, 0)
    calls = {label: partial(sentence_embeddings, model, batch) for label, model in models.items()}
    embeddings = {label: normalize(call(), dim=-1) for label, call in calls.items()}
    baseline = next(iter(models))
    timings = time_interleaved(calls, baseline=baseline, seconds=0.5, device=first.device)
    cosines = [f"{float((embedding * embeddings[baseline]).sum()):.3f}" for embedding in embeddings.values()]
    times = [format_seconds(timings[label].median) for label in embeddings]
    tokens = pandas.Index(embeddings, name=f"{batch[0]['input_ids'].shape[1]:,} tokens")
    return pandas.DataFrame({"cosine with the exact embedding": cosines, "time": times}, index=tokens)


@torch.no_grad()
def continued_text(models: Models, tokenizer: object) -> pandas.DataFrame:
    """Return how each decoder goes on after `PROMPT`, greedily."""
    import pandas

    ids = torch.tensor([encode_text(tokenizer, PROMPT)])
    options = {"max_new_tokens": CONTINUATION, "do_sample": False, "pad_token_id": pad_token(tokenizer)}
    texts = {}
    for label, model in models.items():
        own = ids.to(model.device)
        output = model.generate(own, attention_mask=torch.ones_like(own), **options)  # type: ignore[operator]
        texts[label] = " ".join(tokenizer.decode(output[0, ids.shape[1] :]).split())  # type: ignore[attr-defined]
    return pandas.DataFrame({"continued by": texts.keys(), "text": texts.values()}).set_index("continued by")

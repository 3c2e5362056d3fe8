"""Examples that a person can read, by the exact model and by converted ones: a search, a long document, a text."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, product

import pandas as pd
import torch
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from ..data.text import encode_text, packed_rows, pad_token, padded_batches, token_passages
from ..integration.discovery import longest_input
from ..integration.positions import extend_positions, has_position_table
from ..measure.embedding import sentence_embeddings
from ..utils.formatting import format_seconds
from ..utils.models import shared_copy
from ..utils.timing import time_interleaved
from .evaluated_model import EvaluatedModel

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

#: Documents to search in, tokens of each that are read at most, hits that are shown; tokens that a decoder adds.
DOCUMENTS, WHOLE, HITS, CONTINUATION = 24, 2048, 2, 40

#: Tokens of the long document, for which learned positions are extended.
LONG = 8192

Models = Mapping[str, PreTrainedModel]


def examples(evaluated: EvaluatedModel, models: Models, documents: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Return tables of examples by their titles, of the exact model and converted ones; documents are searched in."""
    tokenizer = evaluated.data.tokenizer
    if evaluated.kind.is_causal:
        return {f"A text continued: “{PROMPT} …”": continued_text(models, tokenizer)}
    longer = {label: extended(model, LONG) for label, model in models.items()}
    is_extended = any(longer[label] is not models[label] for label in models)
    beyond = f", beyond {longest_input(evaluated.model):,} trained positions" if is_extended else ""
    return {
        f"A long document{beyond}": long_document(longer, tokenizer, documents),
        f"A search in whole documents of up to {WHOLE:,} tokens{beyond}: the first hits": search(
            longer, tokenizer, documents
        ),
    }


def extended(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """Return a copy, with shared weights, that takes inputs of this length; its further positions repeat the first."""
    limit = longest_input(model)
    if limit is None or limit >= length or not has_position_table(model):
        return model
    return extend_positions(shared_copy(model), length)


def search(models: Models, tokenizer: object, documents: Sequence[str]) -> pd.DataFrame:
    """Return the documents that each model finds for `QUERIES`, by their first lines, a column for each model."""
    documents = sorted(documents, key=len, reverse=True)[:DOCUMENTS]
    titles = [document.strip().splitlines()[0][:60] for document in documents]
    whole, queries = (
        padded_batches([token_passages(tokenizer, [text], WHOLE)[0] for text in texts], 4, pad_token(tokenizer))
        for texts in (documents, QUERIES)
    )
    ranks = range(1, min(HITS, len(titles)) + 1)
    rows = [f"{query} ({rank})" for query, rank in product(QUERIES, ranks)]
    index = pd.Index(rows, name="query (rank)")
    table = pd.DataFrame(index=index)
    for label, model in models.items():
        start = time.perf_counter()
        documents_embedded = normalize(sentence_embeddings(model, whole), dim=-1)
        seconds = format_seconds(time.perf_counter() - start)
        queries_embedded = normalize(sentence_embeddings(model, queries), dim=-1)
        hits = (queries_embedded @ documents_embedded.T).topk(len(ranks), dim=-1).indices.tolist()
        table[f"{label} ({len(titles)} documents read in {seconds})"] = [
            titles[hit] for hit in chain.from_iterable(hits)
        ]
    return table


def long_document(models: Models, tokenizer: object, documents: Sequence[str]) -> pd.DataFrame:
    """Return how alike the models embed a long document, and the time that each needs."""
    first = next(iter(models.values()))
    length = min(longest_input(first) or LONG, LONG)
    batch = padded_batches(packed_rows(tokenizer, ["\n\n".join(documents)], length)[:1], 1, 0)
    calls = {label: partial(sentence_embeddings, model, batch) for label, model in models.items()}
    embeddings = {label: normalize(call(), dim=-1) for label, call in calls.items()}
    baseline = next(iter(models))
    timings = time_interleaved(calls, baseline=baseline, seconds=0.0, device=first.device, min_rounds=2)
    cosines = [f"{float((embedding * embeddings[baseline]).sum()):.3f}" for embedding in embeddings.values()]
    times = [format_seconds(timings[label].median) for label in embeddings]
    speedups = [f"{timings[label].speedup:.2f}×" for label in embeddings]
    tokens = pd.Index(embeddings, name=f"{batch[0]['input_ids'].shape[1]:,} tokens")
    columns = {"time": times, "times as fast": speedups, "cosine with the exact embedding": cosines}
    return pd.DataFrame(columns, index=tokens)


@torch.no_grad()
def continued_text(models: Models, tokenizer: object) -> pd.DataFrame:
    """Return how each decoder goes on after `PROMPT`, greedily."""
    ids = torch.tensor([encode_text(tokenizer, PROMPT)])
    options = {"max_new_tokens": CONTINUATION, "do_sample": False, "pad_token_id": pad_token(tokenizer)}
    texts = {}
    for label, model in models.items():
        prompt = ids.to(model.device)
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)  # type: ignore[operator]
        texts[label] = " ".join(tokenizer.decode(output[0, ids.shape[1] :]).split())  # type: ignore[attr-defined]
    return pd.DataFrame({"continued by": texts.keys(), "text": texts.values()}).set_index("continued by")

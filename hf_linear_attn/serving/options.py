"""Options of the server."""

from dataclasses import dataclass
from typing import Literal

from ..utils.options import check_options, option


@dataclass(frozen=True)
class ServeConfig:
    """Options of `serve`."""

    model: str = option(help="a folder, a repository on the Hub or a GGUF file, converted or exact")
    host: str = option("127.0.0.1", "address to listen at; with another one set api_key, too")
    port: int = option(8000, "port to listen at (0: any free one)", least=0, most=65535)
    api_key: str | None = option(None, "key that requests must have, as `Authorization: Bearer KEY`")
    max_batch: int = option(32, "most requests that are answered at once", least=1)
    max_queue: int = option(256, "most requests that wait; further ones get status 429", least=1)
    max_new_tokens: int = option(1024, "most tokens of an answer", least=1)
    max_length: int | None = option(
        None, "most tokens of a prompt and its answer (null: as many as the model is made for)", least=1
    )
    prefix_cache_mb: int = option(512, "most memory for kept prefixes in MB (0: none)", least=0)
    prefix_dir: str | None = option(None, "a folder where kept prefixes outlive the server")
    cors: bool = option(False, "let pages of any origin in a browser ask")
    device: str = option("cpu", "torch device: cpu, cuda, …")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option("auto", "precision of the weights")

    def __post_init__(self) -> None:
        check_options(self)

"""`hf-linear-attn serve`."""

from typing import Any

from ..serving.options import ServeConfig
from .verb import Verb


def run(config: Any) -> None:
    from ..serving.server import serve

    serve(config)


VERB = Verb(
    "serve a checkpoint to many clients at once, by OpenAI's interface",
    ServeConfig,
    run,
    ("model",),
    """\
hf-linear-attn serve out/model
hf-linear-attn serve out/model --port 9000 --prefix_dir prefixes --api_key secret

Any OpenAI client can ask it: OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none").""",
)

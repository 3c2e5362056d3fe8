"""Families whose attention stays exact, with the reason."""

from typing import Any

from .base import Adapter, register


class _Blocks(Adapter):
    """Modules that fold blocks of the sequence into rows: their attention is linear in its length already."""

    def span(self, module: Any) -> str:
        return f"blocks of {module.context_size}"


class _Phi4Audio(Adapter):
    def span(self, module: Any) -> str:
        return "blocks of 500"  # whatever its config says


class _Pooling(Adapter):
    def span(self, module: Any) -> str:
        return "whole, from one learned query"


class _LayoutLMv3(Adapter):
    def applies(self, module: Any) -> bool:
        return module.config.has_relative_attention_bias

    def obstacle(self, module: Any) -> str:
        return "adds a bias for the places of two boxes on their page, which no distance of tokens has"


class _VideoPrism(Adapter):
    def applies(self, module: Any) -> bool:
        return hasattr(module.config, "vocab_size")

    def obstacle(self, module: Any) -> str:
        return "is causal in calls with an attention mask, and bidirectional without one"


register(_Blocks(), "GraniteSpeech5EncoderAttention")
register(_Phi4Audio(), "Phi4MultimodalAudioAttention")
register(_LayoutLMv3(), "LayoutLMv3SelfAttention")
register(_Pooling(), "VideoPrismMultiheadAttentionPoolingHead")
register(_VideoPrism(), "VideoPrismAttention")

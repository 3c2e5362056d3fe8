"""Feature maps: one paper, one file, one class, one registration. Importing this package registers them all."""

from . import elu, favor_plus, hedgehog
from .base import AttentionShape, FeatureMap

__all__ = ["AttentionShape", "FeatureMap", "elu", "favor_plus", "hedgehog"]

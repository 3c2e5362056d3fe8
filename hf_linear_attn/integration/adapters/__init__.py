"""What families of models need beside the attention interface, one file each, found by the names of their classes."""

from . import bloom as bloom
from . import conformer as conformer
from . import deberta as deberta
from . import exact as exact
from . import falcon as falcon
from . import mpnet as mpnet
from . import mpt as mpt
from . import t5 as t5
from .base import adapter_of as adapter_of

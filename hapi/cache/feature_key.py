"""Identity of cached features: everything that decides their numbers, and nothing else.

Features are the output of a frozen layer, the *cut*. The key names the dataset version, the transform, the structure
and weights of the layers up to the cut, the type of their results, and the code that computes them; where features were
rounded on the wire also the codec, and the layer after which they crossed. Batch sizes, machines, paths, the order of
samples and whatever comes after the cut are not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from hapi.cache.key_file import digest_of
from hapi.codecs.names import NONE, Codec
from hapi.wire.frames import DTYPE_BYTES
from hapi.wire.references import DatasetReference, Precision, TransformSpec

KEY_FORMAT = "hapi-features-1"
"""Version of the text that is digested; it changes whenever features of one key would get other numbers."""


class WireRounding(NamedTuple):
    """Codec that rounded features on the wire, and the layer whose output it rounded."""

    codec: Codec
    split: int


@dataclass(frozen=True, kw_only=True)
class FeatureKey:
    """Identity of the features of one dataset version at one cut."""

    dataset: DatasetReference
    """Its version counts, not its name."""
    transform: TransformSpec | None
    """Never a random one whose outcome is not yet known; None for samples that are stored as tensors."""
    prefix: str
    """Digest of structure and weights of layers 1..cut."""
    cut: int
    cut_name: str
    """Name of layer ``cut``, for people."""
    shape: tuple[int, ...]
    """Shape of one sample's features."""
    dtype: str
    """Element type, as on the wire."""
    precision: Precision = "fp32"
    tf32: bool = False
    code: str
    """Versions of what computes the features on both tiers."""
    rounding: WireRounding | None = None
    """None for features of which nothing was rounded on its way."""

    def to_json(self) -> dict[str, Any]:
        """Return the key as JSON."""
        rounded = {} if self.rounding is None else {"rounding": self.rounding._asdict()}
        return {
            "format": KEY_FORMAT,
            "dataset": self.dataset.version,
            "transform": None if self.transform is None else self.transform.to_json(),
            "prefix": self.prefix,
            "cut": self.cut,
            "cut_name": self.cut_name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "precision": self.precision,
            "tf32": self.tf32,
            "code": self.code,
            **rounded,
        }

    @property
    def small_form(self) -> Codec:
        """Codec that gives these features back in every bit although it rounds: they came in it. Else ``none``."""
        return self.rounding.codec if self.rounding is not None and self.rounding.split == self.cut else NONE

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's features."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def digest(self) -> str:
        """Digest of the key, 32 hex digits."""
        return digest_of(self.to_json())

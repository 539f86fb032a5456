"""What compiled code rounds beyond its dtypes because its user chose so: the yardstick of its budget rounds the same,
the oracle nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mhsa_compile.spec.float32_products import Float32Products, is_coarse

if TYPE_CHECKING:
    from mhsa_compile.runtime.artifact.manifest import Manifest


@dataclass(frozen=True)
class Precision:
    """int8_weights      products with weights are of eight bits, as `product_in_int8` makes them
    float32_products  how products of float32 are made: "bf16x3" and "bf16" are less exact than the dtype
    """

    int8_weights: bool = False
    float32_products: Float32Products = "ieee"

    @classmethod
    def of(cls, manifest: Manifest) -> Precision:
        """That of an artifact's code: of its operations, the least exact decides."""
        return cls(manifest.int8_weights, manifest.coarsest_products)

    @property
    def is_plain(self) -> bool:
        """Whether results are as exact as their dtypes are."""
        return not self.int8_weights and not is_coarse(self.float32_products)


AS_STATED = Precision()
"""Nothing but what dtypes say."""

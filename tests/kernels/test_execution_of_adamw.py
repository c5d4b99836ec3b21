"""The compiled adamw kernel, executed by the PTX interpreter: every variant on every target."""

import pytest

from tests.support.ptx.executed import Variant, name_of, variants
from tests.support.ptx.executions import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("variant", variants(["adamw"]), ids=name_of)
def test_a_variant_does_what_its_reference_does(variant: Variant) -> None:
    case, target, shift = variant
    run(case, target, shift=shift)

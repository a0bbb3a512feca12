"""What the DeepSpeed at hand has of that on which cases depend, read from it, not its version.

A case that needs what an older release lacks is skipped there. The newest release that z3ext serves
has everything, so that nothing can be skipped with it.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from typing import Any

SCALE = "engine.scale"
COALESCE = "engine.coalesce_grad_reduction"
AUTOCAST = "torch_autocast in its config"
SANITY_CHECKS = "enable_sanity_checks in its config"
UNMANAGED = "managed_gradient_accumulation in its config"
OFFLOAD_STATES = "offload_states with an optimizer of torch"
#: A step with a non-finite gradient is skipped in bf16 and fp32 too.
SKIPS_ANY_DTYPE = "check for non-finite bf16 and fp32 gradients"
#: 0.17.2 alone lacks it: z3ext leaves its all-reduce buckets to DeepSpeed.
EMPTIES_BUCKETS = "count of a bucket's elements that is set back"

#: 0.16 to 0.18 have this assertion at the top of offload_states, later ones under a condition.
_ONLY_FUSED_ADAM = "\n        assert self.optimizer.__class__ =="


@functools.cache
def absent() -> frozenset[str]:
    """The features that the DeepSpeed at hand lacks; first asked for before anything is patched."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from z3ext.deepspeed.recognise import closest
    from z3ext.deepspeed.releases import RELEASES

    optimizer: Any = stage3.DeepSpeedZeroOptimizer_Stage3
    source = inspect.getsource(stage3)
    found = {
        SCALE: hasattr(DeepSpeedEngine, "scale"),
        COALESCE: hasattr(DeepSpeedEngine, "coalesce_grad_reduction"),
        AUTOCAST: importlib.util.find_spec("deepspeed.runtime.torch_autocast") is not None,
        SANITY_CHECKS: "enable_sanity_checks" in DeepSpeedZeroConfig.model_fields,
        UNMANAGED: hasattr(DeepSpeedEngine, "managed_gradient_accumulation"),
        OFFLOAD_STATES: _ONLY_FUSED_ADAM not in source,
        SKIPS_ANY_DTYPE: hasattr(optimizer, "_loss_scale_update_and_overflow_cleanup"),
        # Before 0.17.2 the count is a property that adds up the parameters.
        EMPTIES_BUCKETS: (
            "bucket.elements = 0" in source or hasattr(optimizer, "elements_in_ipg_bucket")
        ),
    }
    lacking = frozenset(feature for feature, there in found.items() if not there)
    if lacking and closest(optimizer)[0] is RELEASES[-1]:
        raise AssertionError(f"the newest release was expected to have {', '.join(lacking)}")
    return lacking

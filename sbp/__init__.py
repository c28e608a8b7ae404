"""sbp: a distributed type system for JAX. Annotate a few tensors; every other type is inferred,
checked, priced and run."""

from sbp.annotations import (
    annotate as annotate,
    partial as partial,
    replicate as replicate,
    shard as shard,
    split as split,
)
from sbp.api.jit import Jitted as Jitted, check_shard_map as check_shard_map, jit as jit
from sbp.api.plan import Plan as Plan, assert_plan_unchanged as assert_plan_unchanged
from sbp.errors import (
    Diagnostic as Diagnostic,
    SbpError as SbpError,
    SbpInternalError as SbpInternalError,
    SbpTypeError as SbpTypeError,
    SbpWarning as SbpWarning,
)
from sbp.handwritten.region import manual as manual
from sbp.layout import Layout as Layout, fully_sharded as fully_sharded, padded as padded
from sbp.limits import Budget as Budget, forbid as forbid, policy as policy
from sbp.machine.mesh import HARDWARE as HARDWARE, Hardware as Hardware, make_mesh as make_mesh
from sbp.report.report import Report as Report
from sbp.run.arrays import Padded as Padded, Partial as Partial
from sbp.types import B as B, NdSbp as NdSbp, P as P, S as S, parse as parse
from sbp.version import VERSION

__version__ = VERSION

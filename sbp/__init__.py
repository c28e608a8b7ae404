"""sbp: a distributed type system for JAX. Annotate a few tensors; every other type is inferred,
checked, priced and run."""

from sbp.annotations import annotate as annotate
from sbp.annotations import partial as partial
from sbp.annotations import replicate as replicate
from sbp.annotations import shard as shard
from sbp.annotations import split as split
from sbp.api.jit import Jitted as Jitted
from sbp.api.jit import check_shard_map as check_shard_map
from sbp.api.jit import jit as jit
from sbp.api.plan import Plan as Plan
from sbp.api.plan import assert_plan_unchanged as assert_plan_unchanged
from sbp.errors import Diagnostic as Diagnostic
from sbp.errors import SbpError as SbpError
from sbp.errors import SbpInternalError as SbpInternalError
from sbp.errors import SbpTypeError as SbpTypeError
from sbp.errors import SbpWarning as SbpWarning
from sbp.handwritten.region import manual as manual
from sbp.layout import Layout as Layout
from sbp.layout import fully_sharded as fully_sharded
from sbp.layout import padded as padded
from sbp.limits import Budget as Budget
from sbp.limits import forbid as forbid
from sbp.limits import policy as policy
from sbp.machine.mesh import HARDWARE as HARDWARE
from sbp.machine.mesh import Hardware as Hardware
from sbp.machine.mesh import make_mesh as make_mesh
from sbp.report.report import Report as Report
from sbp.run.arrays import Padded as Padded
from sbp.run.arrays import Partial as Partial
from sbp.types import B as B
from sbp.types import NdSbp as NdSbp
from sbp.types import P as P
from sbp.types import S as S
from sbp.types import parse as parse
from sbp.version import VERSION

__version__ = VERSION

"""Sample equations for every rule: small calls whose trace has the primitive.

Sizes are odd on purpose: 5 over 2, 7 over 4 and 3 over 4 devices leave shards with padding, or
empty ones.
"""

import samples_compute as samples_compute
import samples_kernels as samples_kernels
import samples_move as samples_move
from calls import CLIP as CLIP
from calls import FILL as FILL
from calls import PROMISE as PROMISE
from calls import SAMPLES as SAMPLES
from calls import Equation as Equation
from calls import b as b
from calls import bf as bf
from calls import bind as bind
from calls import c as c
from calls import equation as equation
from calls import equations as equations
from calls import f as f
from calls import i as i
from calls import keys as keys
from calls import on as on
from calls import primitives as primitives
from calls import rows as rows
from calls import skip_where_jax_lacks as skip_where_jax_lacks
from calls import u as u

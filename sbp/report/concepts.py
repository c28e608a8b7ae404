"""Concepts that `sbp explain` explains, beside diagnostic codes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Concept:
    """A word of reports and of this field.

    Arguments:
      name: the word.
      text: what it means.
      also: other words for the same.
      see: names of other concepts.
    """

    name: str
    text: str
    also: tuple[str, ...] = ()
    see: tuple[str, ...] = ()


CONCEPTS = (
    Concept(
        name="S",
        text="`S(d)` says that dim d of a tensor is split over a mesh axis: each device has one"
        " block of it, in order. On 4 devices, `S(0)` of float32[8,16] is float32[2,16] on each."
        " If the dim does not divide evenly, the last blocks are smaller.",
        also=("split", "shard", "sharded"),
        see=("B", "P", "nested split"),
    ),
    Concept(
        name="B",
        text="`B` says that each device of a mesh axis has the whole tensor, with equal values. A"
        " mesh axis that a type does not name is B.",
        also=("broadcast", "replicated", "replicate"),
        see=("S", "P"),
    ),
    Concept(
        name="P",
        text="`P` says that each device of a mesh axis has a tensor of the full shape, and that the"
        " value is their sum. A product over a split dim makes it: x of type `S(1)` times w of type"
        " `S(0)`. `P(max)`, `P(min)` and `P(prod)` combine the parts by another operation. A"
        " function that is not linear, such as relu, needs the sum first.",
        also=("partial", "partial value", "partial sum", "unreduced"),
        see=("reduction", "late reduction", "all-reduce", "reduce-scatter"),
    ),
    Concept(
        name="type",
        text="The type of a tensor has one of `S(d)`, `B` and `P` for each mesh axis, such as"
        " `data:S(0) model:P(sum)`. It says what each device has.",
        also=("distributed type", "ND-SBP", "SBP"),
        see=("S", "B", "P", "mesh axis"),
    ),
    Concept(
        name="mesh",
        text="A mesh arranges devices in a grid with named axes. `data=2 model=4` has 8 devices."
        " An abstract mesh has axes and no devices: programs are checked and planned on it.",
        also=("abstract mesh", "device mesh"),
        see=("mesh axis",),
    ),
    Concept(
        name="mesh axis",
        text="A named axis of the mesh. The devices that differ only in their index on this axis"
        " form a group, and collectives over the axis run in each group. The outer axis comes"
        " first.",
        also=("axis",),
        see=("mesh", "type"),
    ),
    Concept(
        name="nested split",
        text="One dim that is split on two mesh axes: first in blocks on the outer axis, then each"
        " block on the inner axis.",
        also=("two-dimensional split",),
        see=("S", "mesh axis"),
    ),
    Concept(
        name="boxing",
        text="The conversion of a tensor from one type to another: `P` to `B` is an all-reduce, `P`"
        " to `S` a reduce-scatter, `S` to `B` an all-gather, `S` to another `S` an all-to-all, and"
        " `B` to `S` a slice that sends nothing. `sbp.jit(boxing=..)` says which conversions a plan"
        " may insert.",
        also=("conversion", "jax.sharding.reshard", "redistribute"),
        see=("collective", "boxing policy"),
    ),
    Concept(
        name="boxing policy",
        text='"auto" lets sbp insert any conversion and counts its cost. "reduce" lets it insert'
        ' only conversions from P. "explicit" lets it insert none that sends data, except at'
        " annotations and at the boundary of the program.",
        also=("auto", "reduce", "explicit"),
        see=("boxing", "annotation"),
    ),
    Concept(
        name="annotation",
        text="A line of the program that pins the type of a tensor: `sbp.split`, `sbp.replicate`,"
        " `sbp.partial`, `sbp.shard` or `sbp.annotate`. It names some mesh axes and leaves the"
        " others to inference. Its operand is converted there.",
        also=("pin", "pinned"),
        see=("type", "boxing"),
    ),
    Concept(
        name="hand-written region",
        text="JAX's way to write by hand what each device computes on its shards, with collectives"
        " such as `lax.psum`. `sbp.check_shard_map` finds missing, doubled and misplaced"
        " reductions in such a program, and `sbp.manual` puts such a region into a program that"
        " `sbp.jit` types.",
        also=("jax.shard_map", "manual region", "sbp.manual", "check_shard_map"),
        see=("collective", "reduction"),
    ),
    Concept(
        name="signature",
        text="The rows of an operator: which types of its operands give which type of its result,"
        " on one mesh axis, without sending anything unless the row names a kernel. `sbp signatures"
        " NAME` shows them.",
        also=("row", "rule"),
        see=("kernel", "type"),
    ),
    Concept(
        name="kernel",
        text="A program that runs on the shards in place of an operator, where the operator on each"
        " shard alone would give a wrong result: a halo exchange for a convolution, a prefix"
        " correction for a cumulative sum.",
        also=("halo", "halo exchange"),
        see=("signature",),
    ),
    Concept(
        name="collective",
        text="An operation in which the devices of a group exchange data. A report counts the bytes"
        " that one device sends, by the ring optimum.",
        also=("communication",),
        see=("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ring"),
    ),
    Concept(
        name="all-reduce",
        text="Adds the parts of a `P` tensor, and gives each device the whole sum: `P` to `B`. Of n"
        " devices each sends 2(n-1)/n of the tensor.",
        also=("lax.psum", "lax.pmean", "pmean", "allreduce"),
        see=("reduce-scatter", "P"),
    ),
    Concept(
        name="reduce-scatter",
        text="Adds the parts of a `P` tensor, and gives each device one block of the sum: `P` to"
        " `S`. Of n devices each sends (n-1)/n of the tensor, half of what an all-reduce sends.",
        also=("lax.psum_scatter", "psum_scatter", "reducescatter"),
        see=("all-reduce", "P"),
    ),
    Concept(
        name="all-gather",
        text="Gives each device the blocks of all others: `S` to `B`. Of n devices each sends"
        " (n-1)/n of the whole tensor.",
        also=("lax.all_gather", "allgather"),
        see=("S", "FSDP"),
    ),
    Concept(
        name="all-to-all",
        text="Changes the split dim: `S` to another `S`. Of n devices each sends (n-1)/n of its own"
        " block. Experts use it to exchange tokens.",
        also=("lax.all_to_all", "alltoall"),
        see=("expert parallel",),
    ),
    Concept(
        name="ring",
        text="A way to run a collective: each device sends to the next one, and what it receives"
        " goes on in the next step. No other way sends fewer bytes for all-gather, reduce-scatter"
        " and all-reduce, so reports count the bytes of a ring.",
        also=("ring optimum", "permute", "lax.ppermute"),
        see=("collective",),
    ),
    Concept(
        name="reduction",
        text="The collective that adds the parts of a `P` value: an all-reduce or a"
        " reduce-scatter.",
        also=("reduce parts",),
        see=("P", "late reduction"),
    ),
    Concept(
        name="late reduction",
        text="A `P` value can stay partial through linear operations, such as a sum over"
        " microbatches, and be reduced once at their end. One reduction then takes the place of"
        " many.",
        also=("deferred reduction", "deferral"),
        see=("P", "reduction"),
    ),
    Concept(
        name="data parallel",
        text="The batch is split on a mesh axis and the weights are `B` on it. Gradients of the"
        " weights are then `P`, and are reduced in each step.",
        also=("data parallelism", "DDP", "DP"),
        see=("ZeRO", "FSDP"),
    ),
    Concept(
        name="tensor parallel",
        text="Weights are split on a mesh axis, in Megatron's way: the first matrix of a layer by"
        " columns, the second by rows. The product of the second is `P` and is reduced.",
        also=("tensor parallelism", "Megatron", "model parallel", "TP"),
        see=("P", "sequence parallel"),
    ),
    Concept(
        name="sequence parallel",
        text="Beside tensor parallel layers, the positions of a sequence are split on the same mesh"
        " axis. A reduce-scatter and an all-gather then take the place of an all-reduce.",
        also=("sequence parallelism", "context parallel", "SP"),
        see=("tensor parallel",),
    ),
    Concept(
        name="ZeRO",
        text="Data parallelism with state that is split over the data axis. ZeRO-1 splits the"
        " optimiser's state, ZeRO-2 the gradients too (reduce-scatter in place of all-reduce), and"
        " ZeRO-3 the weights too, which are gathered on use.",
        also=("ZeRO-1", "ZeRO-2", "ZeRO-3"),
        see=("data parallel", "FSDP"),
    ),
    Concept(
        name="FSDP",
        text="Fully sharded data parallelism, which is ZeRO-3: weights, gradients and optimiser's"
        " state are split over the data axis. Each layer gathers its weights before use. See"
        " `sbp.fully_sharded`.",
        also=("fully sharded",),
        see=("ZeRO", "all-gather"),
    ),
    Concept(
        name="expert parallel",
        text="The experts of a mixture-of-experts layer are split on a mesh axis. Tokens go to the"
        " devices of their experts and back, by two all-to-alls.",
        also=("expert parallelism", "mixture of experts", "MoE", "EP"),
        see=("all-to-all",),
    ),
    Concept(
        name="pipeline",
        text="Layers are split in stages over a mesh axis. Microbatches pass from stage to stage.",
        also=("pipeline parallel", "pipeline parallelism", "microbatch", "PP"),
        see=("ring",),
    ),
    Concept(
        name="rematerialisation",
        text="The backward pass computes values of the forward pass again, in place of keeping"
        " them: `jax.checkpoint`. sbp does not repeat their collectives where memory has room for"
        " the results.",
        also=("jax.remat", "jax.checkpoint", "checkpointing"),
        see=("peak memory",),
    ),
    Concept(
        name="peak memory",
        text="The most bytes that one device holds at any time of a call, by the plan: arguments,"
        " results and temporaries that are alive together.",
        also=("memory",),
        see=("rematerialisation",),
    ),
    Concept(
        name="modelled time",
        text="The seconds of a call in a model: the work of each operation on the named hardware,"
        " and for each collective a latency and bytes at the bandwidth of its links. It is not"
        " measured. `sbp hardware` lists the figures.",
        also=("cost", "cost model"),
        see=("collective",),
    ),
    Concept(
        name="plan",
        text="What sbp makes of a program: each local operation, each conversion with its"
        " collective and bytes, and each loop. `f.plan(..)` makes it, `plan.report()` shows it, and"
        " calling it runs it.",
        also=("program",),
        see=("boxing", "modelled time"),
    ),
    Concept(
        name="uneven",
        text="A dim whose size the mesh axis does not divide. sbp splits it in blocks of which the"
        " last are smaller, and pads them on the devices. At the boundary of a program such a dim"
        " is held `B`, unless `sbp.padded` says otherwise.",
        also=("padding", "padded"),
        see=("S",),
    ),
)


CONCEPT_WORDS = {word: concept for concept in CONCEPTS for word in (concept.name, *concept.also)}
"""The concept of each name."""


def concept_named(name: str) -> Concept | None:
    """The concept of a name: in the case that is given, else in any; None for other names.

    >>> concept_named("partial").name, concept_named("zero").name
    ('P', 'ZeRO')
    """
    folded = {_plain(word): concept for word, concept in reversed(CONCEPT_WORDS.items())}
    return CONCEPT_WORDS.get(name) or folded.get(_plain(name))


def _plain(name: str) -> str:
    """A name in small letters without its module, its words separated by blanks."""
    return " ".join(name.rpartition(".")[2].casefold().replace("_", " ").replace("-", " ").split())

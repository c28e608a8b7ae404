"""Options of the training program: on the command line, in a TOML file, of several processes, and
of profiles, which are read back."""

import dataclasses
import gzip
import json
import math
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from examples.gshard.hosts import Hosts, between_processes
from examples.gshard.options import parse_args, undivided
from examples.gshard.presets import ALIASES, PRESETS, preset
from examples.gshard.profiler import FOLDER, Profiler, Window
from sbp.moe.model import init_params
from sbp.moe.sharding import sharding_of
from tests.same import refused


def test_options_override_the_preset():
    run = parse_args(
        [
            "--preset",
            "tiny-test",
            "--steps",
            "7",
            "--set",
            "dropout=0.3",
            "--set",
            "power=1",
            "--mesh",
            "expert=8",
            "--profile",
            "6:7",
        ]
    )
    taken = run.train.steps, run.model.dropout, run.train.power, run.mesh, str(run.workdir)
    assert taken == (7, 0.3, 1.0, (("expert", 8),), "runs/tiny-test")
    where = sharding_of(run.mesh)
    assert (run.profile, where.groups["group"], where.experts["expert"]) == (
        Window(6, 7),
        ("expert",),
        ("expert",),
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "tiny"], 'did you mean "tiny-mt"'),
        (["--stepz", "3"], 'did you mean "--steps"'),
        (["--presett", "tiny-mt"], "no option"),
        (["--set", "expertz=3"], 'did you mean "experts"'),
        (["--set", "experts"], "write NAME=VALUE"),
        (["--steps", "many"], "steps needs a value like"),
        (["--mesh", "data=2,expert"], "not of the form"),
        (["--mesh", "data=2,experts=4"], 'did you mean "expert"'),
        (["--steps"], "expected one argument"),
        (["--steps", "5", "--set", "steps=7"], "--steps 5 and --set steps=7 contradict"),
        (["--set", "steps=5", "--set", "steps=7"], "steps is set twice, to 5 and to 7"),
        (["--data", ""], "--data is empty"),
        (["--workdir", ""], "--workdir is empty"),
        (["--set", "dtype=float64"], "set JAX_ENABLE_X64=1"),
        (["--set", "weight_decay=0.1"], "only runs with optimizer adamw read it"),
        (["--set", "schedule=cosine", "--set", "warmup_steps=9"], "with schedule sqrt_decay"),
        (["--set", "router_bias_rate=0.1"], "only runs with router sigmoid"),
        (["--set", "dispatch=sort", "--set", "capacity_rounding=ceil"], "einsum or gather"),
        (["--preset", "tiny-mt-dense", "--set", "router=switch"], "only runs with experts"),
        (["--set", "sequence_parallel=true"], "which --mesh has not"),
        (["--mesh", "model=2", "--set", "dispatch=sort"], "leave the axis out of --mesh"),
        (["--data", "mine.tsv", "--languages", "3"], "--languages chooses languages of a corpus"),
        (["--set", "optimizer=adam"], 'did you mean "adamw"'),
        (["--set", "learning_rate=nan"], "learning_rate is nan"),
        (["--set", "clip_norm=-1"], "clip_norm is -1.0"),
        (["--set", "character_coverage=0.5"], "character_coverage is 0.5; SentencePiece takes"),
        (["--set", "character_coverage=nan"], "character_coverage is nan"),
        (["--set", "sampling_temperature=0.5"], "temperature is 0.5; it must be at least 1"),
        (["--set", "sampling_temperature=inf"], "sampling_temperature is inf"),
        (["--set", "vocabulary_threads=0"], "vocabulary_threads is 0"),
        (["--set", "sampling_temperature=5", "--set", "pack=true"], "leave out one of the two"),
        (["--steps", "9", "--profile", "8:10"], "ends behind the last step, 9"),
    ],
)
def test_bad_options(argv, message):
    refused(re.escape(message), parse_args, argv)


def test_options_that_something_reads_are_taken():
    run = parse_args(
        [
            "--set",
            "optimizer=adamw",
            "--set",
            "weight_decay=0.1",
            "--set",
            "decoder_router=sigmoid",
            "--set",
            "router_bias_rate=0.1",
            "--set",
            "capacity_rounding=ceil",
        ]
    )
    assert (run.train.weight_decay, run.model.router_bias_rate) == (0.1, 0.1)


def test_what_tensor_parallelism_cannot_split_is_said():
    run = parse_args(["--mesh", "model=8"])  # 4 heads, and all else in powers of two
    heads = "heads is 4, which 8 does not divide: it is not split on the mesh axis model"
    assert heads in undivided(run)
    assert not undivided(parse_args(["--mesh", "data=3,expert=5"]))


def printed(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_args([*argv, "--print-config"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["--preset", "tiny-test"],
        ["--preset", "tiny-mt-dense", "--mesh", "data=4,model=2", "--set", "zero=1", "--no-eval"],
        [
            "--set",
            "optimizer=adamw",
            "--set",
            "weight_decay=0.1",
            "--workdir",
            'a "b" \\ é',
            "--seed=3",
        ],
        ["--corpus", "catalogues", "--set", "learning_rate=1e-05", "--tensorboard", "--steps", "9"],
        ["--data", "mine.tsv", "--eval-data", "theirs.tsv", "--set", "pack=true"],
    ],
    ids=" ".join,
)
def test_what_is_printed_reads_back_as_the_same_run(argv, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(printed(argv, capsys), "utf-8")
    assert parse_args(["--config", str(file)]) == parse_args(argv)
    assert printed(["--config", str(file)], capsys) == file.read_text("utf-8")


def test_the_command_line_goes_before_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "tiny-test"\nmesh = "data=8"\n[train]\nsteps = 5\nseed = 1\n')
    run = parse_args(["--config", str(file), "--steps", "6", "--mesh", "expert=2"])
    assert (run.train.steps, run.train.seed, run.mesh, run.workdir.as_posix()) == (
        6,
        1,
        (("expert", 2),),
        "runs/tiny-test",
    )
    assert parse_args(["--config", str(file), "--preset", "tiny-mt"]).model.experts == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps = 3", "no option 'stepps'; did you mean \"steps\""),
        ("steps = 3", "no option 'steps'; it belongs under [train]"),
        ("[model]\nsteps = 3", "no option 'steps' under [model]; it belongs under [train]"),
        ("[model]\nexpert = 3", 'did you mean "experts"'),
        ("[train]\nFREE = 3", "no option 'FREE' under [train]"),
        ('[train]\nsteps = "3"', "steps is '3' under [train]; it must be a whole number"),
        ("[train]\nsteps = 3.5", "it must be a whole number"),
        ("[train]\nsteps = true", "it must be a whole number"),
        ("[train]\npack = 1", "it must be true or false"),
        ("[model]\ndtype = 16", "it must be text in quotes"),
        ("[train]\nseed = -5", "seed is -5"),
        ("model = 3", "model is a table"),
        ('evaluate = "no"', "evaluate is 'no'; it must be true or false"),
        ("[train", "is not TOML"),
        ("[train]\nsteps = 1\nsteps = 2", "is not TOML"),
        ('preset = "tiny"', "no preset 'tiny'"),
        ('mesh = "row=8"', "no mesh axis 'row'"),
        ("[train]\nweight_decay = 0.1", "weight_decay does nothing here"),
        ("# mine\nsteps = 3", "run.toml:2: no option 'steps'"),
        ("[model]\nexperts = 8\n\nexpert = 3\n[train]", "run.toml:4: no option 'expert'"),
        ("[model]\n[train]\nsteps = 1\npack = 1", "run.toml:4: pack is 1 under [train]"),
        ('evaluate = """\nno"""\nmodel = 3', "run.toml:2: evaluate is 'no'"),
        ("[model]\n[model.experts]\nof = 3", "run.toml:2: experts is {"),
    ],
)
def test_bad_files(text, message, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    refused(re.escape(message), parse_args, ["--config", str(file)])


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin").write_bytes(b"# \xe9")
    for name, said in (
        ("none", r"cannot read .*none: No such file"),
        (".", r"cannot read .*: Is a directory"),
        ("latin", r"is not TOML: .*utf-8"),
    ):
        refused(said, parse_args, ["--config", str(tmp_path / name)])


AT = ["--coordinator", "host0:1234"]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--processes", "2"], "unknown-option", "need --coordinator, the HOST:PORT of process 0"),
        (["--coordinator", "host0"], "unknown-option", "is 'host0'; write HOST:PORT"),
        (["--coordinator", "host0:99999"], "unknown-option", "write HOST:PORT"),
        ([*AT, "--processes", "0"], "unknown-option", "--processes is 0; it must be at least 1"),
        ([*AT, "--processes", "2", "--process", "2"], "unknown-option", "from 0 to 1"),
        ([*AT, "--distributed"], "unknown-option", "finds the other processes by itself"),
        (["--wait", "0"], "unknown-option", "at least 1 second"),
        ([*AT, "--processes", "3"], "mesh-devices", "the mesh has 8 devices, and 3 processes"),
        (["--proceses", "2"], "unknown-option", 'did you mean "--processes"'),
    ],
)
def test_wrong_options_of_processes_are_named(argv, code, said):
    refused(f"(?s)^{code}: .*{re.escape(said)}", parse_args, argv)


def test_options_name_the_processes():
    run = parse_args([*AT, "--processes", "4", "--process", "3", "--wait", "9"])
    assert run.hosts == Hosts(coordinator="host0:1234", processes=4, process=3, wait=9)
    assert parse_args([]).hosts == Hosts()


def test_a_coordinator_that_does_not_answer_is_named():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    options = f"--preset tiny-test --coordinator {address} --processes 2 --process 1 --wait 1"
    ended = subprocess.run(
        [sys.executable, "-m", "sbp", "train", *options.split()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        f"error[processes-differ]: process 1 of 2 waited 1 seconds for the others at {address}"
    )


def test_options_that_differ_between_processes_are_named():
    first = {"train": {"seed": 1, "steps": 5, "data": "/a/text.tsv"}, "run": {"evaluate": True}}
    other = {"train": {"seed": 1, "steps": 6, "data": "/b/text.tsv"}, "run": {"evaluate": False}}
    assert between_processes(first, first) == []
    assert between_processes(first, other) == [
        "train.steps: 5 in process 0, 6 in this one",
        "run.evaluate: True in process 0, False in this one",
    ]


def profiled(folder):
    """The numbers of the steps that are in the profiles of a run."""
    return {
        int(event["args"]["step_num"])
        for file in (folder / FOLDER).rglob("*.trace.json.gz")
        for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        if event.get("name") == "train" and "step_num" in event.get("args", {})
    }


def train(folder, window, steps, done=0):
    with Profiler(window, folder, done) as profiler:
        for number in range(done + 1, steps + 1):
            with profiler.step(number):
                jax.block_until_ready(jnp.sum(jnp.ones(8)))


@pytest.mark.parametrize(
    ("window", "steps", "done", "want"),
    [
        (Window(2, 3), 5, 0, {2, 3}),
        (Window(4, 9), 5, 1, {4, 5}),  # a run that was stopped
        (None, 3, 0, set()),
    ],
)
def test_the_steps_of_the_window_are_profiled(tmp_path, window, steps, done, want):
    train(tmp_path, window, steps, done)
    assert profiled(tmp_path) == want


def test_a_window_that_is_over_is_refused(tmp_path):
    refused("begins with a step that is done", Profiler, Window(3, 5), tmp_path, done=3)


@pytest.mark.parametrize("text", ["", "10", "5:4", "0:3", "a:b", "-1:3", "1:2:3"])
def test_a_window_of_another_form_is_refused(text):
    refused("not of the form 10:15", Window.parse, text, 100)


# ---- presets -------------------------------------------------------------------------------------
# Parameter counts of the paper's models, from shapes alone.


# T4: layers, experts, heads, width of a head, and the weights that the paper says (GShard, tables 1
# and 3; its "B" is 2**30).
PAPER = {
    "gshard-12l-128e": (12, 128, 16, 128, 12.5 * 2**30),
    "gshard-36l-128e": (36, 128, 16, 128, 37 * 2**30),
    "gshard-12l-512e": (12, 512, 16, 128, 50 * 2**30),
    "gshard-36l-512e": (36, 512, 16, 128, 150 * 2**30),
    "gshard-12l-2048e": (12, 2048, 16, 128, 200 * 2**30),
    "gshard-36l-2048e": (36, 2048, 16, 128, 600 * 2**30),
    "gshard-60l-2048e": (60, 2048, 16, 128, 1e12),
    "gshard-96l-dense": (96, 0, 16, 64, 2.3e9),
}


def counted(layers, experts, heads, width):
    """Weights of a model of width 1024, with hidden layers of 8192 and vocabularies of 64,000 and
    32,000."""
    wide = 2 * 1024 * 8192
    attention = 4 * 1024 * heads * width
    moe, dense = (layers // 2, layers // 2) if experts else (0, layers)
    return (
        (layers + layers // 2) * attention  # a decoder's layers have two
        + dense * wide
        + moe * experts * (wide + 1024)  # and a column of the router
        + (64_000 + 2 * 32_000) * 1024
        + (layers // 2 * (2 + 3) + 2) * 1024  # norms, of an encoder's layers and a decoder's
    )


@pytest.mark.parametrize("name", PAPER)
def test_models_have_as_many_weights_as_the_papers(name):
    *shape, said = PAPER[name]
    held = sum(weights_of(PRESETS[name].model).values())
    assert held == counted(*shape) == pytest.approx(said, rel=0.04)


def test_every_model_of_the_paper_is_listed():
    assert set(PAPER) == {name for name in PRESETS if name.startswith("gshard-")}


def test_the_papers_names_stand_for_its_models():
    """A name gives the weights, such as "gshard-600b", or the shape, such as "MoE(2048E, 36L)"."""
    weights = {"b": 1e9, "t": 1e12}
    for alias, name in ALIASES.items():
        assert preset(alias) is preset(alias.lower()) is PRESETS[name]
        if alias.startswith("gshard-"):
            said = float(alias[len("gshard-") : -1]) * weights[alias[-1]]
            assert PAPER[name][-1] == pytest.approx(said, rel=0.08)  # 2**30, or 10**9
        else:
            layers, experts = PAPER[name][:2]
            assert alias == (f"MoE({experts}E, {layers}L)" if experts else f"T({layers}L)")


def weights_of(model):
    """The number of weights under each top entry of the parameters."""
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), model))
    return {
        name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
        for name, tree in params.items()
    }


def test_mixtral_has_the_weights_that_its_authors_publish():
    """46.7B in all and 12.9B for a token, embedding and logits included (Jiang et al., 2024): the
    attention, six of eight experts less, and the rest."""
    model = PRESETS["mixtral-8x7b"].model
    found = sum(weights_of(model).values())
    expert = 32 * 3 * 4096 * 14336
    attention = 32 * 2 * 4096 * 128 * (32 + 8)
    assert found == 8 * expert + attention + 32 * 4096 * (8 + 2) + 4096 + 2 * 32_000 * 4096
    assert f"{found / 1e9:.1f}, {(found - 6 * expert) / 1e9:.1f}" == "46.7, 12.9"


@pytest.mark.parametrize(
    ("experts", "said"),
    [(0, "0.223"), (16, "1.1"), (32, "2.0"), (64, "3.8"), (128, "7.4"), (256, "14.7")],
)
def test_switch_base_has_the_published_weights(experts, said):
    """Fedus et al., 2021, tables 7 and 9, and T5-Base without experts. T5 has one table for
    source, target and logits: two of three do not count."""
    model = dataclasses.replace(PRESETS["switch-base"].model, experts=experts)
    if not experts:
        model = dataclasses.replace(model, expert_dim=model.ffn_dim // 2)
    found = weights_of(model)
    counted = sum(found.values()) - found["source_embedding"] - found["logits"]
    assert f"{counted / 1e9:.{len(said.split('.')[1])}f}" == said


MESH_TENSORFLOW = {
    "lm": {4: "0.14", 8: "0.22", 16: "0.37", 32: "0.67", 64: "1.28", 128: "2.48", 256: "4.90"},
    "mt": {4: "0.15", 8: "0.24", 16: "0.42", 32: "0.77", 64: "1.48", 128: "2.89"},
}
"""Billions of weights by heads, tables 2 and 3 of Shazeer et al., 2018."""


@pytest.mark.parametrize("table", MESH_TENSORFLOW)
def test_mesh_tensorflows_tables(table):
    """Two tables count: of the tokens, shared by both sides, and of the logits."""
    for heads, said in MESH_TENSORFLOW[table].items():
        found = weights_of(PRESETS[f"mesh-tf-{table}-{heads}h"].model)
        counted = sum(found.values()) - found.get("source_embedding", 0)
        assert f"{counted / 1e9:.2f}" == said

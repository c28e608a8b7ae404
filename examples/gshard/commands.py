"""The commands `sbp translate` and `sbp evaluate`: what a trained model says, from a checkpoint."""

from __future__ import annotations

import dataclasses
import math
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.gshard.corpus import Corpus, by_count, read_lines, read_tsv
from examples.gshard.deltas import figure6, language_deltas
from examples.gshard.display import show_evaluation
from examples.gshard.drawing import canvas, write_drawings
from examples.gshard.evaluate import MODEL, baselines, copying, evaluate
from examples.gshard.export import SavedRun, open_run, read_export
from examples.gshard.machine import make_mesh
from examples.gshard.options import CommandParser, Run, parse_mesh
from examples.gshard.sources import load
from examples.gshard.translator import Translator, plan_search
from sbp.errors import SbpError, nearest
from sbp.moe.decode import ALPHA, BeamSearch
from sbp.moe.sharding import leaf_types, simulate_devices


def _parser(name: str, description: str, beam: int) -> CommandParser:
    """The options that both commands have."""
    parser = CommandParser(prog=f"sbp {name}", description=description, allow_abbrev=False)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--workdir", help="folder of a training run")
    model.add_argument("--from", dest="file_of", metavar="FILE", help="a file of sbp export")
    parser.add_argument(
        "--mesh", default="data=1", help="axes and sizes, outer first (default data=1: one device)"
    )
    parser.add_argument(
        "--beam",
        type=int,
        default=beam,
        help=f"hypotheses of a sentence (default {beam}); 1 is greedy",
    )
    parser.add_argument(
        "--alpha",
        type=float,
        default=ALPHA,
        help="scores are divided by ((5 + length) / 6) ** alpha (default %(default)s)",
    )
    return parser


def translate_parser() -> CommandParser:
    """The options of `sbp translate`."""
    parser = _parser("translate", "Translates text, one sentence on each line.", beam=4)
    parser.add_argument("--to", help="the language to translate to; a run has one")
    parser.add_argument(
        "file", nargs="?", default="-", metavar="FILE", help="UTF-8 text; - for standard input"
    )
    return parser


def evaluate_parser() -> CommandParser:
    """The options of `sbp evaluate`."""
    parser = _parser("evaluate", "Scores the translations of a test set.", beam=1)
    parser.add_argument(
        "--eval-data",
        help="a test set: UTF-8, source <tab> target <tab> language per line; the run's own"
        " held-out sets when left out",
    )
    parser.add_argument("--data", help="the run's own text, where it has moved")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="RUN",
        help="the folder of another run to compare with by language; again for more of them",
    )
    parser.add_argument(
        "--figures", metavar="FOLDER", help="draw the comparison (figure 6), as PNG and HTML"
    )
    return parser


def _translator(args: Namespace, saved: SavedRun, texts: int) -> Translator:
    """The model of a run on the mesh of the options, with batches no larger than the texts need."""
    if args.beam < 1:
        raise SbpError(f"--beam is {args.beam}; it must be at least 1", code="unknown-option")
    if not 0 <= args.alpha < math.inf:
        raise SbpError(
            f"--alpha is {args.alpha}; it must be at least 0 and a finite number",
            code="unknown-option",
        )
    model = saved.model
    if model.router != "expert_choice":  # whose translations depend on the batch
        needed = max(1, -(-texts // model.groups))
        fewer = min(model.sequences_per_group, needed)
        model = dataclasses.replace(model, sequences_per_group=fewer)
    run = Run(
        model=model,
        train=dataclasses.replace(saved.train, sequence_parallel=False),
        mesh=parse_mesh(args.mesh),
        workdir=saved.workdir,
        tensorboard=False,
        evaluate=True,
    )
    search = BeamSearch(cfg=run.model, sharding=run.sharding, beam=args.beam, alpha=args.alpha)
    plan = plan_search(search, make_mesh(run.mesh), saved.shapes, leaf_types(run.mesh))
    params = saved.params(plan.in_shardings[0], _say)
    return Translator(
        plan=plan, params=params, source=saved.source, target=saved.target, cfg=run.model
    )


def _open(args: Namespace) -> SavedRun:
    """The model of the options, with devices for their mesh: to read it uses one."""
    simulate_devices(math.prod(size for _, size in parse_mesh(args.mesh)))
    return read_export(Path(args.file_of)) if args.file_of else open_run(Path(args.workdir))


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def translate(argv: Sequence[str]) -> int:
    """The command line of `sbp translate`: a line of text in, a line of translation out.

    Raises:
      SbpError: `bad-checkpoint` without a checkpoint; `bad-corpus` for text that cannot be read,
        and for lines longer than the model's, after the others are translated; `unknown-option`
        for other options and languages.
    """
    args = translate_parser().parse_all(argv)
    saved = _open(args)
    if args.to is not None:
        _known_language(args.to, saved)
    name, lines = _lines(args.file)
    texts = list(dict.fromkeys(line for line in lines if line.strip()))
    found = dict(zip(texts, _translator(args, saved, len(texts))(texts), strict=True))
    for line in lines:
        print(found.get(line) or "")
    if long := [str(i) for i, line in enumerate(lines, 1) if found.get(line, "") is None]:
        more = f" and {len(long) - 3} more" if len(long) > 3 else ""
        raise SbpError(
            f"{name}: no translation of line {', '.join(long[:3])}{more}, which an empty line"
            f" stands for: it has more than the {saved.model.source_length} pieces of this model."
            " Split the text there, or train a model with a larger source_length",
            code="bad-corpus",
        )
    return 0


def _known_language(language: str, saved: SavedRun) -> None:
    """Refuse a language that the model does not say."""
    if saved.train.data:
        raise SbpError(
            "the text of this run does not say which language its translations are in; leave out"
            " --to",
            code="unknown-option",
        )
    if language != "en":
        raise SbpError(
            f"this model does not translate to {language!r}{nearest(language, ['en'])}",
            code="unknown-option",
        )


def _lines(file: str) -> tuple[str, list[str]]:
    """What the text is called, and its lines."""
    name = "standard input" if file == "-" else file
    read = sys.stdin.buffer.read if file == "-" else Path(file).read_bytes
    lines = list(read_lines(name, read))
    return name, lines[:-1] if lines[-1] == "" else lines


def evaluate_run(argv: Sequence[str]) -> int:
    """The command line of `sbp evaluate`: scores by test set and by language.

    Raises:
      SbpError: `bad-checkpoint` without a checkpoint; `bad-corpus` for text that cannot be read or
        is not that of the run; `unknown-option` for other options.
    """
    args = evaluate_parser().parse_all(argv)
    if args.figures and not args.against:
        raise SbpError(
            "--figures draws a comparison; name the run to compare with (--against)",
            code="unknown-option",
        )
    saved = _open(args)
    rivals = _rivals(args, saved)
    corpus = _test_set(args, saved)
    pairs = corpus.heldout_pairs
    if corpus.is_plain:
        raise SbpError(
            "plain text has no translations to score; the curves of the run have the held-out loss",
            code="bad-corpus",
        )
    sources = [pair.source for pair in pairs]
    others = copying(pairs) if args.eval_data else baselines(corpus.train, pairs)
    if taken := rivals.keys() & {MODEL, *others}:
        raise SbpError(
            f"--against {min(taken)} has the name of another system that is scored; write"
            f" ./{min(taken)}",
            code="unknown-option",
        )
    said = {MODEL: _translator(args, saved, len(pairs))(sources)}
    said |= {name: _translator(args, other, len(pairs))(sources) for name, other in rivals.items()}
    result = evaluate(corpus.heldout, {**said, **others}, corpus.languages, saved.target)
    console = Console()
    show_evaluation(console, result, languages=True)
    if rivals:
        text = _own_text(args, saved) if args.eval_data else corpus
        deltas = language_deltas(result, list(rivals), Counter(p.language for p in text.train))
        console.print(str(deltas), highlight=False, markup=False, soft_wrap=True)
        if args.figures:
            title = f"Figure 6 of {saved.workdir}"
            for file in write_drawings(
                Path(args.figures), "figure6.html", title, (figure6(deltas),)
            ):
                console.print(f"wrote {file}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _rivals(args: Namespace, saved: SavedRun) -> dict[str, SavedRun]:
    """The runs to compare with, by folder.

    Raises:
      SbpError: `bad-corpus` where one was trained on other text, whose held-out sets are not these.
    """
    if args.figures:
        canvas()  # refuses before any translation
    rivals = {name: open_run(Path(name)) for name in args.against}
    for name, other in rivals.items():
        if not args.eval_data and other.corpus != saved.corpus:
            raise SbpError(
                f"{name} was trained on other text than {saved.workdir}, so it may have seen these"
                " held-out sets; give a test set that neither has seen (--eval-data)",
                code="bad-corpus",
            )
    return rivals


def _test_set(args: Namespace, saved: SavedRun) -> Corpus:
    """The user's test set, or the text of the run with its held-out sets."""
    if args.eval_data:
        pairs = read_tsv(args.eval_data)
        return Corpus(train=(), heldout={"test set": pairs}, languages=by_count(pairs))
    return _own_text(args, saved)


def _own_text(args: Namespace, saved: SavedRun) -> Corpus:
    """The text of the run with its held-out sets."""
    train = dataclasses.replace(saved.train, data=args.data or saved.train.data)
    corpus = load(train, _say)
    if corpus.digest != saved.corpus:
        raise SbpError(
            f"the training text of {saved.workdir} is another one now, so its held-out sets are"
            " not known; give its text (--data), or a test set (--eval-data)",
            code="bad-corpus",
        )
    return corpus

"""The command line: flags over a YAML file over defaults, then the run; jax is imported last."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surprisal_jax import __version__
from surprisal_jax.allocator import keep_freed_memory
from surprisal_jax.config import (
    ExperimentConfig,
    InputError,
    Setting,
    all_settings,
    closest_settings,
    known_tasks,
    load_config,
    sections_of,
    show,
)

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
CONFIG_EXPECTED = "a YAML file such as configs/grid_pathfinding.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one experiment. Returns the exit status: 0, 2 after a user's mistake, 130 after Ctrl-C."""
    program = _program()
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        if isinstance(arguments, str):
            _print_to_pipe(arguments)
            return 0
        path, flags = arguments
        config = load_config(path, flags)
        keep_freed_memory()

        from surprisal_jax.run import run

        run(config, Path(path).stem)
    except InputError as error:
        # A file's name may hold anything; the message stays one line all the same.
        line = "".join(c if c.isprintable() else " " for c in str(error))
        print(f"{program}: error: {line}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command resumes the run", file=sys.stderr)
        return INTERRUPTED
    return 0


def _print_to_pipe(text: str) -> None:
    """Print, and let a reader such as `head` leave before the end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes stdout again as it exits, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _program() -> str:
    return "surprisal-jax" if Path(sys.argv[0]).stem == "surprisal-jax" else "train.py"


def _parse(argv: Sequence[str]) -> str | tuple[str, dict[str, Any]]:
    """The text to print for `--help` and `--version`, or the YAML file and the fields given as flags."""
    parser = _parser()
    given, unknown = parser.parse_known_args(_with_values(argv))
    flags = vars(given)
    if flags.pop("help"):
        return parser.format_help().rstrip()
    if flags.pop("version"):
        return f"surprisal-jax {__version__}"
    if unknown:
        raise InputError(_unknown(unknown[0]))
    path = flags.pop("config", None)
    if not path:
        got = "nothing" if path is None else show(path)
        raise InputError(f"--config: got {got}, expected {CONFIG_EXPECTED}")
    settings = all_settings()
    return path, {name: settings[name].parse(text) for name, text in flags.items()}


def _with_values(argv: Sequence[str]) -> list[str]:
    """`--beta -1e-4`, two flags to argparse, as `--beta=-1e-4`; and no flag without a value."""
    expected = {item.flag: item.expected for item in all_settings().values()} | {"--config": CONFIG_EXPECTED}
    joined: list[str] = []
    for argument in [*argv, "--"]:
        if not joined or joined[-1] not in expected:
            joined.append(argument)
        elif argument.startswith("--"):
            raise InputError(f"{joined[-1]}: got no value, expected {expected[joined[-1]]}")
        else:
            joined[-1] += "=" + argument
    return joined[:-1]


def _unknown(argument: str) -> str:
    if not argument.startswith("-"):
        return f"got {show(argument)}, expected only flags, such as --config FILE"
    flag = argument.partition("=")[0]
    meant = [item.flag for item in closest_settings(flag)]
    if not meant:
        meant = difflib.get_close_matches(flag, ["--config", "--help", "--version"], n=1)
    hint = f"did you mean {' or '.join(meant)}?" if meant else "expected a flag that --help lists"
    return f"unknown flag {flag if flag.isprintable() else show(flag)}, {hint}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise InputError(message.removeprefix("argument "))

    def format_help(self) -> str:
        example = "python train.py --config configs/grid_pathfinding.yaml --seed 1"
        return f"example: {example}\n\n{super().format_help()}"


class _StoreOnce(argparse.Action):
    """A flag given twice is a mistake: which of the two counts is nothing a user should have to remember."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        if hasattr(namespace, self.dest):
            earlier = getattr(namespace, self.dest)
            raise InputError(f"{option}: given twice, first {show(earlier)}, then {show(values)}, expected once")
        setattr(namespace, self.dest, values)


def _parser() -> _Parser:
    parser = _Parser(
        prog=_program(),
        usage=f"{_program()} --config FILE [--flag VALUE ...]",
        description="Takes a language model apart into its hidden strategies: trains the entangled "
        "reference, scores the training set with it, trains router, generator and posterior, and evaluates "
        "them. The same command resumes a run. Flags win over the file, the file over the defaults.",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
    )
    command = parser.add_argument_group("command")
    command.add_argument("--config", action=_StoreOnce, metavar="FILE", help="YAML file of the run (required)")
    command.add_argument("--help", "-h", action="store_true", default=False, help="print this and exit")
    command.add_argument("--version", action="store_true", default=False, help="print the version and exit")
    titles = {"": ("run", ExperimentConfig)} | {
        name: (name, cls) for name, cls in sections_of(ExperimentConfig).items()
    }
    groups = {
        section: parser.add_argument_group(title, (cls.__doc__ or "").strip())
        for section, (title, cls) in titles.items()
    }
    for item in all_settings().values():
        groups[item.name.rpartition(".")[0]].add_argument(
            item.flag, dest=item.name, action=_StoreOnce, metavar=_metavar(item), help=_help(item)
        )
    return parser


def _metavar(item: Setting) -> str:
    if _lists_choices(item):
        return "|".join(item.choices)
    if item.choices:
        return "CHOICE"
    return {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}[item.kind]


def _lists_choices(item: Setting) -> bool:
    """Whether the choices fit behind the flag on one line; else the help lists them."""
    return 0 < len("|".join(item.choices)) <= 40


def _help(item: Setting) -> str:
    notes = []
    if item.choices and not _lists_choices(item):
        notes.append(item.expected)
    if item.name == "task":
        notes.append("one of " + ", ".join(known_tasks()) + ", or none")
    elif item.kind in (int, float) or (item.optional and item.kind is str):
        notes.append(item.expected.removeprefix("an ").removeprefix("a "))
    default = item.default if isinstance(item.default, str) else show(item.default)
    notes.append(f"default {default}")
    return f"{item.help} [{'; '.join(notes)}]".replace("%", "%%")

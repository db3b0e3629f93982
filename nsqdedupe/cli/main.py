"""The command line: ``nsqdedupe demo`` and ``nsqdedupe demo-cluster``."""

from __future__ import annotations

import argparse
import asyncio
import enum
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from nsqdedupe.cli.demo import run_demo
from nsqdedupe.cli.demo_cluster import MESSAGES, run_demo_cluster
from nsqdedupe.cli.demo_events import InputError
from nsqdedupe.errors import DedupeError, MissingDependency
from nsqdedupe.version import __version__


class Exit(enum.IntEnum):
    """Exit statuses, named in the help."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130


_STATUSES = """\
exit status:
  0    every event was handled once, none was lost
  1    an event was lost or (but for --observe) handled twice, or the run could not be finished
  2    nothing was started: a bad option, an unusable input, or no nsqd
  130  interrupted by SIGINT or SIGTERM"""

_CLUSTER_STATUSES = """\
exit status:
  0    every event was handled, none was lost
  1    an event was lost, more were handled twice than the kills explain, or the run could not be finished
  2    nothing was started: a bad option, no nsqd or no memcached
  130  interrupted by SIGINT or SIGTERM"""

_DEMO = """\
Starts nsqlookupd and two nsqds on this machine, publishes each event to both of them, consumes them
with a DedupeReader, lets one event in a thousand fail at first, and kills one nsqd halfway.
The last line of the output is `lost 0`, or how many were lost."""


_DEMO_CLUSTER = """\
Starts nsqlookupd, two nsqds, memcached and two consumers that share it, each a process on this machine;
publishes each event to both nsqds, kills one consumer after a third of the events and one nsqd after two.
The last line of the output is `lost 0`, or how many were lost."""


class _Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(Exit.USAGE, f"{self.prog}: {message} (--help says more)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: its arguments; None: those of this process.

    Returns:
        The exit status.

    Raises:
        SystemExit: for --help, --version, and an option that is refused.
    """
    options = _parser().parse_args(argv)
    try:
        return Exit.OK if options.run(options) else Exit.FAILED
    except (InputError, MissingDependency) as error:
        return _complain(options.command, error, Exit.USAGE)
    except DedupeError as error:
        return _complain(options.command, error, Exit.FAILED)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write(f"nsqdedupe {options.command}: interrupted\n")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone: let the interpreter's last flush not complain of it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED


def _demo(options: argparse.Namespace) -> bool:
    return run_demo(options.messages, options.input, observe=options.observe)


def _demo_cluster(options: argparse.Namespace) -> bool:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_demo_cluster(options.messages)
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(command: str, error: DedupeError, status: Exit) -> Exit:
    sys.stderr.write("\n".join([f"nsqdedupe {command}: {error}", *getattr(error, "__notes__", ()), ""]))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nsqdedupe",
        description="De-duplication for NSQ consumers.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"nsqdedupe v{__version__}")
    commands = parser.add_subparsers(metavar="command", dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="two nsqds, a kill: what is lost?",
        description=_DEMO,
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    demo.set_defaults(run=_demo)
    demo.add_argument(
        "--messages",
        type=_count,
        metavar="N",
        help="how many events at most (default: 100,000, or all lines of --input)",
    )
    demo.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="publish the lines of this file (default: the source of Python's standard library)",
    )
    demo.add_argument(
        "--observe",
        action="store_true",
        help="only look on: handle every copy, and count those that would have been finished unprocessed",
    )
    cluster = commands.add_parser(
        "demo-cluster",
        help="two consumers that share a memcached, two kills: what is lost?",
        description=_DEMO_CLUSTER,
        epilog=_CLUSTER_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cluster.set_defaults(run=_demo_cluster)
    cluster.add_argument(
        "--messages", type=_count, default=MESSAGES, metavar="N", help=f"how many events (default: {MESSAGES:,})"
    )
    return parser


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return count

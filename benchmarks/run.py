"""CPU per copy and copies per second of DedupeReader, beside stock pynsq without de-duplication.

Two real nsqds, every message on both, one consumer process at a time, rounds interleaved. The figures of
one machine mean little: read the ratios.

    make bench                          # 5 rounds of 100,000 messages x 2
    make bench ARGS="--rounds 3 --size 2000"
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from pathlib import Path

from figures import spread, tell

from nsqdedupe.cli.local_nsq import Nsqd

HERE = Path(__file__).parent
KINDS = {
    "pynsq": "stock pynsq, every copy handled",
    "dedupe": "stock pynsq, @dedupe with MemoryStore",
    "batching": "DedupeReader, store=False",
    "memory": "DedupeReader, MemoryStore",
}
BATCH = 1000


def publish(nsqds: list[Nsqd], topic: str, messages: int, size: int, seed: int) -> None:
    """Every message to every nsqd: random bodies, so that fingerprints are spread as in life."""
    source = random.Random(seed)  # the same bodies for every contestant of a round
    for start in range(0, messages, BATCH):
        bodies = [source.randbytes(size // 2).hex().encode() for _ in range(min(BATCH, messages - start))]
        for nsqd in nsqds:
            nsqd.mpublish(topic, bodies)


def run(kind: str, nsqds: list[Nsqd], topic: str, args: argparse.Namespace) -> dict[str, float]:
    """One consumer process; its measurements, and the CPU that the nsqds needed meanwhile."""
    command = [sys.executable, str(HERE / "consumer.py"), kind, "--topic", topic, "--channel", kind]
    command += ["--messages", str(args.messages), "--max-in-flight", str(args.max_in_flight)]
    for nsqd in nsqds:
        command += ["--nsqd", nsqd.tcp_address]
    before = sum(map(cpu_seconds, nsqds))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind}: {done.stderr.strip()}")
    figures: dict[str, float] = json.loads(done.stdout)
    figures["nsqd_us_per_copy"] = (sum(map(cpu_seconds, nsqds)) - before) / (args.messages * len(nsqds)) * 1e6
    for nsqd in nsqds:
        left = nsqd.unfinished(topic, kind)
        if left:
            raise SystemExit(f"{kind}: nsqd still holds {left} messages")
    return figures


def cpu_seconds(nsqd: Nsqd) -> float:
    """User and system time of a process (Linux)."""
    fields = Path(f"/proc/{nsqd.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(results: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> str:
    """A table: ratios to stock pynsq of the same round first, then the medians they come from."""
    job = f"{args.messages:,} messages of {args.size} B x 2 nsqds, max_in_flight {args.max_in_flight}"
    lines = [
        f"{args.rounds} rounds, {job}, handler counts only; medians, (lowest to highest).",
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end.",
        "",
        "| consumer | CPU, x less than pynsq | rate, x pynsq | us of CPU per copy | copies/s | nsqds, us per copy |",
        "|---|---|---|---|---|---|",
    ]
    for kind, name in KINDS.items():
        rounds = results[kind]
        pairs = list(zip(results["pynsq"], rounds, strict=True))
        less = [base["us_per_copy"] / mine["us_per_copy"] for base, mine in pairs]
        faster = [mine["copies_per_s"] / base["copies_per_s"] for base, mine in pairs]
        cells = [
            spread(less, "{:.1f}"),
            spread(faster, "{:.1f}"),
            spread([r["us_per_copy"] for r in rounds], "{:.2f}"),
            spread([r["copies_per_s"] for r in rounds], "{:,.0f}"),
            spread([r["nsqd_us_per_copy"] for r in rounds], "{:.1f}"),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=200, help="bytes of a body")
    parser.add_argument("--max-in-flight", type=int, default=2500)
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    flags = ("--mem-queue-size=10000000", "--max-rdy-count=10000", "--max-body-size=100000000")
    with Nsqd(*flags) as one, Nsqd(*flags) as other:
        nsqds = [one, other]
        for number in range(args.rounds):
            topic = f"bench_{number}"
            for nsqd in nsqds:
                nsqd.create_topic(topic)
                for kind in KINDS:
                    nsqd.create_channel(topic, kind)
            publish(nsqds, topic, args.messages, args.size, number)
            for kind in random.sample(list(KINDS), len(KINDS)):
                results[kind].append(run(kind, nsqds, topic, args))
                print(f"round {number + 1}, {kind}: {results[kind][-1]}", file=sys.stderr)
            for nsqd in nsqds:
                nsqd.request("POST", "/topic/delete", topic=topic)
    tell(f"reader-{args.size}", report(results, args))


if __name__ == "__main__":
    main()

"""What TLS and compression cost a reader, beside stock pynsq over the same.

Two real nsqds, every message on both, one consumer process at a time with a handler that only counts, turns
interleaved. Bodies are random digits of which snappy can save little: what shows is its cost. pynsq cannot do TLS with
snappy. With snappy alone it loses its connection when a read ends within a compressed frame. That is mended for it
here, else a turn in three would take a minute or two, until nsqd gives out again what was in flight.

    make bench BENCH=transports                # 5 rounds of 100,000 messages x 2; stock pynsq gets a fifth
"""

from __future__ import annotations

import random
import ssl
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trustme
from contest import CONTESTANTS, Figures, contest, servers
from figures import Conditions, markdown, options, settle, spread, tell
from job import Job
from plots import bars

STOCK, OURS = "pynsq", "memory"


def turns(authority: str) -> Mapping[tuple[str, str], dict[str, Any]]:
    """Who has a turn over what, with which options of the connection."""
    # pynsq is told to take any TLS, as we do; by default it takes 1.2.
    tls = {"tls_v1": True, "tls_options": {"ca_certs": authority}}
    stock_tls = {"tls_v1": True, "tls_options": {"ca_certs": authority, "ssl_version": int(ssl.PROTOCOL_TLS_CLIENT)}}
    return {
        ("plain TCP", STOCK): {},
        ("plain TCP", OURS): {},
        ("snappy", STOCK): {"snappy": True},
        ("snappy", OURS): {"snappy": True},
        ("TLS", STOCK): stock_tls,
        ("TLS", OURS): tls,
        ("TLS with snappy", OURS): {**tls, "snappy": True},
    }


def certificates(folder: Path) -> tuple[str, tuple[str, ...]]:
    """The file of an authority that vouches for the nsqds, and the flags with which they offer TLS."""
    authority, files = trustme.CA(), [folder / name for name in ("ca.pem", "cert.pem", "key.pem")]
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(files[0]))
    issued.cert_chain_pems[0].write_to_path(str(files[1]))
    issued.private_key_pem.write_to_path(str(files[2]))
    return str(files[0]), (f"--tls-cert={files[1]}", f"--tls-key={files[2]}")


def report(results: Mapping[tuple[str, str], list[Figures]], job: str, header: list[str]) -> str:
    """A table: ratios to stock pynsq over the same, of the same round, first."""
    rows = []
    for (transport, kind), mine in results.items():
        pairs = list(zip(results.get((transport, STOCK), []), mine, strict=False))
        less = [stock["us_per_copy"] / one["us_per_copy"] for stock, one in pairs]
        faster = [one["copies_per_s"] / stock["copies_per_s"] for stock, one in pairs]
        cells = [spread(ratios, "{:.1f}") if ratios else "" for ratios in (less, faster)]
        cells += [spread([one["us_per_copy"] for one in mine], "{:.2f}")]
        cells += [spread([one["copies_per_s"] for one in mine], "{:,.0f}")]
        rows.append([transport, CONTESTANTS[kind].name, *cells])
    columns = ["transport", "consumer", "CPU, x less than pynsq over the same", "rate, x pynsq over the same"]
    table = markdown([*columns, "us of CPU per copy", "copies/s"], rows)
    return "\n".join([f"{job}; medians, (lowest to highest).", *header, "", table])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    args = settle(parser.parse_args())
    messages = 2_000 if args.quick else args.messages
    conditions = Conditions()
    with tempfile.TemporaryDirectory() as folder:
        authority, flags = certificates(Path(folder))
        contestants = turns(authority)
        results: dict[tuple[str, str], list[Figures]] = {turn: [] for turn in contestants}
        with servers(2, *flags) as started:
            for number in range(args.rounds):
                for transport, kind in random.sample(list(contestants), len(contestants)):
                    connection = contestants[transport, kind]
                    job = Job(messages=messages // (5 if kind == STOCK else 1), connection=connection, quick=args.quick)
                    figures = contest(kind, job, started.nsqds, seed=number)
                    results[transport, kind].append(figures)
                    print(f"round {number + 1}, {transport}, {kind}: {figures}", file=sys.stderr)
            packages = ["pynsq", "tornado", "python-snappy"]
            header = conditions.lines(*started.versions(), ssl.OPENSSL_VERSION, packages=packages)
    words = f"{args.rounds} rounds, {messages:,} messages (stock pynsq: a fifth) of 200 B x 2 nsqds"
    tell("transports", report(results, words, header), args.results)
    panels: dict[str, dict[str, list[float]]] = {}
    for (transport, kind), mine in results.items():
        panels.setdefault(transport, {})[CONTESTANTS[kind].name] = [one["us_per_copy"] for one in mine]
    bars("transports", "us of CPU per copy", panels, args.results)


if __name__ == "__main__":
    main()

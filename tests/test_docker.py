"""The demo cluster's compose file keeps to what its programs take, and to what it promises."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[1] / "docker"
COMPOSE = (DOCKER / "compose.yaml").read_text()
COMMANDS = re.findall(r"- -m\n +- ([\w.]+)\n((?: +- --\S+\n)+)", COMPOSE)


def test_it_runs_all_programs() -> None:
    programs = [module.rpartition(".")[2] for module, _ in COMMANDS]
    assert sorted(programs) == ["consumer", "publisher", "summary"]  # the second consumer is an alias


@pytest.mark.parametrize(("module", "options"), COMMANDS)
def test_its_options_are_those_of_the_programs(module: str, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    known = capsys.readouterr().out
    for option in re.findall(r"--[a-z-]+", options):
        assert f"{option} " in known


def test_every_image_is_pinned() -> None:
    images = re.findall(r"image: (\S+)", COMPOSE) + re.findall(r"FROM (\S+)", (DOCKER / "Dockerfile").read_text())
    assert len(images) > 5
    assert [name for name in images if not re.search(r":v?\d+\.\d+\.\d+", name)] == ["nsqdedupe-demo"]


def test_only_this_machine_reaches_a_port() -> None:
    assert re.findall(r"ports: (.*?)(?: #.*)?\n", COMPOSE) == ['["127.0.0.1:4171:4171"]']


@pytest.mark.parametrize(
    "service", re.findall(r"docker compose (?:kill|start) ([^`]+)`", (DOCKER / "README.md").read_text())
)
def test_what_the_readme_kills_is_there(service: str) -> None:
    for name in service.split():
        assert f"\n  {name}:\n" in COMPOSE

"""Draws figures, if matplotlib is there; it is imported only then."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOUR = "#1f77b4"


def bars(name: str, unit: str, panels: Mapping[str, Mapping[str, Sequence[float]]], results: Path | None) -> None:
    """Draw a panel of bars for each title: what each label's values come to, with lines from lowest to highest.

    Args:
        name: of the file in ``results``.

        unit: what is measured; less is better.

        panels: title, then label, then the values of all rounds.

        results: where it is kept; None: nothing is drawn.
    """
    pyplot = _pyplot(name, results)
    if pyplot is None or results is None:
        return
    heights = [len(panel) + 1 for panel in panels.values()]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(10, 0.35 * sum(heights) + 1), height_ratios=heights, squeeze=False, layout="tight"
    )
    for (title, panel), axis in zip(panels.items(), axes[:, 0], strict=True):
        middles = [statistics.median(values) for values in panel.values()]
        axis.barh(list(panel), middles, color=COLOUR, xerr=_whiskers(panel.values(), middles))
        axis.bar_label(axis.containers[-1], [f" {middle:.2f}" for middle in middles])
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_title(title, loc="left", fontsize="medium")
    axes[-1, 0].set_xlabel(f"{unit}, median and all rounds")
    _keep(figure, name, results)


def lines(
    name: str, unit: str, panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]], results: Path | None
) -> None:
    """Draw a panel of lines for each title: how what is measured grows.

    Args:
        name: of the file in ``results``.

        unit: what is measured.

        panels: what is on the axis, then label, then the values of all rounds for each place on it.

        results: where it is kept; None: nothing is drawn.
    """
    pyplot = _pyplot(name, results)
    if pyplot is None or results is None:
        return
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4 * len(panels), 4.5), sharey=True, squeeze=False, layout="constrained"
    )
    for (title, panel), axis in zip(panels.items(), axes[0], strict=True):
        for label, points in panel.items():
            middles = [statistics.median(values) for values in points.values()]
            axis.errorbar(list(points), middles, yerr=_whiskers(points.values(), middles), marker="o", label=label)
        places = list(next(iter(panel.values())))
        if max(places) >= 100 * min(places):
            axis.set_xscale("log")
        else:
            axis.set_xticks(places)
        axis.set_xlabel(title)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    axes[0, 0].set_ylabel(f"{unit}, median and all rounds")
    axes[0, 0].set_ylim(bottom=0)
    _keep(figure, name, results)


def _whiskers(rounds: Any, middles: Sequence[float]) -> list[list[float]]:  # noqa: ANN401 - views of mappings
    pairs = list(zip(rounds, middles, strict=True))
    return [[middle - min(values) for values, middle in pairs], [max(values) - middle for values, middle in pairs]]


def _pyplot(name: str, results: Path | None) -> Any:  # noqa: ANN401 - it may not be there
    if results is None:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{name}.png is not drawn: matplotlib is not installed", file=sys.stderr)
        return None
    importlib.import_module("matplotlib").use("agg")
    return importlib.import_module("matplotlib.pyplot")


def _keep(figure: Any, name: str, results: Path) -> None:  # noqa: ANN401 - matplotlib's
    results.mkdir(parents=True, exist_ok=True)
    figure.savefig(results / f"{name}.png", dpi=100, metadata={"Software": None})

"""Makes the dashboards' JSON from `panels.py` with Grafana's own library (grafana-foundation-sdk for Grafana 11).

python deploy/grafana/build.py            writes deploy/grafana/dashboards/*.json
python deploy/grafana/build.py --check    fails if those files are stale
"""

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardRangeMapOptions,
    DataSourceRef,
    RangeMap,
    ValueMappingResult,
    VariableRefresh,
    VariableSort,
)

ROOT = Path(__file__).resolve().parents[2]
# Run as a file, Python has this folder on its path and not the project's root.
sys.path.insert(0, str(ROOT))

from deploy.grafana.panels import BOARDS, Board, Panel, Query, Variable  # noqa: E402

__all__ = ["FOLDER", "main", "rendered"]

FOLDER = Path(__file__).resolve().parent / "dashboards"

_SOURCE = DataSourceRef("prometheus", "${datasource}")
_HEIGHT = 8
_STAT_HEIGHT = 4


def _query(number: int, query: Query, instant: bool) -> prometheus.Dataquery:
    built = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number))
    return built.instant() if instant else built.range()


def _stat(panel: Panel) -> stat.Panel:
    built = stat.Panel().title(panel.title).description(panel.description).datasource(_SOURCE)
    built = built.unit(panel.unit).span(panel.width).height(_STAT_HEIGHT)
    if panel.unit == "none":
        # Prometheus extrapolates increases, so a count may not be whole.
        built = built.decimals(0)
    if panel.negative is not None:
        # No query gives a value between -1 and 0.
        below = DashboardRangeMapOptions(to=-1, result=ValueMappingResult(text=panel.negative))
        built = built.mappings([RangeMap(below)])
    return built.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _timeseries(panel: Panel) -> timeseries.Panel:
    built = timeseries.Panel().title(panel.title).description(panel.description).datasource(_SOURCE)
    built = built.unit(panel.unit).span(panel.width).height(_HEIGHT).show_points(VisibilityMode.NEVER)
    built = built.legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    ).tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    if panel.least is not None:
        built = built.axis_soft_min(panel.least)
    if panel.most is not None:
        built = built.axis_soft_max(panel.most)
    if panel.kind == "bars":
        built = built.draw_style(GraphDrawStyle.BARS).fill_opacity(70).line_width(0)
        return built.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return built.draw_style(GraphDrawStyle.LINE).line_width(2)


def _variable(variable: Variable) -> dashboard.QueryVariable:
    # Grafana's own editor writes this dictionary for a query of label values.
    query: dict[str, object] = {
        "query": f"label_values({variable.metric}, {variable.name})",
        "refId": "PrometheusVariableQueryEditor-VariableQuery",
    }
    built = dashboard.QueryVariable(variable.name).label(variable.label).datasource(_SOURCE).query(query)
    built = built.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
    return built.multi(True).include_all(True).all_value(".*")


def _board(board: Board) -> dashboard.Dashboard:
    built = dashboard.Dashboard(board.title).uid(board.uid).description(board.description).tags(["tacit"]).readonly()
    built = built.time("now-6h", "now").refresh("30s").tooltip(DashboardCursorSync.CROSSHAIR)
    built = built.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for variable in board.variables:
        built = built.with_variable(_variable(variable))
    for row in board.rows:
        built = built.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            instant = panel.kind == "stat"
            one = _stat(panel) if instant else _timeseries(panel)
            for number, query in enumerate(panel.queries):
                one = one.with_target(_query(number, query, instant))
            built = built.with_panel(one)
    return built


def rendered() -> dict[Path, str]:
    """Return the text of each dashboard file."""
    return {
        FOLDER / f"{board.uid}.json": json.dumps(_board(board).build(), cls=JSONEncoder, indent=2, sort_keys=True)
        + "\n"
        for board in BOARDS
    }


def main(arguments: list[str]) -> int:
    """Write or check the dashboards and return the exit status."""
    stale = 0
    for path, text in rendered().items():
        if arguments == ["--check"]:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                sys.stderr.write(f"{path.relative_to(ROOT)} is stale; run python deploy/grafana/build.py\n")
                stale = 1
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

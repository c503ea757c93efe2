"""The report of a packed directory: a page for people and a model card for the hub.

`contents` reads the manifest, `experts` looks into the packed tensors, `quality` runs the models, one at a time;
`charts` draws, `page` and `card` write, `writing` puts both files into the directory. Nothing here changes a weight.
"""

from moepack.report.writing import ReportFiles, write_report

__all__ = ["ReportFiles", "write_report"]

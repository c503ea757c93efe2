"""The report of a packed directory: an HTML page and a model card for the Hub.

`contents` reads the manifest, `experts` reads the packed tensors, `quality` runs the models one at a time, `charts`
draws, `page` and `card` render, and `writing` writes both files into the directory. `upload` uploads a directory with
its card. Weights are never changed.
"""

from moepack.report.upload import push
from moepack.report.writing import ReportFiles, write_report

__all__ = ["ReportFiles", "push", "write_report"]

"""The report of a packed directory: an HTML page and a model card for the Hub.

`contents` reads the manifest, `experts` reads the packed tensors, `quality` runs the models one at a time, `charts`
draws, `page` and `card` render, and `writing` writes both files into the directory. `upload` uploads a directory with
its card. Weights are never changed.

`moepack inspect` needs `contents` only, so the package imports none of them.
"""

"""Compress a checkpoint and print the anonymous memory taken by the imports alone. A standalone script.

python memory_worker.py MODEL OUT
"""

import sys

import moepack.methods
import moepack.pipeline
from moepack.memory import anonymous_bytes
from moepack.methods.qmoe.ternary import Ternary

print(anonymous_bytes(), flush=True)
report = moepack.pipeline.compress(sys.argv[1], sys.argv[2], method=Ternary(), threads=1)
print(report.peak_memory, report.expert_weights, flush=True)
